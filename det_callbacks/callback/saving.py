"""Checkpoints on their way out and in: the digests beside them are written, removed and compared."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO  # looked at in Lightning 2.6.6
from typing_extensions import override

from det_callbacks.callback.loading import Loader
from det_callbacks.checkpoint.entries import Entries, entries_of
from det_callbacks.checkpoint.files import Place
from det_callbacks.checkpoint.folders import save_folder
from det_callbacks.checkpoint.parts import amend_part
from det_callbacks.checkpoint.saving import amend, put_sidecar, remove_beside, save_file, settle, step_aside
from det_callbacks.checkpoint.sidecar import SaveContext, Sidecar
from det_callbacks.report import print_closing_line, unfinished_save_line

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


@dataclass(slots=True, kw_only=True)
class _Foreign:
    """A checkpoint that somebody else writes, perhaps later.

    Attributes:
        place: where to.
        moment: of the save.
        entries: of the checkpoint as it was handed over.
        before: state of the file before the save.
        digested: state of the file when its digest was taken.
    """

    place: Place
    moment: Moment
    entries: Entries
    before: object
    digested: object = None


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
        if waiting and self.rank:
            amend_part(Place.of(path), id=save.id, rank=self.rank, files=waiting)
        elif waiting:
            amend(Place.of(path), id=save.id, files=waiting)


class DigestingIO(_WrappingCheckpointIO):
    """Stands directly around the IO that writes, inside asynchronous ones, so that it digests what they cloned.

    A plain ``TorchCheckpointIO`` is replaced: the same bytes are written, and digested on their way. What any other IO
    wrote is read back. An IO that writes after its save has returned is waited for at the next save, before a removal
    and at its end.

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
        self._foreign: dict[str, _Foreign] = {}

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
        self.finish()
        name = str(path)
        if Path(name).name == _HAND_OVER:
            self.base.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        moment = checkpoint.get(MOMENT)
        if moment is None:
            moment = self._capture(name)
        else:
            checkpoint = {key: value for key, value in checkpoint.items() if key != MOMENT}
        # other arguments than a path are Lightning's to refuse
        if type(self.base) is TorchCheckpointIO and storage_options is None:
            entries = entries_of(checkpoint, parameters=moment.parameters)
            save_file(checkpoint, Place.of(name), id=moment.id, entries=entries, context=moment.context)
            self._saves.end(name, moment.id)
            return
        self._save_elsewhere(checkpoint, name, storage_options, moment)

    def _save_elsewhere(self, checkpoint: dict[str, Any], path: str, storage_options: Any, moment: Moment) -> None:
        place = Place.of(path)
        settle(place)
        entries = entries_of(checkpoint, parameters=moment.parameters)
        foreign = _Foreign(place=place, moment=moment, entries=entries, before=_state(place))
        step_aside(place)
        self.base.save_checkpoint(checkpoint, path, storage_options=storage_options)
        self._foreign[path] = foreign
        self.finish()

    def finish(self, *, is_last: bool = False) -> None:
        """Digest what others have written since the last look.

        Args:
            is_last: nothing more will be written; what is not there is said.
        """
        for path, foreign in list(self._foreign.items()):
            state = _state(foreign.place)
            if state is not None and state not in (foreign.before, foreign.digested):
                foreign.digested = state
                _digest_what_is_there(foreign)
                self._saves.end(path, foreign.moment.id)
            elif is_last and foreign.digested is None:
                print_closing_line(unfinished_save_line(foreign.place.shown))
        if is_last:
            self._foreign.clear()

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
        self.finish()
        self._foreign.pop(str(path), None)
        self._saves.forget(str(path))
        self.base.remove_checkpoint(path)
        remove_beside(Place.of(path))

    @override
    def teardown(self) -> None:
        self.base.teardown()
        self.finish(is_last=True)


def _same(checkpoint_io: CheckpointIO) -> CheckpointIO:
    return checkpoint_io


def _state(place: Place) -> object:
    """Return what changes when a file or folder is written; None where there is none."""
    if not place.exists():
        return None
    return place.fs.checksum(place.path) if not place.is_folder() else tuple(place.files())


def _digest_what_is_there(foreign: _Foreign) -> None:
    place, moment = foreign.place, foreign.moment
    if place.is_folder():
        save_folder(place, id=moment.id, rank=0, num_ranks=1, entries=foreign.entries, context=moment.context)
        return
    sidecar = Sidecar(id=moment.id, file=place.digest(), entries=foreign.entries, context=moment.context)
    put_sidecar(place, sidecar, moment.context.attachments)
