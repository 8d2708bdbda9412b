"""Writes digests next to each checkpoint that Lightning saves, and checks each one that it loads.

Rank 0 first removes the old sidecar, and last writes the new one, so a kill in between leaves a
checkpoint without digests.
"""

import shutil
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io.async_plugin import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from det_callbacks.checkpoint.files import (
    ANOTHER_PLACE,
    RESUME,
    SIDECAR,
    beside,
    entries_of,
    is_remote,
    write_sidecar,
)
from det_callbacks.checkpoint.loaded import require_saved, unchecked_line
from det_callbacks.checkpoint.messages import uncovered_save_line
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.integrations.lightning.checkpoint.resume import Resuming
from det_callbacks.internals.lightning import WrappingCheckpointIO, either
from det_callbacks.internals.replaced import ReplacedMethods
from det_callbacks.report.console import print_closing_line
from det_callbacks.runs.files import writing
from det_callbacks.runs.peers import Peers
from det_callbacks.trace.optimizers import parameters_of
from det_callbacks.training.arguments import Resume


class CheckpointWatch:
    """Follows the checkpoints of one stage of a Trainer, and resumes from them.

    It replaces methods of the strategy until ``close``, even after the fit, because other callbacks
    save checkpoints in ``teardown``. Loading a checkpoint of the same stage, as Lightning's Tuner
    does, is not a resume.
    """

    def __init__(self, trainer: pl.Trainer, resume: Resume, peers: Peers) -> None:
        self._trainer = trainer
        self._is_fit = trainer.state.fn == TrainerFn.FITTING
        self._run: Mapping[str, str | None] | None = None
        self._replaced = ReplacedMethods()
        self._is_uncovered_reported = False
        self._saved: set[str] = set()
        self.is_resumed = False
        self.resuming = Resuming(trainer, peers, is_exact=self._is_fit and resume == "exact")
        wrappers: dict[str, Callable[..., Any]] = {
            "save_checkpoint": self._save,
            "load_checkpoint": self._load,
            "remove_checkpoint": self._remove,
        }
        for name, wrapper in wrappers.items():
            # the method of the class: an earlier callback of this Trainer may
            # have replaced the instance's
            method: Any = getattr(type(trainer.strategy), name)
            ours: Any = partial(wrapper, partial(method, trainer.strategy))
            self._replaced.put(trainer.strategy, name, partial(lambda ours, _: ours, ours))

    def begin_fit(self, run: Mapping[str, str | None]) -> None:
        self._run = run
        self.resuming.begin_fit()

    def close(self) -> None:
        self.resuming.detach()
        self._replaced.restore()

    def _save(
        self, save: Callable[..., None], checkpoint: Any, filepath: Any, *rest: Any, **more: Any
    ) -> None:
        path, trainer = str(filepath), self._trainer
        self._saved.add(path)
        io: Any = trainer.strategy.checkpoint_io
        while isinstance(io, either(WrappingCheckpointIO)) and not isinstance(
            io, either(AsyncCheckpointIO)
        ):
            io = io.checkpoint_io
        is_covered = not is_remote(path) and not isinstance(io, either(AsyncCheckpointIO))
        moment: dict[str, Any] = {}
        if trainer.is_global_zero and not is_remote(path):
            with writing(path, instead=ANOTHER_PLACE):
                beside(Path(path), SIDECAR).unlink(missing_ok=True)
        if is_covered:
            path, moment = self._begin_save(path)
        save(checkpoint, filepath, *rest, **more)
        if not trainer.is_global_zero:
            return
        if is_covered and Path(path).exists():
            moment["parameters"] = _parameter_names(trainer)
            write_sidecar(Path(path), entries=lambda: entries_of(checkpoint), **moment)
        elif not self._is_uncovered_reported:
            self._is_uncovered_reported = True
            print_closing_line(uncovered_save_line(path))

    def _begin_save(self, path: str) -> tuple[str, dict[str, Any]]:
        """Agree on the identity and path of a save, and write each rank's part;
        return the path and sidecar fields.

        The path may differ between ranks, if it contains a metric.
        """
        trainer = self._trainer
        id = uuid.uuid4().hex  # random bits of the operating system: advances no generator
        # after an exception the other ranks may never save; then no exact resume is possible
        is_together = trainer.world_size == 1 or trainer.state.status != TrainerStatus.INTERRUPTED
        if trainer.world_size > 1 and is_together:
            with unobserved():
                id, path = trainer.strategy.broadcast((id, path))
        is_resumable = is_together and self._run is not None and self.resuming.save(path, id)
        if is_resumable and trainer.world_size > 1:
            with unobserved():
                trainer.strategy.barrier("what the ranks save for an exact resume")
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        # includes the batch that just ended, but not one that raised
        num_batches = int(progress.processed)
        return path, {
            "id": id,
            "run": self._run,
            "step": num_batches - 1 if self._is_fit and num_batches else None,
            "epoch": trainer.current_epoch if self._is_fit else None,
            "num_ranks": trainer.world_size if is_resumable else 0,
        }

    def _load(self, load: Callable[..., Any], checkpoint_path: Any, *rest: Any, **more: Any) -> Any:
        """Load a checkpoint if its bytes match its digest; reads it twice."""
        path = str(checkpoint_path)
        place = Path(path).resolve()
        sidecar = None if is_remote(path) or not place.exists() else require_saved(place)
        checkpoint = load(checkpoint_path, *rest, **more)
        if sidecar is None:
            print_closing_line(unchecked_line(path))
        if self._is_fit and path not in self._saved:
            self.is_resumed = True
            self.resuming.loaded(path, sidecar)
        return checkpoint

    def _remove(self, remove: Callable[..., None], filepath: Any) -> None:
        is_ours = self._trainer.is_global_zero and not is_remote(filepath)
        if is_ours:  # first: a kill in between must not leave digests of nothing
            with writing(filepath, instead=ANOTHER_PLACE):
                beside(Path(filepath), SIDECAR).unlink(missing_ok=True)
        remove(filepath)
        self._saved.discard(str(filepath))
        if is_ours:
            # another rank may be writing there
            shutil.rmtree(beside(Path(filepath), RESUME), ignore_errors=True)


def _parameter_names(trainer: pl.Trainer) -> dict[str, str]:
    """Return a mapping from the path of a state in the optimizers' states to
    the name of its parameter.
    """
    names = {id(parameter): name for name, parameter in trainer.lightning_module.named_parameters()}
    found: dict[str, str] = {}
    for number, optimizer in enumerate(trainer.optimizers):
        for place, parameter in enumerate(parameters_of(optimizer)):
            found[f"{number}/state/{place}"] = names.get(id(parameter), "")
    return found
