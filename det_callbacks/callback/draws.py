"""How the batches of a fit are drawn: which samples, when, by which loaders, and with how many workers.

Nothing here changes what is drawn.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from det_callbacks.checkpoint.draws import follow
from det_callbacks.errors import SettingsError
from det_callbacks.replaced_in_lightning import ReplacedInLightning
from det_callbacks.trace.generators import Ledger
from det_callbacks.variables import NUM_WORKERS

MAX_WAITING = 64
"""Batches drawn and not trained on yet that are known; a fetcher holds one or two."""

LOADER_START = "before the loader starts"


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A batch as it left the loaders.

    Attributes:
        batch: itself.
        indices: loader -> the indices that its sampler drew: of map-style data sets, where they are known.
    """

    batch: Any
    indices: Mapping[str, Any]


class DrawWatch:
    """Follows the loaders of a fit; 2 microseconds a batch.

    Args:
        ledger: is told the settings of the loaders, and the generators before each iteration and each draw.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: deque[Drawn] = deque(maxlen=MAX_WAITING)
        self._loaders: dict[str, Any] = {}
        self._indices: dict[str, deque[Any]] = {}
        self._replaced = ReplacedInLightning()
        self._let_go: Callable[[], object] = lambda: None

    def attach(self, loader: CombinedLoader) -> None:
        """Follow a loader; the one before it is let go."""
        self.detach()
        inner = loader.flattened
        name = "train_dataloader"
        self._loaders = {name: inner[0]} if len(inner) == 1 else {f"{name} {at}": one for at, one in enumerate(inner)}
        self._let_go = follow(loader, self)
        for name, one in self._loaders.items():
            # a draw of "sequential" is of one of the loaders, and nobody says of which
            if _draws_in_order(one) and (loader._mode != "sequential" or len(inner) == 1):
                self._follow_sampler(name, one)

    def detach(self) -> None:
        """Leave the loader as it was."""
        self._replaced.restore()
        self._let_go()
        for known in (self._waiting, self._loaders, self._indices):
            known.clear()

    def current(self, num_fetched: int) -> Drawn | None:
        """Return the batch that is trained on now; None where it was not followed.

        Args:
            num_fetched: batches that were drawn after it and wait.
        """
        position = len(self._waiting) - 1 - num_fetched
        return self._waiting[position] if position >= 0 else None

    # what the loader calls

    def begin_iteration(self) -> None:
        """Note that the loader begins to be iterated over."""
        self._waiting.clear()
        for name, loader in self._loaders.items():
            for setting, text in settings_of(loader):
                self._ledger.note(LOADER_START, f"{setting} of {name}", text=text)
        self._ledger.mark(LOADER_START)

    def begin_draw(self) -> None:
        """Note that a batch is about to be drawn."""
        self._ledger.mark("before a batch is drawn")

    def end_draw(self, batch: Any) -> None:
        """Keep what was drawn until it is trained on."""
        drawn = {name: indices.popleft() for name, indices in self._indices.items() if indices}
        self._waiting.append(Drawn(batch, drawn))

    def _follow_sampler(self, name: str, loader: Any) -> None:
        """Keep what the sampler of a loader draws: workers are sent it ahead, and return the batches in that order."""
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        indices = deque[Any]()

        def watched(base: Any) -> Any:
            def iterate(self: Any) -> Any:
                indices.clear()
                return _noted(base.__iter__(self), indices)  # called now: a sampler may draw before its first index

            names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__iter__": iterate}
            return type(base.__name__, (base,), names)

        with suppress(TypeError):  # a list of indices, say: built-in objects keep their class
            self._replaced.put(sampler, "__class__", watched)
            self._indices[name] = indices


def _noted(drawn: Iterator[Any], indices: deque[Any]) -> Iterator[Any]:
    for index in drawn:
        indices.append(index)
        yield index


def _draws_in_order(loader: Any) -> bool:
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return is_map and (not loader.num_workers or getattr(loader, "in_order", True))


def settings_of(loader: Any) -> Iterator[tuple[str, str]]:
    """Yield the settings of a loader that decide what it draws: (name, text)."""
    yield "type", type(loader).__qualname__
    if not isinstance(loader, DataLoader):
        return
    yield "data set", type(loader.dataset).__qualname__
    if hasattr(loader.dataset, "__len__"):
        yield "length of the data set", str(len(loader.dataset))
    for name in ("batch_size", "num_workers", "drop_last", "persistent_workers", "in_order"):
        yield name, str(getattr(loader, name, None))
    yield "sampler", type(loader.sampler).__qualname__
    yield "collate_fn", getattr(loader.collate_fn, "__qualname__", type(loader.collate_fn).__qualname__)
    yield "generator of its own", str(isinstance(loader.generator, torch.Generator))


def asked_workers() -> int | None:
    """Return the number of workers that the environment asks for (``det-callbacks check --vary workers``).

    Raises:
        SettingsError: it asks for what is no number.
    """
    text = os.environ.get(NUM_WORKERS)
    if text is not None and not text.isdecimal():
        raise SettingsError(
            f"{NUM_WORKERS} is the number of workers of the training's DataLoaders, from 0 on; got "
            f"{text!r}. Unset it, or give it a whole number."
        )
    return None if text is None else int(text)


def set_workers(loaders: Sequence[Any], number: int) -> bool:
    """Give loaders that were not iterated over yet so many workers, and what goes with them; return whether one is one.

    Looked at in torch 2.13: a loader asks for its number when it makes an iterator. One without workers has no
    ``prefetch_factor`` and refuses a ``timeout``; ``persistent_workers`` counts only where there are some.
    """
    known = [loader for loader in loaders if isinstance(loader, DataLoader)]
    for loader in known:
        loader.num_workers = number
        if number and loader.prefetch_factor is None:
            loader.prefetch_factor = 2
        if not number:
            loader.timeout = 0
    return bool(known)
