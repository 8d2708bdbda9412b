"""Checkpoints on their way out and in: the digests beside them are written, removed and compared."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO  # looked at in Lightning 2.6.6
from typing_extensions import override

from det_callbacks.callback.loading import Loader
from det_callbacks.checkpoint.entries import entries_of
from det_callbacks.checkpoint.files import is_remote
from det_callbacks.checkpoint.parts import amend_part
from det_callbacks.checkpoint.saving import begin_save, end_save, remove_beside
from det_callbacks.checkpoint.sidecar import SaveContext
from det_callbacks.report import print_closing_line, remote_save_line, unfinished_save_line

MOMENT = "det_callbacks.moment"
"""Key under which a moment travels through the IOs around ours; ours takes it out again."""

_HAND_OVER = ".temp.ckpt"
"""What a spawned process leaves its weights in for the one that started it, which removes it (Lightning 2.6.6)."""

MAX_SAVES = 64
"""Saves that can still be amended; a run that keeps every checkpoint would remember them all otherwise."""


class Moment:
    """When a checkpoint is saved, caught in the thread that trains.

    No dataclass: asynchronous IOs copy what a checkpoint holds, field by field.

    Args:
        id: of the save.
        context: what is known of the moment.
        parameters: (optimizer, index in its state) -> qualified name of the parameter.
    """

    def __init__(self, id: str, context: SaveContext, parameters: Mapping[tuple[int, int], str]) -> None:
        self.id = id
        self.context = context
        self.parameters = parameters


@dataclass(slots=True)
class _Save:
    """A save that may be added to, and what waits for it to be done."""

    id: str
    is_done: bool = False
    waiting: dict[str, bytes] = field(default_factory=dict)


class Saves:
    """The saves that can still be added to; used from the thread that trains and from one that writes.

    Attributes:
        rank: of this process; others than 0 add to their own part.
    """

    def __init__(self) -> None:
        self.rank = 0
        self._lock = Lock()
        self._saves: dict[str, _Save] = {}

    def __reduce__(self) -> tuple[type["Saves"], tuple[()]]:
        """Let a copy, or another process, begin with none: the saves are not theirs, and a lock cannot be copied."""
        return Saves, ()

    def begin(self, path: str, id: str) -> None:
        """Remember a save that is under way, in place of an earlier one of the same checkpoint."""
        with self._lock:
            self._saves.pop(path, None)
            self._saves[path] = _Save(id)
            for old in list(self._saves)[:-MAX_SAVES]:
                del self._saves[old]

    def end(self, path: str, id: str) -> None:
        """Add what was waiting for a save to be done."""
        with self._lock:
            save = self._saves.get(path)
            if save is not None and save.id == id:
                save.is_done = True
                self._flush(path, save)

    def amend(self, path: str, files: Mapping[str, bytes]) -> None:
        """Add files to those kept beside a checkpoint: now, or when its save is done."""
        with self._lock:
            save = self._saves.get(path)
            if save is not None:
                save.waiting |= files
                if save.is_done:
                    self._flush(path, save)

    def forget(self, path: str) -> None:
        """Forget a checkpoint that is removed."""
        with self._lock:
            self._saves.pop(path, None)

    def _flush(self, path: str, save: _Save) -> None:
        waiting, save.waiting = save.waiting, {}
        if waiting:
            amend_part(Path(path), id=save.id, rank=self.rank, files=waiting)


class DigestingIO(_WrappingCheckpointIO):
    """Stands directly around the IO that writes, inside asynchronous ones, so that it digests what they cloned.

    What the IO wrote is read back. An IO that has not written when its save returns, and a remote path, get no digests,
    and a line says so.

    Args:
        checkpoint_io: the one that writes.
        capture: makes the moment of a save that brings none.
        loader: checks a load.
        saves: those that can be added to.
    """

    def __init__(
        self,
        checkpoint_io: CheckpointIO,
        *,
        capture: Callable[[str], Moment],
        loader: Loader,
        saves: Saves,
    ) -> None:
        super().__init__(checkpoint_io)
        self._capture = capture
        self._loader = loader
        self._saves = saves
        self._is_remote_reported = False

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
        moment = checkpoint.get(MOMENT)
        if moment is not None:
            checkpoint = {key: value for key, value in checkpoint.items() if key != MOMENT}
        save = partial(self.base.save_checkpoint, checkpoint, path, storage_options=storage_options)
        name = str(path)
        if Path(name).name == _HAND_OVER or is_remote(name):
            save()
            if is_remote(name) and not self._is_remote_reported:
                self._is_remote_reported = True
                print_closing_line(remote_save_line(name))
            return
        moment = moment or self._capture(name)
        place, id, context = Path(name), moment.id, moment.context
        before, entries = _state(place), entries_of(checkpoint, parameters=moment.parameters)
        begin_save(place, id=id, context=context)
        save()
        if _state(place) in (None, before):
            print_closing_line(unfinished_save_line(name))
            return
        end_save(place, id=id, entries=entries, context=context)
        self._saves.end(name, id)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        options: dict[str, Any] = {} if map_location is None else {"map_location": map_location}
        # Lightning 2.5 has no such argument, nor may an IO of the user
        if "weights_only" in inspect.signature(self.base.load_checkpoint).parameters:
            options["weights_only"] = True if weights_only is None else weights_only
        return self._loader.load(str(path), lambda: self.base.load_checkpoint(path, **options))

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        self._saves.forget(str(path))
        self.base.remove_checkpoint(path)
        if not is_remote(path):
            remove_beside(Path(path))

    @override
    def teardown(self) -> None:
        self.base.teardown()


def _same(checkpoint_io: CheckpointIO) -> CheckpointIO:
    return checkpoint_io


def _state(path: Path) -> object:
    """Return what changes when a file or folder is written; None where there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    inside = sorted(path.rglob("*")) if path.is_dir() else ()
    return found.st_mtime_ns, found.st_ino, found.st_size, [os.stat(one).st_mtime_ns for one in inside]
