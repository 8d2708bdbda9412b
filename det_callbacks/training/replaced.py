"""Replaces methods of single objects while a training is followed (for torch's methods see ``trace/compiled``)."""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import ModuleType
from typing import Any

OF_SAMPLERS = {"__class__": "of loaders and samplers: Python looks up __iter__ and __next__ in the class"}


class ReplacedMethods:
    """Replaces methods until ``restore``; ``places`` has the reason for each."""

    def __init__(self, places: Mapping[str, str] = OF_SAMPLERS) -> None:
        self._places = places
        self._undo: list[Callable[[], object]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method of an object, or a function of a module, by ``make(method)``; ``__class__`` its class."""
        assert name in self._places, "the registry has a reason for each place"
        before = getattr(owner, name)
        setattr(owner, name, make(before))
        is_own = name == "__class__" or isinstance(owner, ModuleType | type)
        # else the method is still in the class
        undo = partial(setattr, owner, name, before) if is_own else partial(vars(owner).pop, name, None)
        self._undo.append(undo)

    def around(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        def make(before: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(before)
            def ours(*args: Any, **kwargs: Any) -> Any:
                return call(before, *args, **kwargs)

            return ours

        self.put(owner, name, make)

    def restore(self) -> None:
        undo, self._undo = self._undo, []
        for function in reversed(undo):
            function()
