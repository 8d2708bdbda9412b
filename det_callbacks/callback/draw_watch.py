"""How the batches of a fit are drawn: which samples, when, and what the loader was set to.

Nothing here changes what is drawn. ``torch.utils.data.DataLoader`` makes its iterators by ``_get_iterator``; an
iterator takes what its sampler yields in order, and returns the batches by ``_next_data`` (read at torch 2.13).
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from det_callbacks.resume.loaders import follow

MAX_WAITING = 64
"""Batches drawn and not trained on yet that are known; a fetcher holds one or two."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A batch as it left the loaders.

    Attributes:
        batch: itself.
        indices: loader -> what its sampler said: of map-style data sets, where it can be told.
    """

    batch: Any
    indices: Mapping[str, Any]


class DrawWatch:
    """Follows the loaders of a fit; 2 microseconds a batch.

    Args:
        mark: called with the name of a point: before iterators are made, and before a batch is drawn.
        note: called with the name and the text of each setting of a loader before its iterators are made.
    """

    def __init__(self, mark: Callable[[str], object], note: Callable[[str, str], object]) -> None:
        self._mark = mark
        self._note = note
        self._waiting: deque[Drawn] = deque(maxlen=MAX_WAITING)
        self._last: dict[str, Any] = {}
        self._loader: CombinedLoader | None = None
        self._undo: list[Callable[[], object]] = []

    def attach(self, loader: CombinedLoader) -> None:
        """Follow a loader; the one before it is let go."""
        self.detach()
        self._loader = loader
        self._undo.append(follow(loader, self))
        for name, inner in self._loaders():
            if isinstance(inner, DataLoader):
                self._follow(name, inner)

    def detach(self) -> None:
        """Leave the loader as it was."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._waiting.clear()
        self._last.clear()
        self._loader = None

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
        for name, loader in self._loaders():
            for setting, text in settings_of(loader):
                self._note(f"{setting} of {name}", text)
        self._mark("before the loader starts")

    def begin_draw(self) -> None:
        """Note that a batch is about to be drawn."""
        self._mark("before a batch is drawn")

    def end_draw(self, batch: Any) -> None:
        """Keep what was drawn until it is trained on."""
        indices, self._last = self._last, {}
        self._waiting.append(Drawn(batch, indices))

    def _loaders(self) -> Iterator[tuple[str, Any]]:
        inner = [] if self._loader is None else self._loader.flattened
        for number, loader in enumerate(inner):
            yield "train_dataloader" if len(inner) == 1 else f"train_dataloader {number}", loader

    def _follow(self, name: str, loader: Any) -> None:
        """Follow what the sampler of a loader says, and which of it a batch is made of."""
        is_ordered = getattr(loader, "in_order", True) or not loader.num_workers
        if isinstance(loader.dataset, IterableDataset) or not is_ordered:
            return
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        asked: deque[Any] = deque()
        if not self._follow_sampler(sampler, asked):
            return
        make = loader._get_iterator

        def make_followed() -> Any:
            iterator = make()
            next_data = type(iterator)._next_data
            # weak: an iterator that held itself would keep its workers until the garbage collector comes by
            followed = weakref.ref(iterator)

            def followed_data() -> Any:
                data = next_data(followed())
                if asked:
                    self._last[name] = asked.popleft()
                return data

            iterator._next_data = followed_data
            return iterator

        loader._get_iterator = make_followed
        self._undo.append(lambda: vars(loader).pop("_get_iterator", None))

    def _follow_sampler(self, sampler: Any, asked: deque[Any]) -> bool:
        base = type(sampler)

        class Watched(base):  # type: ignore[valid-type, misc]  # Python looks __iter__ up in the class
            def __iter__(self) -> Any:
                asked.clear()
                return _noted(super().__iter__(), asked)

        Watched.__name__, Watched.__qualname__, Watched.__module__ = base.__name__, base.__qualname__, base.__module__
        try:
            sampler.__class__ = Watched
        except TypeError:
            return False  # a list of indices, say: built-in objects keep their class, and then nobody is told
        self._undo.append(lambda: setattr(sampler, "__class__", base))
        return True


def _noted(indices: Iterator[Any], asked: deque[Any]) -> Iterator[Any]:
    for index in indices:
        asked.append(index)
        yield index


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
