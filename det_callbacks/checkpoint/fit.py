"""Reads from Lightning's loops what a fit is in the middle of, and what stands in the way of resuming it (2.6.6)."""

from collections.abc import Iterator
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

from det_callbacks.checkpoint.buckets import GradientBuckets
from det_callbacks.checkpoint.draws import DataWatch
from det_callbacks.checkpoint.held import find_generators
from det_callbacks.checkpoint.state import ResumeState
from det_callbacks.digest import digest_tensor, format_digest, unobserved
from det_callbacks.errors import DetCallbacksError
from det_callbacks.rng import Held

NOT_LOOKED_INTO = (pl.Trainer, Logger, Strategy, _Loop, _BaseDataLoaderIter, torch.optim.Optimizer, DataWatch)
"""What is not searched for generators: it leads to everything, or is our own."""

GRADIENT, BUFFER = "gradient ", "buffer "
"""How the names of tensors begin that are saved beside a checkpoint."""


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

    def read(self, problems: tuple[str, ...], *, is_epoch_over: bool, begins_epoch: bool) -> ResumeState:
        """Return what a process needs to go on from here.

        Args:
            problems: why a resumed run cannot be the same run.
            is_epoch_over: the data of an epoch was used up when the checkpoint was saved.
            begins_epoch: the hooks of the next epoch have not run yet.
        """
        trainer, batches = self._trainer, self._batches
        return ResumeState(
            step=batches.total.ready,
            epoch=trainer.current_epoch,
            is_epoch_over=is_epoch_over,
            generators=self._watch.capture(),
            position=None if begins_epoch else self._watch.position,
            accumulates=trainer.accumulate_grad_batches,
            values=self.values(),
            reduction=self._buckets.read(),
            problems=problems,
        )

    def is_epoch_over(self) -> bool:
        """Return whether the data of the epoch is used up."""
        return bool(self._batches.is_last_batch or self._trainer.fit_loop.epoch_loop._num_ready_batches_reached())

    def tensors(self, state: ResumeState) -> dict[str, torch.Tensor]:
        """Return the tensors to save: gradients that the next batch adds to, and the buffers of another rank than 0.

        Lightning saves the buffers of rank 0; DDP makes them equal before the next forward pass, or not at all. What is
        sharded is saved by the strategy.
        """
        trainer, module = self._trainer, self._trainer.lightning_module
        found: dict[str, torch.Tensor] = {}
        # in manual optimization only the training step knows
        adds = not state.is_epoch_over and self._batches.current.ready % trainer.accumulate_grad_batches
        if adds or not module.automatic_optimization:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    found[GRADIENT + name] = local_part(parameter.grad.detach())
        if trainer.global_rank:
            left_out = _non_persistent(module)
            for name, buffer in module.named_buffers():
                if name not in left_out and not isinstance(buffer, DTensor):
                    found[BUFFER + name] = buffer.detach()
        return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in found.items()}

    def values(self) -> dict[str, Any]:
        """Return what a checkpoint has to bring back, by name; one pass over the weights.

        Digests of parameters and persistent buffers (on rank 0: Lightning saves those), which of them are frozen,
        options of the optimizers, and by which seeds the samplers of several ranks shuffle alike.
        """
        module = self._trainer.lightning_module
        left_out = _non_persistent(module)
        buffers = () if self._trainer.global_rank else module.named_buffers()
        found: dict[str, Any] = {}
        with unobserved():
            for name, tensor in (*module.named_parameters(), *buffers):
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
        for index, loader in enumerate(self.loaders()):
            inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
            for sampler in (getattr(loader, "sampler", None), inner):
                if isinstance(sampler, DistributedSampler):
                    found[f"the seed of the sampler of loader {index}"] = sampler.seed
        return found

    def callback_states(self) -> dict[str, str]:
        """Return the states of callbacks as text by name, but for those that save checkpoints or measure time."""
        return {
            f"state of {callback.state_key}": repr(callback.state_dict())
            for callback in self._callbacks()
            if not isinstance(callback, Checkpoint | Timer)
        }

    # what stands in the way

    def problems(self) -> Iterator[str]:
        """Yield why a checkpoint that is saved now cannot be resumed to the same run."""
        trainer, loop, loaders, batches = self._trainer, self._trainer.fit_loop, self.loaders(), self._batches
        epochs: Any = loop.epoch_progress.current
        fetcher: Any = loop._data_fetcher
        num_stateful = sum(map(is_stateful, loaders))
        if trainer.world_size > 1 and not isinstance(trainer.strategy, DDPStrategy | ModelParallelStrategy):
            yield (
                f"what {type(trainer.strategy).__name__} keeps on each rank is not known; use DDPStrategy or "
                "ModelParallelStrategy"
            )
        if (problem := self._buckets.problem()) is not None:
            yield problem
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            yield "its training_step draws batches itself (dataloader_iter); let it take a batch"
        elif fetcher is not None and fetcher.length is None:
            yield (
                "its training data has no length, so that Lightning draws a batch before it is trained on; give the "
                "data set a __len__"
            )
        if any(getattr(one, "persistent_workers", False) for one in loaders):
            yield (
                "persistent_workers=True keeps the workers, and generators in them that nothing can read, from epoch "
                "to epoch; use persistent_workers=False"
            )
        if len(loaders) > 1:
            yield "it has several training loaders; make one of them"
        elif num_stateful and trainer.world_size > 1:
            yield "its loaders restore themselves (load_state_dict), and Lightning saves the state of rank 0's alone"
        if getattr(trainer, "reload_dataloaders_every_n_epochs", 0):
            yield "reload_dataloaders_every_n_epochs makes loaders anew; make them once"
        if batches.total.started < min(batches.total.ready, batches.total.processed):
            yield "on_train_batch_start returned -1 before, which leaves Lightning's counts of batches apart"
        if epochs.ready > epochs.started:
            yield "it was saved while an epoch began, in the middle of its hooks"
        if trainer.validating and not self._is_validation_over():
            yield "it was saved in the middle of a validation; save at its end"
        if batches.current.ready > batches.current.processed:
            yield f"it was saved in the middle of step {batches.total.processed}; save at the end of a batch"

    def missed(self) -> Iterator[str]:
        """Yield what comes before the next batch, and Lightning leaves out when it resumes from a checkpoint of now.

        A process that ends before the next batch is drawn has not seen what that changes.
        """
        trainer, loop, batches = self._trainer, self._trainer.fit_loop, self._batches.current
        epochs: Any = loop.epoch_progress.current
        fetcher = None if trainer.validating or trainer.sanity_checking else loop._data_fetcher
        is_at_end = fetcher is not None and batches.completed < batches.ready
        if fetcher is not None and is_at_end and loop.epoch_loop._should_check_val_fx(fetcher):
            yield "a validation"
        if not self.is_epoch_over():
            return
        has_plateau = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        if epochs.started > epochs.processed and (has_plateau or self._has_hooks_at_epoch_end()):
            yield "the hooks of an epoch's end"
        elif epochs.completed < epochs.processed == epochs.ready and has_plateau:
            yield "the update of ReduceLROnPlateau"

    def _has_hooks_at_epoch_end(self) -> bool:
        return is_overridden("on_train_epoch_end", self._trainer.lightning_module) or any(
            type(callback).on_train_epoch_end is not Callback.on_train_epoch_end
            and not isinstance(callback, Checkpoint | ProgressBar)
            and not _is_ours(callback)
            for callback in self._callbacks()
        )

    def _is_validation_over(self) -> bool:
        progress = self._trainer.fit_loop.epoch_loop.val_loop.batch_progress
        return bool(progress.is_last_batch and progress.current.ready == progress.current.completed)

    # what the trainer has

    def generators(self) -> dict[str, Held]:
        """Return path -> generator for those that the module, the data and the callbacks hold."""
        trainer = self._trainer
        roots: dict[str, object] = {"module": trainer.lightning_module}
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            roots["datamodule"] = datamodule
        roots |= {f"train_dataloader[{index}]": loader for index, loader in enumerate(self.loaders())}
        for callback in self._callbacks():
            if not _is_ours(callback):
                kind = f"callback {type(callback).__qualname__}"
                same = sum(name.startswith(kind) for name in roots)
                roots[f"{kind} {same + 1}" if same else kind] = callback
        return find_generators(roots, left=NOT_LOOKED_INTO)

    def loaders(self) -> list[Any]:
        """Return the loaders of the training data."""
        loader = self._trainer.fit_loop._combined_loader
        return [] if loader is None else list(loader.flattened)

    @property
    def _batches(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress  # its class is wider than its declaration

    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = vars(self._trainer)["callbacks"]
        return callbacks


def _is_ours(callback: Callback) -> bool:
    return type(callback).__module__.startswith("det_callbacks.")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _non_persistent(module: torch.nn.Module) -> set[str]:
    """Return the names of buffers that no state_dict has."""
    return {  # a private name of torch 2.13, and the only one for it
        f"{prefix}.{name}" if prefix else name
        for prefix, one in module.named_modules()
        for name in one._non_persistent_buffers_set
    }


def is_stateful(loader: Any) -> bool:
    """Return whether a loader restores its own position, through Lightning."""
    return type(loader) is not DataLoader and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
