"""Methods of Lightning's objects that are replaced until the fit ends, or, of checkpoints, until the next stage."""

from collections.abc import Mapping

from det_callbacks.internals.lightning import LOAD_LOADER_STATES, RESTORE
from det_callbacks.internals.replaced import OF_SAMPLERS

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
