"""The registry of what is replaced in Lightning and in data loaders, always on the objects of one Trainer.

All is put back when the fit ends or raises, but for what handles checkpoints: that stays until the next stage begins,
since they are saved later, too. Read at Lightning 2.5 and 2.6; ``trace/compiled/replaced.py`` is the same for torch.
"""

from collections.abc import Mapping

from det_callbacks.internals.lightning import LOAD_LOADER_STATES, RESTORE
from det_callbacks.training.replaced import OF_SAMPLERS, ReplacedMethods

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
    **OF_SAMPLERS,
}
"""Each method that is replaced, with the reason."""


class ReplacedInLightning(ReplacedMethods):
    """Methods of single objects of Lightning that ours stand for, until ``restore``."""

    places = PLACES
