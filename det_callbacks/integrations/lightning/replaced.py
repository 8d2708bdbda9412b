"""Methods of Lightning's objects that are replaced until the fit ends (for checkpoints, until the next stage)."""

from collections.abc import Mapping

from det_callbacks.internals.lightning import LOAD_LOADER_STATES, RESTORE
from det_callbacks.internals.replaced import OF_SAMPLERS

PLACES: Mapping[str, str] = {
    "training_step": "of the strategy: no hook encloses it in both automatic and manual optimization",
    "log": "of the loop's results: keeps self.log's sums out of the trace, since a resumed epoch starts them again",
    "reset": "of the loop's results: likewise",
    RESTORE: "of the checkpoint connector: sharding strategies load after on_fit_start",
    LOAD_LOADER_STATES: "of the fit loop: runs just before the first iteration over the loader",
    "setup_data": "of the fit loop: the start of a fit, where the loops' counts are corrected",
    "on_run_start": "of the epoch loop: begins the batches of an epoch, after its hooks",
    "save_checkpoint": "of the strategy: saves every checkpoint",
    "load_checkpoint": "of the strategy: loads every checkpoint",
    "remove_checkpoint": "of the strategy: removes every checkpoint",
    **OF_SAMPLERS,
}
"""Each replaced method, with the reason."""
