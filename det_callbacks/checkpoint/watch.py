"""Where Lightning saves, loads and removes checkpoints: each gets its sidecar, and is compared with it when loaded.

A save goes like this, so that a kill at any moment leaves nothing that misleads:

1. rank 0 removes the sidecar of the checkpoint that is about to be replaced;
2. every rank writes its part for an exact resume, with the identity of the save, and waits for the others;
3. Lightning saves the checkpoint in its own way;
4. rank 0 reads it back once and writes the new sidecar, atomically.

A kill in between leaves a checkpoint of Lightning's without digests, which is loaded with a line.
"""

import inspect
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io.async_plugin import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO  # looked at in Lightning 2.6.6
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from det_callbacks.checkpoint.check import CheckpointReport, compare_saved, load_plainly
from det_callbacks.checkpoint.entries import entries_of
from det_callbacks.checkpoint.files import (
    SIDECAR,
    Sidecar,
    beside,
    is_remote,
    measure,
    read_sidecar,
    remove_beside,
    resolved,
    write_sidecar,
)
from det_callbacks.checkpoint.resume import Resume, Resuming
from det_callbacks.digest import unobserved
from det_callbacks.errors import CheckpointMismatchError
from det_callbacks.replaced_in_lightning import ReplacedInLightning
from det_callbacks.report.checkpoints import mismatch_text, uncovered_save_line
from det_callbacks.report.fits import print_closing_line
from det_callbacks.runs.peers import Peers

Load = Callable[..., dict[str, Any]]


class CheckpointWatch:
    """Gives every checkpoint of a Trainer its sidecar, compares the ones that it loads, and resumes from them.

    Stands in three methods of the Trainer's strategy, through which Lightning 2.6.6 saves, loads and removes every
    checkpoint. It stays there after a fit: ``trainer.save_checkpoint`` is called then, too, and callbacks save and
    remove checkpoints on exceptions and in their ``teardown`` after every hook of ours.

    Args:
        resume: "exact" or "plain", see ``Resuming``.
        peers: the processes of the Trainer, during a fit.

    Attributes:
        is_resumed: the fit goes on from a checkpoint. One that was saved in the same stage is none: Lightning's Tuner
            saves and loads one to put back what it tried out.
    """

    def __init__(self, resume: Resume, peers: Peers) -> None:
        self._resuming = Resuming(resume, peers)
        self._trainer: pl.Trainer | None = None
        self._run: Mapping[str, str | None] | None = None
        self._replaced = ReplacedInLightning()
        self._is_uncovered_reported = False
        self._saved: set[str] = set()
        self.is_resumed = False

    def begin_stage(self, trainer: pl.Trainer) -> None:
        """Follow a Trainer whose strategy is set up, and another one no more; the run of an earlier stage is over."""
        self._replaced.restore()
        self._trainer, self._run = trainer, None
        self._saved.clear()
        self.is_resumed = False
        for name, wrapper in (("save", self._save), ("load", self._load), ("remove", self._remove)):
            # the class's own method: a callback that this Trainer had before may stand there, too
            method: Any = getattr(type(trainer.strategy), f"{name}_checkpoint")
            ours: Any = partial(wrapper, partial(method, trainer.strategy))
            self._replaced.put(trainer.strategy, f"{name}_checkpoint", partial(_instead, ours))
        if self._is_fit:
            self._resuming.attach(trainer)

    def begin_fit(self, run: Mapping[str, str | None]) -> None:
        """Know the id, mode and reference of the run of a fit, whose strategy is set up."""
        self._run = run
        self._resuming.begin_fit()

    def begin_epoch(self) -> None:
        """Restore generators before the hooks of an epoch, where a resumed training begins with one."""
        self._resuming.begin_epoch()

    def end_training(self) -> None:
        """Complete what was saved for an exact resume; before the hooks of the training's end."""
        self._resuming.end_training()

    def end_fit(self) -> None:
        """Leave loops and loaders; checkpoints are still followed, since some are saved later."""
        self._resuming.detach()

    @property
    def _is_fit(self) -> bool:
        return self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING

    # saving

    def _save(self, save: Callable[..., None], checkpoint: Any, filepath: Any, *rest: Any, **more: Any) -> None:
        path, trainer = str(filepath), self._trainer
        assert trainer is not None, "a stage began"
        self._saved.add(path)
        is_covered = self._is_covered(path)
        path, moment = self._begin_save(trainer, path) if is_covered else (path, {})
        save(checkpoint, filepath, *rest, **more)
        if not is_covered or not trainer.is_global_zero:
            return
        if not Path(path).exists():
            print_closing_line(uncovered_save_line(path, "its checkpoint IO had not written it when it returned"))
            return
        parameters = _parameter_names(trainer)
        write_sidecar(Path(path), entries=lambda: entries_of(checkpoint, parameters=parameters), **moment)

    def _begin_save(self, trainer: pl.Trainer, path: str) -> tuple[str, dict[str, Any]]:
        """Agree on the identity of a save, and write the part of each rank; return the path and what the sidecar holds.

        The path is that of rank 0: a metric in a file's name may make it another one on each rank.
        """
        id = uuid.uuid4().hex  # drawn from the operating system, so no generator moves
        # after an exception others may never come; then nothing is saved for an exact resume
        is_together = trainer.world_size == 1 or trainer.state.status != TrainerStatus.INTERRUPTED
        if trainer.is_global_zero:
            beside(Path(path), SIDECAR).unlink(missing_ok=True)
        if trainer.world_size > 1 and is_together:
            with unobserved():
                id, path = trainer.strategy.broadcast((id, path))
        is_resumable = is_together and self._is_fit and self._run is not None and self._resuming.save(path, id)
        if is_resumable and trainer.world_size > 1:
            with unobserved():
                trainer.strategy.barrier("what the ranks save for an exact resume")
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        num_batches = int(progress.processed)  # at a batch's end this one too, after an exception in it not
        return path, {
            "id": id,
            "run": self._run,
            "step": num_batches - 1 if self._is_fit and num_batches else None,
            "epoch": trainer.current_epoch if self._is_fit else None,
            "num_ranks": trainer.world_size if is_resumable else 0,
        }

    def _is_covered(self, path: str) -> bool:
        """Return whether a checkpoint gets a sidecar; where it gets none, say so the first time."""
        assert self._trainer is not None, "a stage began"
        io: Any = self._trainer.strategy.checkpoint_io
        while isinstance(io, _WrappingCheckpointIO) and not isinstance(io, AsyncCheckpointIO):
            io = io.checkpoint_io
        reason = "checkpoints on remote paths get none: save to a disk and copy both" if is_remote(path) else ""
        if isinstance(io, AsyncCheckpointIO):
            reason = "AsyncCheckpointIO writes in the background: leave it out to have digests and exact resume"
        if reason and not self._is_uncovered_reported:
            self._is_uncovered_reported = True
            print_closing_line(uncovered_save_line(path, reason))
        return not reason

    # loading and removing

    def _load(self, load: Load, checkpoint_path: Any, *rest: Any, **more: Any) -> dict[str, Any]:
        """Load a checkpoint, unless it is not what was saved; a file is read once more than without this.

        Raises:
            CheckpointMismatchError: it differs from what was saved.
            CheckpointFormatError: it, or its sidecar, cannot be read.
        """
        if not rest and more.get("weights_only") is None and "weights_only" in inspect.signature(load).parameters:
            more["weights_only"] = True  # Lightning 2.5 has no such argument
        load = partial(load, checkpoint_path, *rest, **more)
        path = str(checkpoint_path)
        place = resolved(path)
        if not is_remote(path) and not place.exists():
            return load()  # which says so
        sidecar = None if is_remote(path) else read_sidecar(place)
        checkpoint = load() if sidecar is None else self._load_checked(load, place, sidecar)
        if sidecar is None:
            print_closing_line(f"det_callbacks: {path} was loaded unchecked: no digests stand beside it")
        if self._is_fit and path not in self._saved:
            self.is_resumed = True
            self._resuming.loaded(path, sidecar)
        return checkpoint

    def _load_checked(self, load: Load, place: Path, sidecar: Sidecar) -> dict[str, Any]:
        content, files = measure(place)
        if files is not None:
            _require_equal(compare_saved(place, sidecar, content, files))
            return load()
        if sidecar.file != content:  # whatever it holds, it is not opened otherwise
            changed = entries_of(load_plainly(place, content, sidecar))
            _require_equal(compare_saved(place, sidecar, content, changed))
        checkpoint = load()
        assert self._trainer is not None, "a stage began"
        # other strategies load into the module, and return a part of it
        is_whole = type(self._trainer.strategy).load_checkpoint is Strategy.load_checkpoint
        _require_equal(compare_saved(place, sidecar, content, entries_of(checkpoint) if is_whole else None))
        return checkpoint

    def _remove(self, remove: Callable[..., None], filepath: Any) -> None:
        remove(filepath)
        self._saved.discard(str(filepath))
        assert self._trainer is not None, "a stage began"
        if self._trainer.is_global_zero and not is_remote(filepath):
            remove_beside(Path(filepath))


def _require_equal(report: CheckpointReport) -> None:
    if not report.equal:
        names = tuple(entry.name for entry in report.entries)
        raise CheckpointMismatchError(mismatch_text(report), report.path, names)


def _instead(ours: Any, theirs: Any) -> Any:
    return ours


def _parameter_names(trainer: pl.Trainer) -> dict[str, str]:
    """Return the path of each parameter's state in the optimizers' states -> its qualified name."""
    module = trainer.lightning_module
    names = {} if module is None else {id(parameter): name for name, parameter in module.named_parameters()}
    found = {}
    for number, optimizer in enumerate(trainer.optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for place, parameter in enumerate(parameters):
            if id(parameter) in names:
                found[f"{number}/state/{place}"] = names[id(parameter)]
    return found
