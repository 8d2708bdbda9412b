"""The checkpoints of a callback's Trainer: their digests, and the state beside them that makes a resume exact."""

from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from det_callbacks.callback.auditing import Auditing
from det_callbacks.callback.checkpoints import CheckpointWatch
from det_callbacks.callback.choices import trainer_choices
from det_callbacks.callback.loading import Read
from det_callbacks.callback.recording import Recording
from det_callbacks.callback.restoring import Resume
from det_callbacks.callback.resuming import Resuming
from det_callbacks.callback.verifying import Verifying
from det_callbacks.checkpoint import SaveContext
from det_callbacks.checkpoint.saving import new_id
from det_callbacks.checkpoint.sidecar import Sidecar
from det_callbacks.environment import capture_environment
from det_callbacks.runs.peers import ALONE, Peers


class Checkpointing:
    """What is written beside the checkpoints of one callback's Trainer, and read again when one is loaded.

    Args:
        resume: "exact", "warn" or "plain", see ``Restoring``.
        peers: the processes of the Trainer.
    """

    def __init__(self, *, resume: Resume, peers: Peers = ALONE) -> None:
        self._peers = peers
        self._secret: str | None = None
        self._num_batches, self._num_saves = -1, Counter[str]()
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
        self._run = self._identity = self._environment = self._secret = None
        self._watch.attach(trainer)
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
        if self._peers.world_size > 1:
            # by which they name their saves alike without talking: an exception may have one of them save alone
            self._secret = self._peers.agree(new_id, task="naming the checkpoints")[0]
        self._environment = environment
        self._identity = {
            "id": None if isinstance(run, Auditing) else run.run_id,
            "mode": mode,
            "reference": None if reference is None else str(reference),
        }

    def end_fit(self) -> None:
        """Leave loops, loaders and ModelCheckpoints; checkpoints are still followed, since some are saved later."""
        self.resuming.detach()

    def context(self, path: str) -> SaveContext:
        """Return the moment of a save."""
        trainer = self._trainer
        assert trainer is not None, "a stage began"
        if self._environment is None:
            choices = trainer_choices(trainer, trainer.lightning_module)
            self._environment = capture_environment(choices=choices).to_dict()
        is_fit = trainer.state.fn == TrainerFn.FITTING
        num_batches = _num_batches(trainer)
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

    def common_id(self, path: str) -> str | None:
        """Return the identity of a save of this fit, the same on all ranks: they save at the same steps."""
        if self._secret is None or self._trainer is None:
            return None
        name, num_batches = Path(path).name, _num_batches(self._trainer)
        if num_batches != self._num_batches:
            self._num_batches, self._num_saves = num_batches, Counter()
        self._num_saves[name] += 1
        text = f"{self._secret} {num_batches} {self._num_saves[name]} {name}"
        return sha256(text.encode()).hexdigest()[: len(self._secret)]

    def _loaded(self, path: str, sidecar: Sidecar | None, read: Read) -> None:
        trainer = self._trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            read(0)  # what is damaged is said in any case
            return
        is_saved = sidecar is not None and sidecar.num_ranks > 0
        ranks = {"rank": trainer.global_rank, "world_size": trainer.world_size}
        self.resuming.restoring.loaded(path, read, is_saved=is_saved, **ranks)


def _num_batches(trainer: pl.Trainer) -> int:
    """Return how many batches were processed: at a batch's end this one too, after an exception in it not."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(progress.processed)
