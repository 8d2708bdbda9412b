"""The callback that ``det-callbacks record``, ``verify`` and ``check`` add to a script's Trainers."""

from functools import cache

import lightning.pytorch as pl
from typing_extensions import override

from det_callbacks.errors import SelectionError
from det_callbacks.integrations.command import claim_run, print_errors_plainly, read_arguments, report_to_command
from det_callbacks.integrations.lightning.determinism import DeterminismCallback
from det_callbacks.integrations.lightning.logged import print_beside_bar


class LaunchedCallback(DeterminismCallback):
    """Records all fits of a script as one run, unless the script has a DeterminismCallback."""

    gives_way = is_of_command = True
    _has_claimed = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._is_fitting:
            raise SelectionError(
                "This script trains one model inside the fit of another, but det-callbacks records fits only one after "
                "the other. Add a DeterminismCallback to one Trainer, and start the script without det-callbacks."
            )
        ours = [one for one in vars(trainer)["callbacks"] if isinstance(one, DeterminismCallback)]
        if any(one.mode != "disabled" and not one.gives_way for one in ours):
            if self._has_claimed:
                raise SelectionError(
                    "One Trainer of this script has a DeterminismCallback and another has none, so det-callbacks "
                    "cannot record them as one run. Add the callback to all Trainers, or to none."
                )
            if trainer.is_global_zero and self.mode != "disabled":
                print_beside_bar(trainer, "det_callbacks: the script has its own DeterminismCallback, which is used")
            self.mode = "disabled"
        elif trainer.is_global_zero and not self._has_claimed and self.mode != "disabled":
            claim_run()
            self._has_claimed = True
        super().setup(trainer, pl_module, stage)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        report_to_command(exception)  # Hydra or the script may catch it


@cache  # all Trainers share one run
def launched_callback(asked: str) -> LaunchedCallback:
    """Return the callback of this process; from now on print errors without a traceback."""
    print_errors_plainly()
    return LaunchedCallback(**read_arguments(asked))
