"""The registry of what is replaced in Lightning and in data loaders, always on the objects of one Trainer.

All is put back when the fit ends or raises, but for what handles checkpoints: that stays until the next stage begins,
since they are saved later, too. Read at Lightning 2.5 and 2.6; ``trace/replaced.py`` is the same for torch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from det_callbacks.internals.lightning import LOAD_LOADER_STATES, RESTORE

PLACES: Mapping[str, str] = {
    "training_step": "of the strategy: no hook encloses it in automatic and in manual optimization",
    "log": "of the loop's results: what self.log adds up is kept out of the trace, since a resumed epoch begins anew",
    "reset": "of the loop's results: likewise",
    RESTORE: "of the checkpoint connector: strategies that shard load after on_fit_start",
    LOAD_LOADER_STATES: "of the fit loop: runs just before the loader is first iterated over",
    "setup_data": "of the fit loop: begins a fit's run, with the counts of the loops as they have to be",
    "on_run_start": "of the epoch loop: begins the batches of an epoch, after its hooks",
    "save_checkpoint": "of the strategy: every checkpoint is saved through it",
    "load_checkpoint": "of the strategy: every checkpoint is loaded through it",
    "remove_checkpoint": "of the strategy: every checkpoint is removed through it",
    "__class__": "of the loader and the samplers of a fit: Python looks __iter__ and __next__ up in the class",
}
"""Each method that is replaced, with the reason."""


class ReplacedInLightning:
    """Methods of single objects that ours stand for, until ``restore``."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method of an object by ``make(method)``; of ``__class__`` it makes a class of the class."""
        assert name in PLACES, "each place stands in the registry with its reason"
        before = getattr(owner, name)
        setattr(owner, name, make(before))
        undo = partial(setattr, owner, name, before) if name == "__class__" else partial(vars(owner).pop, name, None)
        self._undo.append(undo)

    def restore(self) -> None:
        """Put everything back, the last first; may be called more than once."""
        undo, self._undo = self._undo, []
        for function in reversed(undo):
            function()
