"""Where Lightning saves, loads and removes checkpoints: ours stands in each of these ways."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerStatus

from det_callbacks.callback.loading import Loader, OnLoaded
from det_callbacks.callback.saving import MAX_SAVES, MOMENT, DigestingIO, Moment, Saves
from det_callbacks.checkpoint.files import SIDECAR, beside, is_remote
from det_callbacks.checkpoint.parts import put_part, remove_part
from det_callbacks.checkpoint.saving import begin_save, end_save, new_id
from det_callbacks.checkpoint.sidecar import SaveContext
from det_callbacks.digest import unobserved


class HasContext(Protocol):
    """What knows the moment of a save."""

    def context(self, path: str) -> SaveContext:
        """Return the moment; called in the thread that trains, at each save, with the checkpoint's path."""

    def common_id(self, path: str) -> str | None:
        """Return the identity of a save that all ranks take part in, the same on each; None where there is none."""


class CheckpointWatch:
    """Gives every checkpoint of a Trainer its sidecar, and compares the ones it loads.

    It stays with the Trainer after a fit: ``trainer.save_checkpoint`` is called then, too, and callbacks save and
    remove checkpoints on exceptions and in their ``teardown`` after every hook of ours.

    Args:
        source: knows the moment of a save.

    Attributes:
        last_path: path of the latest save, as Lightning has it; None before the first.
    """

    def __init__(self, source: HasContext) -> None:
        self.last_path: str | None = None
        self._source = source
        self._loader = Loader()
        self._saves = Saves()
        self._trainer: pl.Trainer | None = None
        self._undo: list[Callable[[], object]] = []
        self._moment: Moment | None = None
        self._common_path: str | None = None
        self._common_paths: dict[str, str] = {}

    @property
    def on_loaded(self) -> OnLoaded | None:
        """Called with path, sidecar and attachments of a checkpoint that was loaded, once all of it agreed."""
        return self._loader.on_loaded

    @on_loaded.setter
    def on_loaded(self, function: OnLoaded | None) -> None:
        self._loader.on_loaded = function

    def amend(self, path: str | Path, files: Mapping[str, bytes]) -> None:
        """Add files to those that this rank keeps beside a checkpoint, or replace them.

        Nothing is done where the checkpoint was removed or saved anew by somebody else; while its save is under way in
        another thread, they are added at its end. The latest 64 saves can be amended.

        Args:
            path: of the checkpoint, as ``last_path`` has it.
            files: name -> content; names of letters, digits and ``. _ -``.

        Raises:
            ValueError: a name is no plain file name.
        """
        self._saves.amend(str(path), files)

    def attach(self, trainer: pl.Trainer) -> None:
        """Stand in the Trainer's ways of saving and loading; in those of another Trainer no more.

        Args:
            trainer: whose strategy is set up.
        """
        self.detach()
        self._trainer = trainer
        self._saves.rank = trainer.global_rank
        strategy = trainer.strategy
        outermost: Any = strategy.checkpoint_io
        outer: Any = None
        innermost = outermost
        while isinstance(innermost, _WrappingCheckpointIO) and not isinstance(innermost, DigestingIO):
            outer, innermost = innermost, innermost.checkpoint_io
        if isinstance(innermost, DigestingIO):  # of a callback that this Trainer had before
            innermost = innermost.base
        io = DigestingIO(innermost, capture=self._capture, loader=self._loader, saves=self._saves)
        if outer is None:
            strategy.checkpoint_io = io
            self._undo.append(partial(setattr, strategy, "checkpoint_io", innermost))
        else:
            # the setter takes no wrapper, and nothing in place of what is there (Lightning 2.6.6)
            outer._checkpoint_io = io
            self._undo.append(partial(setattr, outer, "_checkpoint_io", innermost))
            self._wrap(outermost, "save_checkpoint", partial(self._stamp, type(outermost).save_checkpoint, outermost))
        # strategies that save and load in their own way do not come through the IO
        if type(strategy).save_checkpoint is not Strategy.save_checkpoint:
            self._wrap(strategy, "save_checkpoint", partial(self._save_in_strategy, strategy))
        elif trainer.world_size > 1:
            self._wrap(strategy, "save_checkpoint", partial(self._save_by_rank, strategy))
        if trainer.world_size > 1:
            self._wrap(trainer, "save_checkpoint", partial(self._save_together, trainer))
        if trainer.global_rank and type(strategy).remove_checkpoint is Strategy.remove_checkpoint:
            self._wrap(strategy, "remove_checkpoint", self._remove_part)
        if type(strategy).load_checkpoint is not Strategy.load_checkpoint:
            self._wrap(strategy, "load_checkpoint", partial(self._load_in_strategy, strategy))

    def detach(self) -> None:
        """Leave the Trainer as it was."""
        undo, self._undo = self._undo, []
        for function in reversed(undo):
            function()
        self._trainer = None

    def _wrap(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        vars(owner)[name] = function
        self._undo.append(partial(vars(owner).pop, name, None))

    def _capture(self, path: str, *, by_all_ranks: bool = False) -> Moment:
        """Return the moment of a save, and remember that it is under way."""
        moment, self._moment = self._moment, None
        if moment is None:
            parameters = {} if self._trainer is None else _parameter_names(self._trainer)
            context = self._source.context(path)
            # past the strategy one process saves by itself, and then the others keep nothing beside it
            id = self._source.common_id(path) if by_all_ranks else None
            if id is not None and self._trainer is not None:
                context = replace(context, num_ranks=self._trainer.world_size)
            moment = Moment(id or new_id(), context, parameters)
        self._saves.begin(path, moment.id)
        self.last_path = path
        return moment

    def _stamp(
        self, save: Callable[..., None], io: object, checkpoint: dict[str, Any], path: Any, *rest: Any, **options: Any
    ) -> None:
        """Save through an IO that may hand the checkpoint to another thread: the moment travels in it."""
        save(io, {**checkpoint, MOMENT: self._capture(str(path))}, path, *rest, **options)

    def _save_in_strategy(
        self, strategy: Strategy, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        path = self._common_path or str(filepath)
        place = Path(path)
        if strategy.is_global_zero and place.is_dir():
            beside(place, SIDECAR).unlink(missing_ok=True)
        moment = self._save_by_rank(strategy, checkpoint, filepath, storage_options)
        if strategy.is_global_zero and place.is_dir() and not is_remote(path):
            # the strategy's own collective is over, so that no rank writes into the folder any more
            begin_save(place, id=moment.id, context=moment.context)
            end_save(place, id=moment.id, entries={}, context=moment.context)
            self._saves.end(path, moment.id)

    def _save_together(self, trainer: pl.Trainer, filepath: Any, *rest: Any, **options: Any) -> None:
        """Let all ranks save under the path of rank 0, which a metric in a file's name may make different on each."""
        # after an exception others may never come; the barrier at the end of a save is Lightning's
        if trainer.state.status != TrainerStatus.INTERRUPTED:
            with unobserved():
                self._common_path = str(trainer.strategy.broadcast(str(filepath)))
        if self._common_path is not None and self._common_path != str(filepath):
            self._common_paths[str(filepath)] = self._common_path
            for old in list(self._common_paths)[:-MAX_SAVES]:
                del self._common_paths[old]
        try:
            type(trainer).save_checkpoint(trainer, filepath, *rest, **options)
        finally:
            self._common_path = None

    def _save_by_rank(
        self, strategy: Strategy, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> Moment:
        """Let the strategy save, and write what this rank keeps beside it; the barrier after it is Lightning's."""
        path = self._common_path or str(filepath)
        moment = self._moment = self._capture(path, by_all_ranks=True)
        try:
            type(strategy).save_checkpoint(strategy, checkpoint, filepath, storage_options=storage_options)
        finally:
            self._moment = None
        context, rank = moment.context, self._saves.rank
        if rank and context.attachments and context.num_ranks > 1 and not is_remote(path):
            put_part(Path(path), id=moment.id, rank=rank, num_ranks=context.num_ranks, files=context.attachments)
            self._saves.end(path, moment.id)
        return moment

    def _remove_part(self, filepath: Any) -> None:
        """Remove what this rank keeps; rank 0 removes all that it sees, which may not be this node's."""
        path = self._common_paths.pop(str(filepath), str(filepath))
        self._saves.forget(path)
        if not is_remote(path):
            remove_part(Path(path), rank=self._saves.rank)

    def _load_in_strategy(self, strategy: Any, checkpoint_path: Any, *rest: Any, **options: Any) -> dict[str, Any]:
        load = partial(type(strategy).load_checkpoint, strategy, checkpoint_path, *rest, **options)
        return self._loader.load_elsewhere(str(checkpoint_path), load)


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
