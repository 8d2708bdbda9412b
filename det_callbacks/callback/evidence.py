"""What is gathered during a fit to explain a difference: generators at fixed points, and how batches were drawn."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from det_callbacks.callback.draws import Drawn, DrawWatch, asked_workers, set_workers
from det_callbacks.checkpoint.fit import NOT_LOOKED_INTO
from det_callbacks.checkpoint.held import find_generators
from det_callbacks.digest import digest_bytes, unobserved
from det_callbacks.errors import SettingsError
from det_callbacks.replaced_in_lightning import ReplacedInLightning
from det_callbacks.runs.evidence import CONSTANTS, Row
from det_callbacks.trace.components import has_parts, holds_data
from det_callbacks.trace.generators import Ledger
from det_callbacks.trace.leaves import flatten
from det_callbacks.variables import NUM_WORKERS

BATCH = "batch"
"""The point at which what a batch holds is noted."""

MAX_INDICES = 256
"""Indices of a batch that are kept as they are, beside the digest of all; zstd makes about 2 bytes of each."""

_FIT_START = "fit start"
_HOOKS = (
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


class Evidence:
    """Gathers the evidence of one fit; some 40 microseconds a step.

    Args:
        trainer: whose fit it is, before its data is set up.
        own: the callback that this is for, which is not followed.

    Raises:
        SettingsError: the environment asks for a number of workers that is none.
    """

    def __init__(self, trainer: pl.Trainer, own: pl.Callback) -> None:
        self._ledger = Ledger()
        self._draws = DrawWatch(self._ledger)
        self._trainer = trainer
        self._replaced = ReplacedInLightning()
        self._num_workers = asked_workers()
        self._has_workers = False
        self._ledger.mark(_FIT_START, with_seeds=True)
        state = (*trainer.lightning_module.parameters(), *trainer.lightning_module.buffers())
        with unobserved():
            self._ledger.note(_FIT_START, CONSTANTS, sum(map(_is_constant, state)))
        # the user's own come first, and what only draws bars is none of those that a difference is blamed on
        callbacks: list[pl.Callback] = vars(trainer)["callbacks"]
        others = [one for one in callbacks if one is not own and not isinstance(one, ProgressBar)]
        others.sort(key=lambda callback: type(callback).__module__.startswith("lightning."))
        for hook in _HOOKS:
            names = [type(callback).__qualname__ for callback in others if _has_hook(callback, hook)]
            if is_overridden(hook, trainer.lightning_module, pl.LightningModule):
                names.insert(0, type(trainer.lightning_module).__qualname__)
            if names:
                self._ledger.note(_FIT_START, f"callbacks of {hook}", text=", ".join(names))

    def attach(self) -> None:
        """Follow the loaders once they are there."""
        loop: Any = self._trainer.fit_loop

        def load_and_follow(original: Callable[[], None]) -> None:
            original()
            self._follow(loop._combined_loader)

        self._replaced.put(loop, "_load_combined_loader_states", lambda original: partial(load_and_follow, original))

    def _follow(self, loader: CombinedLoader) -> None:
        inner = loader.flattened
        if self._num_workers is not None:
            self._has_workers = set_workers(inner, self._num_workers)
        self._draws.attach(loader)
        roots = {"train_dataloader": inner[0] if len(inner) == 1 else inner}
        self._ledger.held = find_generators(roots, left=(*NOT_LOOKED_INTO, DrawWatch, pl.LightningModule))

    def detach(self) -> None:
        """Leave loops and loaders as they were; may be called more than once."""
        self._draws.detach()
        self._replaced.restore()

    def check_loaders(self) -> None:
        """Raise ``SettingsError`` where the loaders of the fit that starts have not the workers that were asked for."""
        if self._num_workers is not None and not self._has_workers:
            raise SettingsError(
                f"{NUM_WORKERS}={self._num_workers}, but the training has no torch DataLoader whose number of "
                "workers could be set before it is first iterated over. Unset the variable, or set the number in the "
                "program."
            )

    def mark(self, point: str) -> None:
        """Note the states of all generators at a point of the fit."""
        self._ledger.mark(point, with_seeds=point == "after forward")

    def note_samples(self, digests: Sequence[int]) -> None:
        """Note the sketch of the samples of the step's batch, see ``det_callbacks.trace.batches``."""
        for number, digest in enumerate(digests):
            self._ledger.note(BATCH, f"sample {number}", digest)

    def begin_step(self, batch: Any, samples: Sequence[int] = ()) -> None:
        """Note what the batch of a step is made of, when its trace has begun.

        Args:
            batch: as the training step gets it.
            samples: the sketch of its samples, as far as it is known by now.
        """
        self._ledger.mark("batch start", with_seeds=True)
        self.note_samples(samples)
        fetcher: Any = self._trainer.fit_loop._data_fetcher
        waiting = len(fetcher.batches) if isinstance(fetcher, _PrefetchDataFetcher) else 0
        drawn = self._draws.current(waiting)
        if drawn is None:
            return
        for loader, index in drawn.indices.items():
            indices = _whole_numbers(index)
            if indices is not None:
                text = json.dumps(indices[:MAX_INDICES])
                self._ledger.note(BATCH, f"indices of {loader}", _digest(indices), text)
                self._ledger.note(BATCH, f"sorted indices of {loader}", _digest(sorted(indices)))
        self._note_loaded(drawn, batch)

    def take(self, step: int) -> list[Row]:
        """Return the evidence up to the end of a step, since the last time."""
        return self._ledger.take(step)

    def _note_loaded(self, drawn: Drawn, batch: Any) -> None:
        """Note what left the loader, where the training step gets something else: moved to a device, or transformed."""
        given = {id(value) for _, value in flatten(batch, "batch", is_whole=True)}
        with unobserved():
            for name, value in flatten(drawn.batch, "batch", is_whole=True):
                if isinstance(value, Tensor) and id(value) not in given and holds_data(value):
                    self._ledger.note_tensor(BATCH, f"{name} as loaded", value)


def _is_constant(tensor: Tensor) -> bool:
    """Return whether a tensor holds one value only, as biases and scales do at the start; the first 4,096 are read."""
    if not holds_data(tensor) or has_parts(tensor) or tensor.numel() < 2:
        return tensor.numel() == 1
    head = tensor.detach().flatten()[:4096]
    return bool((head == head[0]).all())


def _has_hook(callback: pl.Callback, hook: str) -> bool:
    return getattr(type(callback), hook, None) is not getattr(pl.Callback, hook)


def _whole_numbers(index: Any) -> list[int] | None:
    """Return what a sampler said as a list of numbers; None where it is something else."""
    values = index if isinstance(index, list | tuple) else [index]
    try:
        return [int(value) for value in values]
    except (TypeError, ValueError):
        return None  # names, slices, pairs: then only what was loaded tells batches apart


def _digest(numbers: Sequence[int]) -> int:
    return digest_bytes(repr(numbers).encode())
