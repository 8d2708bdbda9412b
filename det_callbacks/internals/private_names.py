"""Looks up private names; a missing one breaks no import, and is reported before anything is recorded."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

from det_callbacks.errors import UnsupportedVersionError
from det_callbacks.internals.versions import TESTED

RECORDING = "recording"
"""The purpose of most names: everything that traces ops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """A name outside the public API of another package.

    Attributes:
        needed_for: what is refused without it; "" if the package continues without it.
        lost: what is lost without it, if the package continues.
        is_of_instance: whether only instances of the class in its path have the attribute.
        example: an instance that has it, if one can be made at import.
    """

    path: str
    purpose: str
    needed_for: str = ""
    lost: str = ""
    is_of_instance: bool = False
    example: Any = None

    def __str__(self) -> str:
        consequence = self.lost or f"{self.needed_for} is refused"
        return f"{self.path} is missing ({self.purpose}): {consequence}"


MISSING = object()
"""Returned by ``find`` for a missing name."""


def find(path: str, example: Any = None) -> Any:
    """Return the object at a dotted path, or the path's last attribute of an ``example``; ``MISSING`` if none."""
    if example is not None:
        return getattr(example, path.rpartition(".")[2], MISSING)
    module, _, rest = path.partition(".")
    found: Any = import_module(module)
    for name in rest.split("."):
        module = f"{module}.{name}"
        if not hasattr(found, name):
            try:
                found = import_module(module)
            except ImportError:
                return MISSING
        else:
            found = getattr(found, name)
    return found


class PrivateNames:
    def __init__(self, package: str) -> None:
        self.package = package
        self.known: dict[str, PrivateName] = {}
        self.missing: list[PrivateName] = []
        self.readers: dict[str, Callable[[Any], Any]] = {}  # for attributes that only instances have

    def needed(self, path: str, purpose: str, *, for_: str = RECORDING) -> Any:
        """Return the object at a path, or one that raises when it is used."""
        name = self._note(path, purpose, for_)
        found = self._look_up(name)
        return Refusal(self, name) if found is MISSING else found

    def needed_class(self, path: str, purpose: str) -> Any:
        """Return the class at a path, or a class without instances."""
        found = self._look_up(self._note(path, purpose, RECORDING))
        return type("Missing", (), {}) if found is MISSING else found

    def attribute(self, path: str, purpose: str, *, reads: Callable[[str], Any] = attrgetter) -> Callable[[Any], Any]:
        """Return a function that reads this attribute of an instance, or with ``methodcaller`` calls this method."""
        found = self.needed(path, purpose)
        return found if isinstance(found, Refusal) else reads(path.rpartition(".")[2])

    def optional(self, path: str, purpose: str, *, lost: str, without: Any = None) -> Any:
        found = self._look_up(self._note(path, purpose, lost=lost))
        return without if found is MISSING else found

    def name_of(self, path: str, purpose: str, *, example: Any = None) -> str:
        """Return the last part of a path, for code that looks it up in objects."""
        self._look_up(self._note(path, purpose, RECORDING, example=example))
        return path.rpartition(".")[2]

    def later(self, path: str, purpose: str, *, for_: str = RECORDING) -> Callable[[], Any]:
        """Return a function that looks up the name when called, to defer slow imports."""
        name = self._note(path, purpose, for_)

        def look_up() -> Any:
            found = self._look_up(name)
            if found is MISSING:
                raise self.refusal(name)
            return found

        return look_up

    def of_instance(self, path: str, purpose: str, *, for_: str = RECORDING) -> Callable[[Any], Any]:
        """Return a function that reads an attribute that only instances have."""
        name = self._note(path, purpose, for_, is_of_instance=True)
        attribute = path.rpartition(".")[2]

        def read(instance: Any) -> Any:
            found = getattr(instance, attribute, MISSING)
            if found is MISSING:
                self._note_missing(name)
                module = type(instance).__module__.partition(".")[0]
                raise self.refusal(name, package=module if module == "pytorch_lightning" else self.package)
            return found

        self.readers[path] = read
        return read

    def require(self, for_: str) -> None:
        """Raise UnsupportedVersionError if a name is missing that this feature needs."""
        for name in self.missing:
            if name.needed_for == for_:
                raise self.refusal(name)

    def refusal(self, name: PrivateName, *, package: str = "") -> UnsupportedVersionError:
        """Return the error for a missing name that is needed, in this package or its twin."""
        package = package or self.package
        version = import_module(package).__version__
        oldest, newest = TESTED[self.package]
        return UnsupportedVersionError(
            f"Not supported: {package} {version} has no {name.path}, which {name.needed_for} needs "
            f"({name.purpose}). Install a version that det_callbacks was tested with: {package} {oldest} to "
            f"{newest}."
        )

    def losses(self) -> list[str]:
        return [str(name) for name in self.missing if name.lost]

    def all_missing(self) -> list[str]:
        for name in self.known.values():
            if not name.is_of_instance:
                self._look_up(name)
        return [str(name) for name in self.missing]

    def _note(self, path: str, purpose: str, needed_for: str = "", **others: Any) -> PrivateName:
        assert path not in self.known, f"{path} is listed twice"
        name = self.known[path] = PrivateName(path=path, purpose=purpose, needed_for=needed_for, **others)
        return name

    def _look_up(self, name: PrivateName) -> Any:
        found = find(name.path, name.example)
        if found is MISSING:
            self._note_missing(name)
        return found

    def _note_missing(self, name: PrivateName) -> None:
        if name not in self.missing:
            self.missing.append(name)


class Refusal:
    """Stands in for a missing name; raises when it is called or an attribute is read."""

    def __init__(self, names: PrivateNames, name: PrivateName) -> None:
        self._error = partial(names.refusal, name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self._error()

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(attribute) if attribute.startswith("__") else self._error()
