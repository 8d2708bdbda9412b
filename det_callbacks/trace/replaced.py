"""The registry of what is replaced in torch at run time: each method, for as long as somebody needs it.

Replaced are, and only while a step or a fit is under way (looked at in torch 2.13):

* ``OutputGraph.call_user_compiler`` and ``CompiledFxGraph.__call__``, to know which graph runs (compiled_graphs.py);
* ``capture_begin`` and ``replay`` of ``_CUDAGraph``, which run ops that no mode sees (cuda_graphs.py).

Attributes of Lightning's loops and strategy, and of loaders and samplers, stand in ``replaced_in_lightning.py``.

Constructing a callback or a mode replaces nothing.
"""

from collections.abc import Callable
from typing import Any


class Replacements:
    """Methods that stand where others stood, and who needs that."""

    def __init__(self) -> None:
        self._methods: dict[tuple[Any, str], tuple[Any, Any]] = {}
        self._holders: dict[tuple[Any, str], set[int]] = {}

    def hold(self, holder: object, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Have a method replaced by ``make(method)`` until this holder, and all others, release it.

        Nothing is done where the class has no method of that name, as in builds of torch without CUDA.
        """
        before = vars(owner).get(name)
        if before is None:
            return
        # first: so that ``release`` finds what Ctrl-C has left half done
        self._holders.setdefault((owner, name), set()).add(id(holder))
        if (owner, name) not in self._methods:
            ours = make(before)
            self._methods[owner, name] = before, ours
            setattr(owner, name, ours)

    def release(self, holder: object) -> None:
        """Put back what nobody else holds, but for what somebody else has replaced since; may be called again."""
        for place, holders in list(self._holders.items()):
            holders.discard(id(holder))
            if holders:
                continue
            del self._holders[place]
            owner, name = place
            before, ours = self._methods.pop(place, (None, None))
            if ours is not None and vars(owner).get(name) is ours:
                setattr(owner, name, before)

    @property
    def names(self) -> list[str]:
        """The methods that are replaced now."""
        return sorted(f"{owner.__name__}.{name}" for owner, name in self._methods)


REPLACED = Replacements()
