"""The checkpoints of a callback's Trainer: their digests, and the state beside them that makes a resume exact."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from det_callbacks.callback.auditing import Auditing
from det_callbacks.callback.checkpoints import CheckpointWatch
from det_callbacks.callback.recording import Recording
from det_callbacks.callback.restoring import Resume
from det_callbacks.callback.resuming import Resuming
from det_callbacks.callback.verifying import Verifying
from det_callbacks.checkpoint import SaveContext
from det_callbacks.checkpoint.sidecar import Sidecar
from det_callbacks.environment import capture_environment, trainer_choices


class Checkpointing:
    """What is written beside the checkpoints of one callback's Trainer, and read again when one is loaded.

    Args:
        require_digests: loading a checkpoint without digests beside it is an error.
        resume: "exact", "warn" or "plain", see ``Resuming``.
    """

    def __init__(self, *, require_digests: bool, resume: Resume) -> None:
        self._require_digests = require_digests
        self._watch = CheckpointWatch(self)
        self._watch.on_loaded = self._loaded
        self.resuming = Resuming(resume, self._watch.amend)
        self._trainer: pl.Trainer | None = None
        self._run: Recording | Verifying | Auditing | None = None
        self._identity: Mapping[str, Any] | None = None
        self._environment: Mapping[str, Any] | None = None

    def begin_stage(self, trainer: pl.Trainer) -> None:
        """Stand in the Trainer's ways of saving and loading; the run of an earlier stage is over."""
        self._trainer = trainer
        self._run = self._identity = self._environment = None
        self._watch.attach(trainer, require_digests=self._require_digests)
        if trainer.state.fn == TrainerFn.FITTING:
            self.resuming.attach(trainer)

    def begin_fit(
        self,
        run: Recording | Verifying | Auditing,
        *,
        mode: str,
        reference: Path | None,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        """Know the run of a fit, and the environment where it was captured already."""
        self._run = run
        self._environment = environment
        self._identity = {
            "id": None if isinstance(run, Auditing) else run.run_id,
            "mode": mode,
            "reference": None if reference is None else str(reference),
        }

    def end_fit(self) -> None:
        """Leave loops, loaders and ModelCheckpoints; checkpoints are still followed, since some are saved later."""
        self.resuming.detach()

    def end_stage(self) -> None:
        """Finish what is being written."""
        self._watch.end_fit()

    def context(self, path: str) -> SaveContext:
        """Return the moment of a save."""
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
            chain=run.chain if isinstance(run, Recording | Verifying) else None,
            program=run.program if isinstance(run, Recording | Verifying) else None,
            environment=self._environment,
            attachments=self.resuming.files(path) if is_fit and run is not None else {},
        )

    def _loaded(self, path: str, sidecar: Sidecar | None, attachments: Mapping[str, bytes]) -> None:
        trainer = self._trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        saved = () if sidecar is None or sidecar.resume is None else tuple(sidecar.resume.files)
        self.resuming.restoring.loaded(
            path, attachments, saved=saved, rank=trainer.global_rank, world_size=trainer.world_size
        )
