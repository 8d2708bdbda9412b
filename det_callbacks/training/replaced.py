"""Methods of single objects that ours stand for while a training is followed; ``trace/replaced.py`` is torch's."""

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

OF_SAMPLERS = {"__class__": "of loaders and samplers: Python looks __iter__ and __next__ up in the class"}


class ReplacedMethods:
    """Methods of single objects that ours stand for, until ``restore``; each stands in ``places`` with its reason."""

    places: Mapping[str, str] = OF_SAMPLERS

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method of an object, or a function of a module, by ``make(method)``; of ``__class__`` the class."""
        assert name in self.places, "each place stands in the registry with its reason"
        before = getattr(owner, name)
        setattr(owner, name, make(before))
        # a method that an object has from its class is in the way only while ours is there
        is_own = name == "__class__" or isinstance(owner, ModuleType)
        undo = partial(setattr, owner, name, before) if is_own else partial(vars(owner).pop, name, None)
        self._undo.append(undo)

    def restore(self) -> None:
        """Put everything back, the last first; may be called more than once."""
        undo, self._undo = self._undo, []
        for function in reversed(undo):
            function()
