"""Looks up private names; a missing one breaks no import, and is reported
before anything is recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

from det_callbacks.errors import UnsupportedVersionError
from det_callbacks.internals.versions import TESTED


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """A name outside the public API of another package.

    Attributes:
        is_of_instance: whether only instances of the class in its path have the attribute.
        example: an instance that has it, if one can be made at import.
    """

    path: str
    purpose: str
    is_of_instance: bool = False
    example: Any = None


MISSING = object()
"""Returned by ``find`` for a missing name."""


def find(path: str, example: Any = None) -> Any:
    """Return the object at a dotted path, or the path's last attribute of an ``example``;
    ``MISSING`` if none.
    """
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


class Placeholder(type):
    """The type of a missing name's placeholder, a class that raises when the name is used."""

    error: Callable[[], UnsupportedVersionError]

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise cls.error()

    def __getattr__(cls, attribute: str) -> Any:
        raise AttributeError(attribute) if attribute.startswith("__") else cls.error()


class PrivateNames:
    def __init__(self, package: str) -> None:
        self.package = package
        self.known: dict[str, PrivateName] = {}
        self.missing: list[PrivateName] = []
        # for attributes that only instances have
        self.readers: dict[str, Callable[[Any], Any]] = {}

    def needed(self, path: str, purpose: str) -> Any:
        """Return the object at a path, or a placeholder, which may also be a base class."""
        name = self._note(path, purpose)
        found = self._look_up(name)
        if found is MISSING:
            return Placeholder("Missing", (), {"error": staticmethod(partial(self.refusal, name))})
        return found

    def attribute(
        self, path: str, purpose: str, *, reads: Callable[[str], Any] = attrgetter
    ) -> Callable[[Any], Any]:
        """Return a function that reads this attribute of an instance,
        or with ``methodcaller`` calls this method.
        """
        found = self.needed(path, purpose)
        return found if isinstance(found, Placeholder) else reads(path.rpartition(".")[2])

    def name_of(self, path: str, purpose: str, *, example: Any = None) -> str:
        """Return the last part of a path, for code that looks it up in objects."""
        self._look_up(self._note(path, purpose, example=example))
        return path.rpartition(".")[2]

    def later(self, path: str, purpose: str) -> Callable[[], Any]:
        """Return a function that looks up the name when called, to defer slow imports."""
        name = self._note(path, purpose)

        def look_up() -> Any:
            found = self._look_up(name)
            if found is MISSING:
                raise self.refusal(name)
            return found

        return look_up

    def of_instance(self, path: str, purpose: str) -> Callable[[Any], Any]:
        """Return a function that reads an attribute that only instances have."""
        name = self._note(path, purpose, is_of_instance=True)
        attribute = path.rpartition(".")[2]

        def read(instance: Any) -> Any:
            found = getattr(instance, attribute, MISSING)
            if found is MISSING:
                self._note_missing(name)
                module = type(instance).__module__.partition(".")[0]
                raise self.refusal(
                    name, package=module if module == "pytorch_lightning" else self.package
                )
            return found

        self.readers[path] = read
        return read

    def require(self) -> None:
        """Raise UnsupportedVersionError if a name is missing."""
        for name in self.missing:
            raise self.refusal(name)

    def refusal(self, name: PrivateName, *, package: str = "") -> UnsupportedVersionError:
        """Return the error for a missing name of this package or its twin."""
        lack = self._describe(name, package or self.package)
        return UnsupportedVersionError(f"Not supported: {lack}.")

    def all_missing(self) -> list[str]:
        """Return what ``refusal`` says of each missing name."""
        for name in self.known.values():
            if not name.is_of_instance:
                self._look_up(name)
        return [self._describe(name, self.package) for name in self.missing]

    def _describe(self, name: PrivateName, package: str) -> str:
        installed = import_module(package).__version__
        oldest, newest = TESTED[self.package]
        return (
            f"{package} {installed} has no {name.path} ({name.purpose}), which det_callbacks "
            f"needs: install {package} {oldest} to {newest}"
        )

    def _note(self, path: str, purpose: str, **others: Any) -> PrivateName:
        assert path not in self.known, f"{path} is listed twice"
        name = self.known[path] = PrivateName(path=path, purpose=purpose, **others)
        return name

    def _look_up(self, name: PrivateName) -> Any:
        found = find(name.path, name.example)
        if found is MISSING:
            self._note_missing(name)
        return found

    def _note_missing(self, name: PrivateName) -> None:
        if name not in self.missing:
            self.missing.append(name)
