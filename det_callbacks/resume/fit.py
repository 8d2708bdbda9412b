"""What a Lightning fit is in the middle of, read from its loops (Lightning 2.6.6)."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from det_callbacks.digest import digest_bytes, digest_tensor, format_digest, unobserved
from det_callbacks.errors import DetCallbacksError
from det_callbacks.resume.buckets import GradientBuckets
from det_callbacks.resume.held import find_generators
from det_callbacks.resume.loaders import DataWatch
from det_callbacks.resume.state import Moment, ResumeState
from det_callbacks.rng import Held

NOT_LOOKED_INTO = (pl.Trainer, Logger, Strategy, _Loop, _BaseDataLoaderIter, torch.optim.Optimizer, DataWatch)
"""What is not searched for generators: it leads to everything, or is our own."""

GRADIENT, BUFFER = "gradient ", "buffer "
"""How the names of tensors begin that are kept beside a checkpoint."""

_PLACES = re.compile(r", device='[^']*'|0x[0-9a-f]+")
"""What the text of a state says of the process that it is in."""


class FitReader:
    """Reads what one process of a fit needs to be gone on with.

    Args:
        trainer: whose fit it is.
        watch: follows its data.
        buckets: of its gradients, under DDP.
    """

    def __init__(self, trainer: pl.Trainer, watch: DataWatch, buckets: GradientBuckets) -> None:
        self._trainer = trainer
        self._watch = watch
        self._buckets = buckets

    def read(self, moment: Moment) -> ResumeState:
        """Return what a process needs to go on from here.

        Args:
            moment: whether a checkpoint is being saved, or the next batch is about to be drawn.
        """
        trainer, position = self._trainer, self._watch.position
        epoch_loop = trainer.fit_loop.epoch_loop
        batches: Any = epoch_loop.batch_progress  # its class is wider than its declaration
        num_consumed = batches.current.ready
        if moment == "draw":
            is_epoch_over = not position.num_drawn  # then the epoch before is
            num_consumed = num_consumed if position.num_drawn else 0
        else:
            is_epoch_over = batches.is_last_batch or epoch_loop._num_ready_batches_reached()
        return ResumeState(
            step=batches.total.ready,
            epoch=trainer.current_epoch,
            moment=moment,
            is_epoch_over=is_epoch_over,
            generators=self._watch.capture(),
            position=replace(position, num_consumed=num_consumed),
            accumulates=trainer.accumulate_grad_batches,
            values=self.values(),
            sampler_seeds=tuple(getattr(_sampler(loader), "seed", None) for loader in self.loaders()),
            common=self._common(),
            reduction=self._buckets.read(),
            problems=tuple(self._problems(moment, is_epoch_over=is_epoch_over)),
        )

    def tensors(self, state: ResumeState) -> dict[str, torch.Tensor]:
        """Return the tensors to keep: gradients that the next batch adds to, and the buffers of another rank than 0.

        Lightning saves the buffers of rank 0; DDP makes them equal before the next forward pass, or not at all. What is
        sharded is saved by the strategy.
        """
        trainer, module = self._trainer, self._trainer.lightning_module
        found: dict[str, torch.Tensor] = {}
        # in manual optimization only the training step knows
        adds = not state.is_epoch_over and state.position.num_consumed % trainer.accumulate_grad_batches
        if adds or not module.automatic_optimization:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    found[GRADIENT + name] = local_part(parameter.grad.detach())
        if trainer.global_rank:
            left_out = non_persistent(module)
            for name, buffer in module.named_buffers():
                if name not in left_out and not isinstance(buffer, DTensor):
                    found[BUFFER + name] = buffer.detach()
        return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in found.items()}

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
                    found[name] = format_digest(digest_tensor(tensor.detach()))
                except DetCallbacksError:
                    found[name] = None  # gathered, and freed until its next use: the shard behind it is not seen here
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        found["the list of frozen parameters"] = frozen
        for index, optimizer in enumerate(self._trainer.optimizers):
            for number, group in enumerate(optimizer.param_groups):
                for option, value in group.items():
                    if option != "params":
                        # what a dcp checkpoint is made a file of has lists in place of tuples
                        text = repr(value).translate(str.maketrans("()", "[]"))
                        found[f"{option} of group {number} of optimizer {index}"] = text
        return found

    def own_buffers(self) -> set[str]:
        """Return the names of buffers that Lightning does not bring back on this rank."""
        is_first = self._trainer.global_rank == 0
        return set() if is_first else {name for name, _ in self._trainer.lightning_module.named_buffers()}

    def callback_states(self) -> dict[str, str]:
        """Return the states of callbacks as text by name, but for those that save checkpoints or measure time."""
        return {
            f"state of {callback.state_key}": repr(callback.state_dict())
            for callback in self._callbacks()
            if not isinstance(callback, Checkpoint | Timer)
        }

    def _common(self) -> dict[str, str]:
        """Return digests, by name, of what is saved by rank 0 alone and put back on all ranks."""
        trainer = self._trainer
        if trainer.world_size == 1:
            return {}
        texts = self.callback_states()
        for index, config in enumerate(trainer.lr_scheduler_configs):
            texts[f"state of scheduler {index}"] = repr(config.scheduler.state_dict())
        return {name: format_digest(digest_bytes(_PLACES.sub("", text).encode())) for name, text in texts.items()}

    # what stands in the way

    def _problems(self, moment: Moment, *, is_epoch_over: bool) -> Iterator[str]:
        trainer, loop, loaders = self._trainer, self._trainer.fit_loop, self.loaders()
        batches: Any = loop.epoch_loop.batch_progress
        epochs: Any = loop.epoch_progress.current
        yield from self._problems_of_ranks()
        if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            yield "its training_step draws batches itself (dataloader_iter); let it take a batch"
        if any(getattr(one, "persistent_workers", False) for one in loaders):
            yield (
                "persistent_workers=True keeps the workers, and generators in them that nothing can read, from epoch "
                "to epoch; use persistent_workers=False"
            )
        if len(loaders) > 1 and not is_epoch_over:
            yield "it was saved within an epoch of several training loaders; make one of them, or save at its end"
        if getattr(trainer, "reload_dataloaders_every_n_epochs", 0):
            yield "reload_dataloaders_every_n_epochs makes loaders anew; make them once"
        if batches.total.started < min(batches.total.ready, batches.total.processed):
            yield "on_train_batch_start returned -1 before, which leaves Lightning's counts of batches apart"
        if epochs.ready > epochs.started:
            yield "it was saved while an epoch began, in the middle of its hooks"
        if trainer.validating and not self._is_validation_over():
            yield "it was saved in the middle of a validation"
        if moment == "draw":
            return
        num_ahead = self._watch.position.num_drawn - len(getattr(loop._data_fetcher, "batches", ()))
        if max(batches.current.ready, num_ahead) > batches.current.processed:
            yield f"it was saved in the middle of step {batches.total.processed}; save at the end of a batch"
        elif self._has_validation_ahead():
            yield (
                "it was saved before a validation that Lightning leaves out when it resumes, and the process ended "
                "before the next batch was drawn; save after it"
            )
        if is_epoch_over:
            yield from self._problems_at_end()

    def _problems_of_ranks(self) -> Iterator[str]:
        """Yield why what this rank has cannot be saved, where there are several."""
        trainer, strategy = self._trainer, self._trainer.strategy
        num_stateful = sum(map(is_stateful, self.loaders()))
        if 0 < num_stateful < len(self.loaders()):
            yield "some of its loaders restore themselves (load_state_dict) and others do not"
        if trainer.world_size == 1:
            return
        if not isinstance(strategy, DDPStrategy | ModelParallelStrategy):
            yield (
                f"what {type(strategy).__name__} keeps on each rank is not known; DDPStrategy and "
                "ModelParallelStrategy are"
            )
        if num_stateful:
            yield "its loaders restore themselves (load_state_dict), and Lightning saves the state of rank 0's alone"
        if (problem := self._buckets.problem()) is not None:
            yield problem
        for name, parameter in trainer.lightning_module.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and (
                not isinstance(parameter, DTensor) or gradient.placements != parameter.placements
            ):
                yield f"the gradient of {name} is not sharded as its parameter is"

    def _problems_at_end(self) -> Iterator[str]:
        """Yield why a checkpoint at the end of an epoch does not do until the next batch is drawn."""
        trainer = self._trainer
        has_plateau = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        epochs: Any = trainer.fit_loop.epoch_progress.current
        ended = "and the process ended before the next batch was drawn"
        if epochs.started > epochs.processed and (has_plateau or self._has_hooks_at_epoch_end()):
            yield f"it was saved before the end of an epoch, whose hooks Lightning leaves out when it resumes, {ended}"
        if epochs.completed < epochs.processed == epochs.ready and has_plateau:
            yield f"it was saved before ReduceLROnPlateau was updated at the end of an epoch, {ended}"

    def _has_hooks_at_epoch_end(self) -> bool:
        """Return whether something is to be done at an epoch's end that a resumed run would miss."""
        return is_overridden("on_train_epoch_end", self._trainer.lightning_module) or any(
            type(callback).on_train_epoch_end is not Callback.on_train_epoch_end
            and not isinstance(callback, Checkpoint | ProgressBar)
            and not type(callback).__module__.startswith("det_callbacks.")
            for callback in self._callbacks()
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

    # what the trainer has

    def generators(self) -> dict[str, Held]:
        """Return path -> generator for those that the module, the data and the callbacks hold."""
        trainer = self._trainer
        roots: dict[str, object] = {"module": trainer.lightning_module}
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            roots["datamodule"] = datamodule
        for index, loader in enumerate(self.loaders()):
            roots[f"train_dataloader[{index}]"] = loader
        for callback in self._callbacks():
            kind = type(callback).__qualname__
            if not type(callback).__module__.startswith("det_callbacks."):
                same = sum(name.startswith(f"callback {kind}") for name in roots)
                roots[f"callback {kind}" + (f" {same + 1}" if same else "")] = callback
        return find_generators(roots, left=NOT_LOOKED_INTO)

    def loaders(self) -> list[Any]:
        """Return the loaders of the training data."""
        loader = self._trainer.fit_loop._combined_loader
        return [] if loader is None else list(loader.flattened)

    def put_sampler_seeds(self, seeds: tuple[int | None, ...]) -> None:
        """Let loaders that were just made deal out as they did; Lightning seeds them with the launch's seed."""
        for loader, seed in zip(self.loaders(), seeds, strict=False):
            if seed is not None and (sampler := _sampler(loader)) is not None:
                sampler.seed = seed

    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = vars(self._trainer)["callbacks"]
        return callbacks


def _sampler(loader: Any) -> DistributedSampler[Any] | None:
    """Return what deals the samples of a loader out to the ranks."""
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    candidates = (getattr(loader, "sampler", None), inner)
    return next((one for one in candidates if isinstance(one, DistributedSampler)), None)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def non_persistent(module: torch.nn.Module) -> set[str]:
    """Return the names of buffers that no state_dict has."""
    return {  # a private name of torch 2.13, and the only one for it
        f"{prefix}.{name}" if prefix else name
        for prefix, one in module.named_modules()
        for name in one._non_persistent_buffers_set
    }


def is_stateful(loader: Any) -> bool:
    """Return whether a loader restores its own position, through Lightning."""
    return type(loader) is not DataLoader and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def align_progress(trainer: pl.Trainer, state: ResumeState) -> None:
    """Give Lightning's loops, just restored, the counts that the uninterrupted run had at the same place."""
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress  # its class is wider than its declaration
    for progress in (epochs.current, epochs.total):
        progress.ready = progress.started  # an epoch that had only begun begins again
    has_ended = epochs.current.processed == epochs.current.ready and epochs.current.ready > 0
    if state.is_epoch_over and not has_ended and trainer.num_training_batches == float("inf"):
        # saved at the end of its last batch, which Lightning only knows of an epoch of known length
        for progress in (epochs.current, epochs.total):
            progress.processed = progress.ready
        loop.epoch_loop._batches_that_stepped += 1
        has_ended = True
    if state.is_epoch_over and has_ended:
        # With max_steps Lightning takes the epoch for unfinished, and would train one batch too many in it.
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]  # past the property of the fit loop itself
    elif not state.is_epoch_over and has_ended:
        # saved after a fit that stopped in the middle of an epoch, which Lightning counts as a whole one
        for progress in (epochs.current, epochs.total):
            progress.processed -= 1
            progress.completed = min(progress.completed, progress.processed)
        loop.restarting = True
