"""What a Lightning fit is in the middle of, read from its loops (Lightning 2.6.6)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, OnExceptionCheckpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data.dataloader import _BaseDataLoaderIter

from det_callbacks.callback.data_watch import DataWatch
from det_callbacks.callback.draw_watch import DrawWatch
from det_callbacks.callback.rank_state import RankState, is_stateful, local_part, non_persistent
from det_callbacks.digest import digest_tensor, unobserved
from det_callbacks.errors import DetCallbacksError
from det_callbacks.resume import ResumeState, find_generators
from det_callbacks.resume.generators import Held
from det_callbacks.resume.state import Moment

NOT_LOOKED_INTO = (
    *(pl.Trainer, Logger, Strategy, _Loop, _BaseDataLoaderIter, torch.optim.Optimizer),
    *(DataWatch, DrawWatch),
)
"""What is not searched for generators: it leads to everything, or is our own."""


class FitState:
    """Reads the state of one fit.

    Args:
        trainer: whose fit it is.
        watch: follows its data.
        ranks: what this rank has of its own.
    """

    def __init__(self, trainer: pl.Trainer, watch: DataWatch, ranks: RankState) -> None:
        self._trainer = trainer
        self._watch = watch
        self._ranks = ranks
        self._versions: list[int] = []
        self._adds = False

    # what is saved

    def read(
        self, moment: Moment, *, num_gradients: int | None = None, is_settled: bool = False
    ) -> tuple[ResumeState, dict[str, torch.Tensor]]:
        """Return what a process needs to go on from here, and the gradients that the next batch adds to.

        Args:
            moment: whether a checkpoint is being saved, or the next batch is about to be drawn.
            num_gradients: how many were saved already; then they are not read again.
            is_settled: nothing follows any more that belongs to the batch before.
        """
        trainer, watch = self._trainer, self._watch
        epoch_loop = trainer.fit_loop.epoch_loop
        batches = epoch_loop.batch_progress
        done: Any = batches.current  # its class is wider than its declaration
        position, generators = watch.position, None
        problems = list(self._problems())
        num_consumed, num_done = done.ready, batches.total.ready
        if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            # the training step draws, when its batch already counts as ready
            num_consumed, num_done = position.num_drawn, num_done - int(moment == "draw")
        # drawn, and perhaps not even counted as ready
        is_mid_batch = moment == "save" and max(done.ready, self._num_handed_out()) > done.processed
        if is_mid_batch:
            processed: Any = batches.total
            num_consumed, num_done = done.processed, processed.processed
            before = watch.position_before_last
            where = f"it was saved in the middle of step {num_done}"
            if changed := self._changed_in_batch():
                problems.append(f"{where}, which {changed}")
            elif before is None:
                problems.append(f"{where}, and the generators before it were not kept")
            else:
                position, generators = before, watch.position.before_last
        elif moment == "save" and not is_settled and self._has_validation_ahead():
            problems.append(
                "it was saved before a validation that Lightning leaves out when it resumes, and the process ended "
                "before the next batch was drawn"
            )
        if moment == "draw":
            is_epoch_over = not position.num_drawn  # then the epoch before is
            num_consumed = num_consumed if position.num_drawn else 0
        else:
            is_epoch_over = not is_mid_batch and (batches.is_last_batch or epoch_loop._num_ready_batches_reached())
            if is_epoch_over:
                problems += self._problems_at_end()
        problems += self._ranks.problems(self.loaders())
        is_window_open = self._adds_to_gradients(num_consumed, is_epoch_over=is_epoch_over)
        gradients = self._gradients() if num_gradients is None and is_window_open else {}
        state = ResumeState(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            step=num_done,
            epoch=trainer.current_epoch,
            moment=moment,
            is_epoch_over=is_epoch_over,
            is_mid_batch=is_mid_batch,
            generators=generators or watch.capture(),
            position=replace(position, num_consumed=num_consumed),
            num_gradients=len(gradients) if num_gradients is None else num_gradients,
            accumulates=trainer.accumulate_grad_batches,
            reload_epoch=int(reloaded) if (reloaded := trainer.fit_loop._last_train_dl_reload_epoch) >= 0 else None,
            values={} if is_mid_batch else self.values(),
            sampler_seeds=self._ranks.sampler_seeds(self.loaders()),
            common=self._ranks.common(self.callback_states()),
            reduction=self._ranks.buckets.read(),
            problems=tuple(problems),
        )
        return state, gradients

    def is_before_left_out_hooks(self) -> bool:
        """Return whether hooks or updates follow that Lightning skips when it resumes: validation, end of epoch."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        return (
            self.is_at_last_batch()
            or self._is_at_epoch_end()
            or (self._is_at_batch_end() and (epoch_loop._num_ready_batches_reached() or self._has_validation_ahead()))
        )

    def _is_at_batch_end(self) -> bool:
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return bool(progress.completed < progress.ready == progress.processed)

    def is_at_last_batch(self) -> bool:
        """Return whether the batches of an epoch are done, and the hooks of its end still to come."""
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        epoch_loop = self._trainer.fit_loop.epoch_loop
        is_last = epoch_loop.batch_progress.is_last_batch or epoch_loop._num_ready_batches_reached()
        return bool(is_last and epochs.started > epochs.processed)

    def _is_at_epoch_end(self) -> bool:
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        return bool(epochs.completed < epochs.processed == epochs.ready)

    def values(self) -> dict[str, Any]:
        """Return what a checkpoint has to bring back, by name; one pass over the weights.

        Digests of parameters and persistent buffers, which of them are frozen, and options of the optimizers.
        """
        module = self._trainer.lightning_module
        left_out = non_persistent(module)
        found: dict[str, Any] = {}
        with unobserved():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if name in left_out:
                    continue
                try:
                    found[name] = digest_tensor(tensor.detach())
                except DetCallbacksError:
                    found[name] = None  # gathered, and freed until its next use: the shard behind it is not seen here
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        found["the list of frozen parameters"] = frozen
        for index, optimizer in enumerate(self._trainer.optimizers):
            for number, group in enumerate(optimizer.param_groups):
                for option, value in group.items():
                    if option != "params":
                        found[f"{option} of group {number} of optimizer {index}"] = repr(value)
        return found

    def callback_states(self) -> dict[str, str]:
        """Return the states of callbacks that do not save checkpoints, as text by name."""
        callbacks: list[Callback] = vars(self._trainer)["callbacks"]
        return {
            f"state of {callback.state_key}": repr(callback.state_dict())
            for callback in callbacks
            if not isinstance(callback, Checkpoint)
        }

    def gradient_versions(self) -> list[int]:
        """Return what changes whenever a gradient does; -1 where there is none."""
        parameters = self._trainer.lightning_module.parameters()
        return [-1 if parameter.grad is None else parameter.grad._version for parameter in parameters]

    def _adds_to_gradients(self, num_batches: int, *, is_epoch_over: bool = False) -> bool:
        """Return whether the batch that comes after so many of an epoch may add to gradients that are there."""
        if not self._trainer.lightning_module.automatic_optimization:
            return True  # only the training step knows
        return not is_epoch_over and bool(num_batches % self._trainer.accumulate_grad_batches)

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: local_part(parameter.grad.detach()).to("cpu", copy=True).contiguous()
            for name, parameter in self._trainer.lightning_module.named_parameters()
            if parameter.grad is not None
        }

    # what stands in the way

    def _problems(self) -> Iterator[str]:
        watch, loaders = self._watch, self.loaders()
        if watch.position.num_iterations > 1 and any(getattr(one, "persistent_workers", False) for one in loaders):
            yield (
                "persistent_workers=True keeps the workers, and generators in them that nothing can read, from epoch "
                "to epoch; use persistent_workers=False"
            )
        num_stateful = sum(map(is_stateful, loaders))
        if 0 < num_stateful < len(loaders):
            yield "some of its loaders restore themselves (load_state_dict) and others do not"
        total: Any = self._trainer.fit_loop.epoch_loop.batch_progress.total
        if total.started < min(total.ready, total.processed):
            yield "on_train_batch_start returned -1 before, which leaves Lightning's counts of batches apart"
        if self._is_starting_epoch():
            yield "it was saved while an epoch began, in the middle of its hooks"
        if watch.has_overflowed:
            yield "a loader was started again more often in the epoch than is kept"
        if self._trainer.validating and not self._is_validation_over():
            yield "it was saved in the middle of a validation"

    def _is_starting_epoch(self) -> bool:
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        return bool(epochs.ready > epochs.started)

    def _problems_at_end(self) -> Iterator[str]:
        """Yield why a checkpoint at the end of an epoch does not do until the next batch is drawn."""
        ended = "and the process ended before the next batch was drawn"
        if self.is_at_last_batch() and self._has_hooks_at_epoch_end():
            yield f"it was saved before the end of an epoch, whose hooks Lightning leaves out when it resumes, {ended}"
        if self._is_at_epoch_end() and any(config.reduce_on_plateau for config in self._trainer.lr_scheduler_configs):
            yield f"it was saved before ReduceLROnPlateau was updated at the end of an epoch, {ended}"
        if getattr(self._trainer, "reload_dataloaders_every_n_epochs", 0):
            yield f"reload_dataloaders_every_n_epochs makes the loaders again, {ended}"
        if any(getattr(one, "persistent_workers", False) for one in self.loaders()):
            yield f"persistent_workers=True keeps workers with generators in them that nothing can read, {ended}"

    def _has_hooks_at_epoch_end(self) -> bool:
        """Return whether something is to be done at an epoch's end that a resumed run would miss."""
        trainer = self._trainer
        if is_overridden("on_train_epoch_end", trainer.lightning_module):
            return True
        if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
            return True
        callbacks: list[Callback] = vars(trainer)["callbacks"]
        harmless = (Checkpoint, ProgressBar)
        return any(
            type(callback).on_train_epoch_end is not Callback.on_train_epoch_end
            and not isinstance(callback, harmless)
            and not type(callback).__module__.startswith("det_callbacks.")
            for callback in callbacks
        )

    def _is_validation_over(self) -> bool:
        progress = self._trainer.fit_loop.epoch_loop.val_loop.batch_progress
        return bool(progress.is_last_batch and progress.current.ready == progress.current.completed)

    def _has_validation_ahead(self) -> bool:
        loop = self._trainer.fit_loop
        if self._trainer.validating or self._trainer.sanity_checking or loop._data_fetcher is None:
            return False
        progress = loop.epoch_loop.batch_progress.current
        return progress.completed < progress.ready and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)

    def _num_handed_out(self) -> int:
        """Return how many batches of the epoch training has got, which may be fewer than were drawn."""
        fetcher = self._trainer.fit_loop._data_fetcher
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            return 0  # the training step gets them
        return self._watch.position.num_drawn - len(getattr(fetcher, "batches", ()))

    # a batch under way

    def saves_on_exceptions(self) -> bool:
        """Return whether a callback may save a checkpoint in the middle of a batch."""
        callbacks: list[Callback] = vars(self._trainer)["callbacks"]
        return any(
            isinstance(callback, OnExceptionCheckpoint)
            or (isinstance(callback, ModelCheckpoint) and callback.save_on_exception)
            for callback in callbacks
        )

    def begin_batch(self) -> None:
        """Note what the batch that is about to be drawn may change."""
        done = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self._adds = self._adds_to_gradients(done)
        self._versions = self._state_versions()

    def _state_versions(self) -> list[int]:
        module = self._trainer.lightning_module
        versions = [tensor._version for tensor in (*module.parameters(), *module.buffers())]
        if self._adds:
            versions += self.gradient_versions()
        return versions

    def _changed_in_batch(self) -> str | None:
        if not self._versions:
            return None
        num_changed = sum(one != other for one, other in zip(self._state_versions(), self._versions, strict=False))
        if not num_changed:
            return None
        return f"had already changed {num_changed} of the module's parameters, buffers and gradients"

    # what the trainer has

    def generators(self) -> dict[str, Held]:
        """Return path -> generator for those that the module, the data and the callbacks hold."""
        trainer = self._trainer
        callbacks: list[Callback] = vars(trainer)["callbacks"]
        roots: dict[str, object] = {"module": trainer.lightning_module}
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            roots["datamodule"] = datamodule
        for index, loader in enumerate(self.loaders()):
            roots[f"train_dataloader[{index}]"] = loader
        for callback in callbacks:
            kind = type(callback).__qualname__
            if not type(callback).__module__.startswith("det_callbacks."):
                same = sum(name.startswith(f"callback {kind}") for name in roots)
                roots[f"callback {kind}" + (f" {same + 1}" if same else "")] = callback
        return find_generators(roots, left=NOT_LOOKED_INTO)

    def loaders(self) -> list[Any]:
        """Return the loaders of the training data."""
        loader = self._trainer.fit_loop._combined_loader
        return [] if loader is None else list(loader.flattened)
