"""Where Lightning saves, loads and removes checkpoints: each gets its sidecar, and is compared with it when loaded.

A save goes like this, so that a kill at any moment leaves nothing that misleads:

1. rank 0 removes the sidecar of the checkpoint that is about to be replaced;
2. every rank writes what it keeps for an exact resume, with the identity of the save, and waits for the others;
3. Lightning saves the checkpoint in its own way;
4. rank 0 reads it back once and writes the new sidecar, atomically.

A kill in between leaves a checkpoint of Lightning's without digests, which is loaded with a line.
"""

import inspect
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO  # looked at in Lightning 2.6.6
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerStatus
from typing_extensions import override

from det_callbacks.checkpoint.check import (
    CheckpointReport,
    compare_folder,
    compare_loaded,
    load_plainly,
    unreadable,
)
from det_callbacks.checkpoint.entries import Entries, entries_of
from det_callbacks.checkpoint.sidecar import (
    SIDECAR,
    SaveContext,
    Sidecar,
    beside,
    digest_path,
    is_remote,
    new_id,
    read_sidecar,
    remove_beside,
    resolved,
    write_sidecar,
)
from det_callbacks.digest import unobserved
from det_callbacks.errors import CheckpointMismatchError
from det_callbacks.report.checkpoints import mismatch_text, missing_sidecar_line, remote_save_line, unfinished_save_line
from det_callbacks.report.fits import print_closing_line

_HAND_OVER = ".temp.ckpt"
"""What a spawned process leaves its weights in for the one that started it, which removes it (Lightning 2.6.6)."""


_MAX_WAITING = 64
"""Saves that were begun and that no IO has written yet."""


class CheckpointSource(Protocol):
    """What knows the moment of a save, and goes on from a checkpoint that was loaded."""

    def context(self) -> SaveContext:
        """Return the moment; called in the thread that trains, at each save."""

    def keep(self, path: str, id: str) -> bool:
        """Write what this rank keeps for an exact resume of a save; return whether it, and so each rank, keeps any."""

    def loaded(self, path: str, sidecar: Sidecar | None) -> None:
        """Go on from a checkpoint that was loaded, and is what was saved where there is a sidecar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """When a checkpoint is saved, caught in the thread that trains."""

    path: str
    id: str
    context: SaveContext
    num_ranks: int
    parameters: Mapping[tuple[int, int], str] = field(default_factory=dict)


class CheckpointWatch:
    """Gives every checkpoint of a Trainer its sidecar, and compares the ones that it loads.

    It stays with the Trainer after a fit: ``trainer.save_checkpoint`` is called then, too, and callbacks save and
    remove checkpoints on exceptions and in their ``teardown`` after every hook of ours.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self._trainer: pl.Trainer | None = None
        self._undo: list[Callable[[], object]] = []
        # an asynchronous IO saves later, in one thread and in the order in which it was asked to
        self._moments: deque[_Moment] = deque(maxlen=_MAX_WAITING)
        self._is_checked = self._is_remote_reported = False

    def attach(self, trainer: pl.Trainer) -> None:
        """Stand in the ways of a Trainer whose strategy is set up; in those of another one no more."""
        self.detach()
        self._trainer = trainer
        strategy = trainer.strategy
        outer, inner = None, strategy.checkpoint_io
        while isinstance(inner, _WrappingCheckpointIO) and not isinstance(inner, DigestingIO):
            assert inner.checkpoint_io is not None
            outer, inner = inner, inner.checkpoint_io
        if isinstance(inner, DigestingIO):  # of a callback that this Trainer had before
            inner = inner.base
        # directly around the IO that writes, inside asynchronous ones, so that what they cloned is digested
        io = DigestingIO(inner, self)
        if outer is None:
            strategy.checkpoint_io = io
            self._undo.append(partial(setattr, strategy, "checkpoint_io", inner))
        else:
            # the setter takes no wrapper, and nothing in place of what is there (Lightning 2.6.6)
            outer._checkpoint_io = io
            self._undo.append(partial(setattr, outer, "_checkpoint_io", inner))
        self._wrap(strategy, "save_checkpoint", partial(self._save, strategy))
        if type(strategy).load_checkpoint is not Strategy.load_checkpoint:
            self._wrap(strategy, "load_checkpoint", partial(self._load_by_strategy, strategy))

    def detach(self) -> None:
        """Leave the Trainer as it was."""
        undo, self._undo = self._undo, []
        for function in reversed(undo):
            function()
        self._trainer = None

    def _wrap(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        vars(owner)[name] = function
        self._undo.append(partial(vars(owner).pop, name, None))

    # saving

    def _save(self, strategy: Strategy, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save = partial(type(strategy).save_checkpoint, strategy, checkpoint, filepath, storage_options=storage_options)
        if self._has_no_sidecar(str(filepath)):
            save()
            return
        moment = self._begin(str(filepath))
        if not strategy.is_global_zero:
            save()
            return
        self._moments.append(moment)
        save()
        is_own = type(strategy).save_checkpoint is not Strategy.save_checkpoint
        if is_own and moment in self._moments and Path(moment.path).is_dir():
            # written past the IO, and the strategy's own collective is over: no rank writes into the folder any more
            self._moments.remove(moment)
            _end(moment, {})

    def _begin(self, path: str) -> _Moment:
        """Agree on the identity of a save, and write what each rank keeps beside it.

        The path is that of rank 0: a metric in a file's name may make it another one on each rank.
        """
        trainer = self._trainer
        assert trainer is not None, "it is attached"
        id = new_id()
        # after an exception others may never come; then nothing is kept for an exact resume
        is_together = trainer.world_size == 1 or trainer.state.status != TrainerStatus.INTERRUPTED
        if trainer.is_global_zero:
            beside(Path(path), SIDECAR).unlink(missing_ok=True)
        if trainer.world_size > 1 and is_together:
            with unobserved():
                id, path = trainer.strategy.broadcast((id, path))
        num_ranks = trainer.world_size if is_together and self._source.keep(path, id) else 0
        if num_ranks > 1:
            with unobserved():
                trainer.strategy.barrier("what the ranks keep for an exact resume")
        context, parameters = self._source.context(), _parameter_names(trainer)
        return _Moment(path=path, id=id, context=context, num_ranks=num_ranks, parameters=parameters)

    def save(self, checkpoint: dict[str, Any], path: str, save: Callable[[], None]) -> None:
        """Save by an IO, and write the sidecar. One that has not written when it returns gets none, and a line."""
        if self._has_no_sidecar(path):
            save()
            return
        moment = next((one for one in tuple(self._moments) if one.path == path), None)
        if moment is None:
            moment = self._begin_alone(path)
        else:
            self._moments.remove(moment)
        place = Path(path)
        before, entries = _state(place), entries_of(checkpoint, parameters=moment.parameters)
        save()
        if _state(place) in (None, before):
            print_closing_line(unfinished_save_line(path))
            return
        _end(moment, entries)

    def _begin_alone(self, path: str) -> _Moment:
        """Begin the save of one process past the strategy, with nothing to resume exactly from."""
        beside(Path(path), SIDECAR).unlink(missing_ok=True)
        return _Moment(path=path, id=new_id(), context=self._source.context(), num_ranks=0)

    def _has_no_sidecar(self, path: str) -> bool:
        if is_remote(path) and not self._is_remote_reported:
            self._is_remote_reported = True
            print_closing_line(remote_save_line(path))
        return is_remote(path) or Path(path).name == _HAND_OVER

    # loading

    def load(self, path: str, load: Callable[[], dict[str, Any]], *, is_opened: bool = True) -> dict[str, Any]:
        """Load a checkpoint, unless it is not what was saved; a file is read once more than without this.

        Args:
            path: of the checkpoint, as Lightning has it.
            load: loads it as it would be loaded without this.
            is_opened: whether what it returns is all that the checkpoint holds, so that it can be compared, too.

        Raises:
            CheckpointMismatchError: it differs from what was saved.
            CheckpointFormatError: it, or its sidecar, cannot be read.
        """
        if self._is_checked:  # a strategy's own reading came through the IO
            return load()
        place = resolved(path)
        if not is_remote(path) and not place.exists():
            return load()  # which says so
        sidecar = None if is_remote(path) else read_sidecar(place)
        if sidecar is None:
            checkpoint = load()
            print_closing_line(missing_sidecar_line(path))
        elif place.is_dir():
            _require_equal(compare_folder(place, sidecar))
            checkpoint = self._load_checked(load)
        else:
            content = digest_path(place)
            if sidecar.file != content:  # whatever it holds, it is not opened otherwise
                try:
                    found = load_plainly(place)
                except Exception as error:  # a damaged file makes torch's readers raise anything
                    raise unreadable(place, content, sidecar, error) from error
                _require_equal(compare_loaded(place, sidecar, content, found))
            checkpoint = self._load_checked(load)
            _require_equal(compare_loaded(place, sidecar, content, checkpoint if is_opened else None))
        self._source.loaded(path, sidecar)
        return checkpoint

    def _load_checked(self, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._is_checked = True
        try:
            return load()
        finally:
            self._is_checked = False

    def _load_by_strategy(self, strategy: Any, checkpoint_path: Any, *rest: Any, **options: Any) -> dict[str, Any]:
        load = partial(type(strategy).load_checkpoint, strategy, checkpoint_path, *rest, **options)
        return self.load(str(checkpoint_path), load, is_opened=False)


class DigestingIO(_WrappingCheckpointIO):
    """An IO whose saves and loads pass through a ``CheckpointWatch``.

    Args:
        checkpoint_io: the one that writes.
        watch: of the Trainer.
    """

    def __init__(self, checkpoint_io: CheckpointIO, watch: CheckpointWatch) -> None:
        super().__init__(checkpoint_io)
        self._watch = watch

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy of the strategy have the IO that writes: the Trainer of ours is not copied with it."""
        return _same, (self.base,)

    @property
    def base(self) -> CheckpointIO:
        """The IO that writes."""
        assert self._checkpoint_io is not None
        return self._checkpoint_io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        save = partial(self.base.save_checkpoint, checkpoint, path, storage_options=storage_options)
        self._watch.save(checkpoint, str(path), save)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        options: dict[str, Any] = {} if map_location is None else {"map_location": map_location}
        # Lightning 2.5 has no such argument, nor may an IO of the user
        if "weights_only" in inspect.signature(self.base.load_checkpoint).parameters:
            options["weights_only"] = True if weights_only is None else weights_only
        return self._watch.load(str(path), partial(self.base.load_checkpoint, path, **options))

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        self.base.remove_checkpoint(path)
        if not is_remote(path):
            remove_beside(Path(path))

    @override
    def teardown(self) -> None:
        self.base.teardown()


def _same(checkpoint_io: CheckpointIO) -> CheckpointIO:
    return checkpoint_io


def _end(moment: _Moment, entries: Entries) -> None:
    place, num_ranks = Path(moment.path), moment.num_ranks
    write_sidecar(place, id=moment.id, entries=entries, context=moment.context, num_ranks=num_ranks)


def _require_equal(report: CheckpointReport) -> None:
    if not report.equal:
        names = tuple(entry.name for entry in report.entries)
        raise CheckpointMismatchError(mismatch_text(report), report.path, names)


def _state(path: Path) -> object:
    """Return what changes when a file or folder is written; None where there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    inside = sorted(path.rglob("*")) if path.is_dir() else ()
    return found.st_mtime_ns, found.st_ino, found.st_size, [os.stat(one).st_mtime_ns for one in inside]


def _parameter_names(trainer: pl.Trainer) -> Mapping[tuple[int, int], str]:
    """Return (optimizer, place in its groups) -> qualified name: an optimizer's state is kept by that place."""
    module = trainer.lightning_module
    if module is None:
        return {}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        (number, place): names[id(parameter)]
        for number, optimizer in enumerate(trainer.optimizers)
        for place, parameter in enumerate(
            parameter for group in optimizer.param_groups for parameter in group["params"]
        )
        if id(parameter) in names
    }
