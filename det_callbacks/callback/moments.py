"""What the callback knows of the moment at which a checkpoint is saved."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from det_callbacks.callback.auditing import Auditing
from det_callbacks.callback.recording import Recording
from det_callbacks.callback.verifying import Verifying
from det_callbacks.checkpoint import SaveContext
from det_callbacks.environment import capture_environment, trainer_choices


class Moments:
    """The Trainer and the run of a callback."""

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._run: Recording | Verifying | Auditing | None = None
        self._identity: Mapping[str, Any] | None = None
        self._environment: Mapping[str, Any] | None = None

    def begin_stage(self, trainer: pl.Trainer) -> None:
        """Know the Trainer; the run of an earlier stage is over."""
        self._trainer = trainer
        self._run = self._identity = self._environment = None

    def begin_fit(
        self,
        run: Recording | Verifying | Auditing,
        *,
        mode: str,
        reference: str | Path | None,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        """Know the run of a fit, and the environment where it was captured already."""
        self._run = run
        self._environment = environment
        self._identity = {
            "id": run.run_id if isinstance(run, Recording) else None,
            "mode": mode,
            "reference": None if reference is None else str(reference),
        }

    def context(self) -> SaveContext:
        """Return the moment."""
        trainer = self._trainer
        assert trainer is not None, "a stage began"
        if self._environment is None:
            choices = trainer_choices(trainer, trainer.lightning_module)
            self._environment = capture_environment(choices=choices).to_dict()
        is_fit = trainer.state.fn == TrainerFn.FITTING
        # At a batch's end this one is processed and not yet completed; after an exception in it, neither.
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        num_batches = progress.processed
        run = self._run
        return SaveContext(
            run=self._identity,
            step=num_batches - 1 if is_fit and num_batches else None,
            epoch=trainer.current_epoch if is_fit else None,
            chain=run.chain if isinstance(run, Recording) else None,
            program=run.program if isinstance(run, Recording | Verifying) else None,
            environment=self._environment,
        )
