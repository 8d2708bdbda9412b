"""How a private name is looked up: one that is missing breaks no import, and is known before anything is recorded."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter, methodcaller
from typing import Any

from det_callbacks.errors import UnsupportedVersionError
from det_callbacks.internals.versions import TESTED

RECORDING = "recording"
"""What most names are needed for: recording, verifying, and everything else that traces ops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """A name that another package does not promise to keep.

    Attributes:
        path: from the package on, such as "torch._C._current_graph_task_id".
        purpose: what it is used for.
        needed_for: what is refused without it; "" where the package goes on with less.
        lost: what is lost without it, where the package goes on.
        is_of_instance: whether the class in its path has no such attribute, only its instances.
    """

    path: str
    purpose: str
    needed_for: str = ""
    lost: str = ""
    is_of_instance: bool = False

    def __str__(self) -> str:
        consequence = self.lost or f"{self.needed_for} is refused"
        return f"{self.path} is missing ({self.purpose}): {consequence}"


MISSING = object()
"""What ``find`` returns for a name that is not there."""


def find(path: str) -> Any:
    """Return what a dotted path names, ``MISSING`` where the installed version has nothing there."""
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
    """The private names of one package, each with what was found."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.known: dict[str, PrivateName] = {}
        self.missing: list[PrivateName] = []

    def needed(self, path: str, purpose: str, *, for_: str = RECORDING) -> Any:
        """Return what a name stands for; where it is missing, something that raises when it is used."""
        name = self._note(PrivateName(path=path, purpose=purpose, needed_for=for_))
        found = self._look_up(name)
        return Refusal(self, name) if found is MISSING else found

    def needed_class(self, path: str, purpose: str, *, for_: str = RECORDING) -> Any:
        """Return a class; where it is missing, one that a subclass may have, and of which nothing is an instance."""
        found = self._look_up(self._note(PrivateName(path=path, purpose=purpose, needed_for=for_)))
        return type("Missing", (), {}) if found is MISSING else found

    def attribute(self, path: str, purpose: str, *, for_: str = RECORDING) -> Callable[[Any], Any]:
        """Return a function that reads this attribute of an instance of the class in front of it."""
        found = self.needed(path, purpose, for_=for_)
        return found if isinstance(found, Refusal) else attrgetter(path.rpartition(".")[2])

    def method(self, path: str, purpose: str, *, for_: str = RECORDING) -> Callable[..., Any]:
        """Return a function that calls this method, without arguments, of an instance of the class in front of it."""
        found = self.needed(path, purpose, for_=for_)
        return found if isinstance(found, Refusal) else methodcaller(path.rpartition(".")[2])

    def optional(self, path: str, purpose: str, *, without: Any, lost: str) -> Any:
        """Return what a name stands for, and ``without`` where it is missing."""
        found = self._look_up(self._note(PrivateName(path=path, purpose=purpose, lost=lost)))
        return without if found is MISSING else found

    def later(self, path: str, purpose: str, *, for_: str = RECORDING) -> Callable[[], Any]:
        """Return a function that returns what a name stands for, or raises: for what takes seconds to import."""
        name = self._note(PrivateName(path=path, purpose=purpose, needed_for=for_))

        def look_up() -> Any:
            found = self._look_up(name)
            if found is MISSING:
                raise self.refusal(name)
            return found

        return look_up

    def of_instance(self, path: str, purpose: str, *, for_: str = RECORDING) -> Callable[[Any], Any]:
        """Return a function that reads an attribute, or raises: for what instances get when they are made."""
        name = self._note(PrivateName(path=path, purpose=purpose, needed_for=for_, is_of_instance=True))
        attribute = path.rpartition(".")[2]

        def read(instance: Any) -> Any:
            found = getattr(instance, attribute, MISSING)
            if found is MISSING:
                self._note_missing(name)
                module = type(instance).__module__.partition(".")[0]
                raise self.refusal(name, package=module if module == "pytorch_lightning" else self.package)
            return found

        return read

    def require(self, for_: str) -> None:
        """Raise UnsupportedVersionError where a name is missing without which this cannot work."""
        for name in self.missing:
            if name.needed_for == for_:
                raise self.refusal(name)

    def refusal(self, name: PrivateName, *, package: str = "") -> UnsupportedVersionError:
        """Return the error for a name that is missing and needed, in this package or in its twin."""
        package = package or self.package
        version = import_module(package).__version__
        oldest, newest = TESTED[self.package]
        return UnsupportedVersionError(
            f"Not supported: {package} {version} has no {name.path}, which {name.needed_for} needs "
            f"({name.purpose}). Install a version that det_callbacks was tested with: {package} {oldest} to "
            f"{newest}."
        )

    def losses(self) -> list[str]:
        """Return a sentence for each missing name without which the package goes on with less."""
        return [str(name) for name in self.missing if name.lost]

    def all_missing(self) -> list[str]:
        """Return a sentence for each name that is missing, also of those that nothing has looked up yet."""
        for name in self.known.values():
            if not name.is_of_instance:
                self._look_up(name)
        return [str(name) for name in self.missing]

    def _note(self, name: PrivateName) -> PrivateName:
        assert name.path not in self.known, f"{name.path} is listed twice"
        self.known[name.path] = name
        return name

    def _look_up(self, name: PrivateName) -> Any:
        found = find(name.path)
        if found is MISSING:
            self._note_missing(name)
        return found

    def _note_missing(self, name: PrivateName) -> None:
        if name not in self.missing:
            self.missing.append(name)


class Refusal:
    """Stands where a name is missing: it may be passed on, and raises when it is called or looked into."""

    def __init__(self, names: PrivateNames, name: PrivateName) -> None:
        self._error = names.refusal, name

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise."""
        refusal, name = self._error
        raise refusal(name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        refusal, name = self._error
        raise refusal(name)
