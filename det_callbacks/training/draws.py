"""Batches that loaders have drawn but the training has not used yet, with the indices from their samplers."""

from collections import deque
from contextlib import suppress
from typing import Any
from weakref import ref

from torch.utils.data import DataLoader, IterableDataset

from det_callbacks.internals.replaced import ReplacedMethods, subclass_of

MAX_WAITING = 64  # a fetcher holds one or two
_MAX_WAITING_OF_LOADER = 16  # limit for a loop that does not report when it trains on a batch


class Draws:
    """The loaded batches, oldest first; follows the samplers until ``detach``."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.waiting: deque[tuple[Any, dict[str, Any]]] = deque(maxlen=max_waiting)
        self._samplers = ReplacedMethods()
        self._indices: dict[str, deque[Any]] = {}

    def follow(self, name: str, loader: Any) -> None:
        """Keep the indices from a loader's sampler, if batches come in their order."""
        is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if not is_map or (loader.num_workers and not getattr(loader, "in_order", True)):
            return
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        indices = deque[Any]()

        def keep(index: Any) -> Any:
            indices.append(index)
            return index

        def watched(base: Any) -> Any:
            def iterate(self: Any) -> Any:
                indices.clear()
                return map(keep, base.__iter__(self))

            return subclass_of(base, __iter__=iterate)

        with suppress(TypeError):  # for example a list of indices: instances of built-in types keep their class
            self._samplers.put(sampler, "__class__", watched)
            self._indices[name] = indices

    def add(self, batch: Any) -> None:
        self.waiting.append((batch, {name: known.popleft() for name, known in self._indices.items() if known}))

    def detach(self) -> None:
        self._samplers.restore()
        self.waiting.clear()
        self._indices.clear()


class DrawnLoader:
    """A loader during iteration, held weakly, and the batches that it returned."""

    def __init__(self, loader: Any) -> None:
        self._loader = ref(loader)
        self.draws = Draws(_MAX_WAITING_OF_LOADER)
        self.draws.follow("train_dataloader", loader)
        self.num_iterations = 0

    @property
    def loader(self) -> Any:
        return self._loader()
