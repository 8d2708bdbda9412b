"""The checkpoints of a callback's Trainer: their digests, and the state beside them that makes a resume exact."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from det_callbacks.callback.manifest import trainer_choices
from det_callbacks.callback.session import Session
from det_callbacks.checkpoint import SaveContext, Sidecar
from det_callbacks.checkpoint.io import CheckpointWatch
from det_callbacks.environment import capture_environment
from det_callbacks.resume.session import Resume, Resuming


class Checkpointing:
    """What is written beside the checkpoints of one callback's Trainer, and read again when one is loaded.

    Args:
        resume: "exact", "warn" or "plain", see ``Resuming``.
    """

    def __init__(self, *, resume: Resume) -> None:
        self.resuming = Resuming(resume)
        self._watch = CheckpointWatch(self)
        self._trainer: pl.Trainer | None = None
        self._run: Session | None = None
        self._identity: Mapping[str, Any] | None = None
        self._environment: Mapping[str, Any] | None = None

    def begin_stage(self, trainer: pl.Trainer) -> None:
        """Stand in the Trainer's ways of saving and loading; the run of an earlier stage is over."""
        self._trainer = trainer
        self._run = self._identity = self._environment = None
        self._watch.attach(trainer)
        if self._is_fit:
            self.resuming.attach(trainer)

    def begin_fit(self, run: Session) -> None:
        """Know the run of a fit, and its environment."""
        self._run = run
        self._environment = run.stage.manifest["environment"]
        reference = run.arguments.reference
        self._identity = {
            "id": run.run_id,
            "mode": run.arguments.mode,
            "reference": None if reference is None else str(reference),
        }

    def end_fit(self) -> None:
        """Leave loops and loaders; checkpoints are still followed, since some are saved later."""
        self.resuming.detach()

    def context(self) -> SaveContext:
        """Return the moment of a save."""
        trainer, run = self._trainer, self._run
        assert trainer is not None, "a stage began"
        if self._environment is None:
            choices = trainer_choices(trainer, trainer.lightning_module)
            self._environment = capture_environment(choices=choices).to_dict()
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        num_batches = int(progress.processed)  # at a batch's end this one too, after an exception in it not
        return SaveContext(
            run=self._identity,
            step=num_batches - 1 if self._is_fit and num_batches else None,
            epoch=trainer.current_epoch if self._is_fit else None,
            chain=None if run is None else run.chain,
            program=None if run is None else run.program,
            environment=self._environment,
        )

    def keep(self, path: str, id: str) -> bool:
        """Write what this rank keeps for an exact resume of a save."""
        return self._is_fit and self._run is not None and self.resuming.keep(path, id)

    def loaded(self, path: str, sidecar: Sidecar | None) -> None:
        """Go on from a checkpoint that was loaded."""
        if self._is_fit:
            self.resuming.loaded(path, sidecar)

    @property
    def _is_fit(self) -> bool:
        return self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING
