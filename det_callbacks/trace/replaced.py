"""Methods of torch that are replaced for a while."""

from collections.abc import Callable
from typing import Any


class Replaced:
    """What was replaced and stands there no longer than ``put_back``."""

    def __init__(self) -> None:
        self._methods: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method by ``make(method)``, unless it is replaced already, or its class has none of that name."""
        before = vars(owner).get(name)
        if before is not None and (owner, name) not in self._methods:
            ours = make(before)
            self._methods[owner, name] = before, ours
            setattr(owner, name, ours)

    def put_back(self) -> None:
        """Put all back but what somebody else has replaced since; may be called more than once."""
        for (owner, name), (before, ours) in self._methods.items():
            if vars(owner).get(name) is ours:
                setattr(owner, name, before)
        self._methods.clear()
