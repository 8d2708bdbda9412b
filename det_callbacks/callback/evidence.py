"""What is gathered during a fit to explain a difference: generators at fixed points, and how batches were drawn."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from det_callbacks.checkpoint.loaders import find_generators, follow
from det_callbacks.compare.evidence import BATCH
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.errors import SettingsError
from det_callbacks.host_digest import digest_bytes
from det_callbacks.internals.lightning import LOAD_LOADER_STATES, PrefetchFetcher, combined_loader, data_fetcher
from det_callbacks.replaced_in_lightning import ReplacedInLightning
from det_callbacks.runs.evidence import AFTER, BEFORE, CALLBACKS, CONSTANTS
from det_callbacks.trace.components import has_parts, holds_data
from det_callbacks.trace.generators import Ledger
from det_callbacks.trace.leaves import flatten
from det_callbacks.variables import NUM_WORKERS

_FIT_START = "fit start"
_LOADER_START = "before the loader starts"
MAX_INDICES = 256  # of a batch that are kept as they are, beside the digest of all; zstd makes about 2 bytes of each
MAX_WAITING = 64  # batches drawn and not trained on yet that are known; a fetcher holds one or two


class Evidence(Ledger):
    """The ledger of one fit: also who has which hook, and how batches are drawn; it costs 40 microseconds a step.

    It follows the batches that wait to be trained on, and the indices that samplers drew for them, if in order.
    """

    def __init__(self, trainer: pl.Trainer, own: pl.Callback) -> None:
        super().__init__()
        self._trainer = trainer
        self._replaced = ReplacedInLightning()
        self._let_go: Callable[[], object] = lambda: None
        self._samplers = ReplacedInLightning()
        self._indices: dict[str, deque[Any]] = {}
        self._waiting: deque[tuple[Any, dict[str, Any]]] = deque(maxlen=MAX_WAITING)
        if NUM_WORKERS in os.environ and combined_loader(trainer.fit_loop) is not None:
            set_workers([], os.environ[NUM_WORKERS])  # too late, so it raises: the loader has been iterated over
        self.mark(_FIT_START, with_seeds=True)
        state = (*trainer.lightning_module.parameters(), *trainer.lightning_module.buffers())
        with unobserved():
            self.note(_FIT_START, CONSTANTS, sum(map(_is_constant, state)))
        self._note_hooks(own)

    def _note_hooks(self, own: pl.Callback) -> None:
        """Note who has which hook: the user's own first, and nobody who only draws bars."""
        callbacks: list[pl.Callback] = vars(self._trainer)["callbacks"]
        place, module = callbacks.index(own), self._trainer.lightning_module
        for order, neighbours in ((BEFORE, callbacks[:place]), (AFTER, callbacks[place + 1 :])):
            others = [one for one in neighbours if not isinstance(one, ProgressBar)]
            others.sort(key=lambda callback: type(callback).__module__.startswith("lightning."))
            for hook in (name for name in vars(pl.Callback) if name.startswith("on_")):
                users = [one for one in others if getattr(type(one), hook, None) is not getattr(pl.Callback, hook)]
                names = [type(one).__qualname__ for one in users]
                if order == AFTER and is_overridden(hook, module, pl.LightningModule):
                    names.insert(0, type(module).__qualname__)  # its hooks are called after those of all callbacks
                if names:
                    self.note(_FIT_START, f"{CALLBACKS}{order} {hook}", text=", ".join(names))

    def attach(self) -> None:
        """Follow the loaders once they are there."""
        loop = self._trainer.fit_loop
        self._replaced.put(loop, LOAD_LOADER_STATES, lambda load: partial(self._load_and_follow, load))
        if combined_loader(loop) is not None:  # already: a scheduler has asked for the number of steps
            self._load_and_follow(lambda: None)

    def _load_and_follow(self, load: Callable[[], None]) -> None:
        load()
        self._leave_loader()
        loader = combined_loader(self._trainer.fit_loop)
        inner = loader.flattened
        if NUM_WORKERS in os.environ:
            set_workers(inner, os.environ[NUM_WORKERS])
        name, is_one = "train_dataloader", len(inner) == 1
        self.held = find_generators({name: inner[0] if is_one else inner}, left=(pl.LightningModule,))
        self._let_go = follow(loader, self)
        for number, one in enumerate(inner):
            place = name if is_one else f"{name} {number}"
            for setting, text in _settings_of(one):
                self.note(_LOADER_START, f"{setting} of {place}", text=text)
            is_map = isinstance(one, DataLoader) and not isinstance(one.dataset, IterableDataset)
            is_in_order = is_map and (not one.num_workers or getattr(one, "in_order", True))
            # a draw of "sequential" is of one of the loaders, and nobody says of which
            if is_in_order and (loader._mode != "sequential" or is_one):
                self._follow_sampler(place, one)

    def _follow_sampler(self, name: str, loader: Any) -> None:
        """Keep what the sampler of a loader draws: workers are sent it ahead, and return the batches in that order."""
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        indices = deque[Any]()

        def keep(index: Any) -> Any:
            indices.append(index)
            return index

        def watched(base: Any) -> Any:
            def iterate(self: Any) -> Any:
                indices.clear()
                return map(keep, base.__iter__(self))  # called now: a sampler may draw before its first index

            names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__iter__": iterate}
            return type(base.__name__, (base,), names)

        with suppress(TypeError):  # a list of indices, say: built-in objects keep their class
            self._samplers.put(sampler, "__class__", watched)
            self._indices[name] = indices

    def _leave_loader(self) -> None:
        self._samplers.restore()
        self._let_go()
        self._waiting.clear()
        self._indices.clear()

    def detach(self) -> None:
        """Leave loops and loaders as they were; may be called more than once."""
        self._leave_loader()
        self._replaced.restore()

    def begin_iteration(self) -> None:
        """Note that the loader begins to be iterated over."""
        self._waiting.clear()
        self.mark(_LOADER_START)

    def begin_draw(self) -> None:
        """Note that a batch is about to be drawn."""
        self.mark("before a batch is drawn")

    def end_draw(self, batch: Any) -> None:
        """Keep what was drawn until it is trained on."""
        self._waiting.append((batch, {name: known.popleft() for name, known in self._indices.items() if known}))

    def begin_step(self, batch: Any) -> None:
        """Note what the batch of a step is made of, as the training step gets it, when its trace has begun."""
        self.mark("batch start", with_seeds=True)
        fetcher = data_fetcher(self._trainer.fit_loop)
        num_fetched = len(fetcher.batches) if isinstance(fetcher, PrefetchFetcher) else 0
        if len(self._waiting) <= num_fetched:
            return
        loaded, indices_by_loader = self._waiting[-1 - num_fetched]
        for loader, index in indices_by_loader.items():
            indices = _whole_numbers(index)
            if indices is not None:
                digest, of_sorted = (digest_bytes(repr(numbers).encode()) for numbers in (indices, sorted(indices)))
                self.note(BATCH, f"indices of {loader}", digest, json.dumps(indices[:MAX_INDICES]))
                self.note(BATCH, f"sorted indices of {loader}", of_sorted)
        # what left the loader, where the training step gets something else: moved to a device, or transformed
        given = {id(value) for _, value in flatten(batch, "batch", is_whole=True)}
        with unobserved():
            for name, value in flatten(loaded, "batch", is_whole=True):
                if isinstance(value, Tensor) and id(value) not in given and holds_data(value):
                    self.note_tensor(BATCH, f"{name} as loaded", value)


def _is_constant(tensor: Tensor) -> bool:
    """Return whether a tensor holds one value only, as biases and scales do at the start; the first 4,096 are read."""
    if not holds_data(tensor) or has_parts(tensor) or tensor.numel() < 2:
        return tensor.numel() == 1
    head = tensor.detach().flatten()[:4096]
    return bool((head == head[0]).all())


def _settings_of(loader: Any) -> Iterator[tuple[str, str]]:
    """Yield the settings of a loader that decide what it draws: (name, text)."""
    yield "type", type(loader).__qualname__
    if not isinstance(loader, DataLoader):
        return
    yield "data set", type(loader.dataset).__qualname__
    if hasattr(loader.dataset, "__len__"):
        yield "length of the data set", str(len(loader.dataset))
    for name in ("batch_size", "num_workers", "drop_last", "persistent_workers", "in_order"):
        yield name, str(getattr(loader, name, None))
    samplers = loader.sampler, loader.batch_sampler
    yield "sampler", type(loader.sampler).__qualname__
    yield "set_epoch", str(any(hasattr(sampler, "set_epoch") for sampler in samplers))
    yield "collate_fn", getattr(loader.collate_fn, "__qualname__", type(loader.collate_fn).__qualname__)
    yield "generator of its own", str(isinstance(loader.generator, torch.Generator))


def _whole_numbers(index: Any) -> list[int] | None:
    """Return what a sampler said as a list of numbers; None where it is something else: names, slices, pairs."""
    try:
        return [int(value) for value in (index if isinstance(index, list | tuple) else [index])]
    except (TypeError, ValueError):
        return None


def set_workers(loaders: Sequence[Any], number: str) -> None:
    """Give loaders that were not iterated over yet so many workers (``check --vary workers``), as torch 2.13 has it.

    One without workers has no ``prefetch_factor`` and refuses a ``timeout``.
    """
    known = [loader for loader in loaders if isinstance(loader, DataLoader)]
    if not known or not number.isdecimal():
        raise SettingsError(
            f"{NUM_WORKERS}={number}, but the training has no torch DataLoader that can be given that many workers "
            "before it is first iterated over. Unset the variable, or set the number in the program."
        )
    for loader in known:
        loader.num_workers = int(number)
        if not loader.num_workers:
            loader.timeout = 0
        elif loader.prefetch_factor is None:
            loader.prefetch_factor = 2
