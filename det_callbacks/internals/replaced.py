"""Methods that are replaced while a run is recorded; docs/explanation/replaced.md
lists each, with the reason.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

_INHERITED = object()


def wrapper_of(before: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs ``call(before, *args, **kwargs)``."""

    @wraps(before)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return call(before, *args, **kwargs)

    return ours


def subclass_of(base: Any, **methods: Any) -> Any:
    """Return a subclass of the same name, for ``put``; instances are pickled and copied as
    instances of ``base``.
    """

    def reduce(self: Any, _protocol: Any) -> Any:
        ours, self.__class__ = self.__class__, base
        try:
            return self.__reduce_ex__(1)  # later protocols compare the class with the object's own
        finally:
            self.__class__ = ours

    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce_ex__": reduce,
    }
    return type(base.__name__, (base,), {**names, **methods})


class ReplacedMethods:
    """Replaces methods until ``restore``."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, ours

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method of an object, a class or a module by ``make(method)``;
        of ``__class__`` the class.
        """
        before = getattr(owner, name)
        self._set(owner, name, before, make(before))

    def around(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace a method by one that runs ``call(method, *args, **kwargs)``."""
        before = getattr(owner, name)
        self._set(owner, name, before, wrapper_of(before, call))

    def has_replaced(self, owner: Any, name: str) -> bool:
        # at each step: a generator costs more
        for one, known, *_ in self._replaced:  # noqa: SIM110
            if one is owner and known == name:
                return True
        return False

    def _set(self, owner: Any, name: str, before: Any, ours: Any) -> None:
        is_own = name == "__class__" or isinstance(owner, ModuleType | type)
        self._replaced.append((owner, name, before if is_own else _INHERITED, ours))
        setattr(owner, name, ours)

    def restore(self) -> None:
        """Put back what was there, the last first, unless someone else has replaced ours since."""
        while self._replaced:
            owner, name, before, ours = self._replaced.pop()
            if before is _INHERITED:
                vars(owner).pop(name, None)
            elif getattr(owner, name) is ours:
                setattr(owner, name, before)
