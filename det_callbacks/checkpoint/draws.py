"""Follows how the batches of an epoch are drawn, so that they can be drawn again.

Nothing here changes what is drawn: a run that is watched has the data and the generator states of one that is not.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from det_callbacks.checkpoint.state import DataPosition
from det_callbacks.digest import digest_bytes, digest_tensor, format_digest, unobserved
from det_callbacks.rng import GeneratorStates, Held
from det_callbacks.trace.leaves import leaves


class Follower(Protocol):
    """Is called at each iteration over a loader and at each batch."""

    def begin_iteration(self) -> None:
        """Called before the loader makes its iterators."""

    def begin_draw(self) -> None:
        """Called before a batch is drawn."""

    def end_draw(self, batch: Any) -> None:
        """Called with a batch that was drawn."""


class _Followed(CombinedLoader):
    """A loader that calls its followers; those that came last are called first before, and last after."""

    _followers: list[Follower]

    def __iter__(self) -> Any:
        for follower in self._followers[::-1]:
            follower.begin_iteration()
        return super().__iter__()

    def __next__(self) -> Any:
        for follower in self._followers[::-1]:
            follower.begin_draw()
        drawn = super().__next__()
        for follower in self._followers:
            follower.end_draw(drawn[0])
        return drawn


def follow(loader: CombinedLoader, follower: Follower) -> Callable[[], object]:
    """Call a follower at what a loader does; return a function that ends that, in whatever order several end.

    Python looks ``__iter__`` and ``__next__`` up in the class, so as long as it is followed the loader has a subclass
    of its own, under the same name.
    """
    base = type(loader)
    if not issubclass(base, _Followed):
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "_followers": []}
        # ours first, so that its super() is the loader's own class
        loader.__class__ = type(base.__name__, (_Followed, base), names)
    followed: Any = type(loader)
    followed._followers.append(follower)

    def end() -> None:
        if follower in followed._followers:
            followed._followers.remove(follower)
        if not followed._followers and type(loader) is followed:
            loader.__class__ = followed.__bases__[1]

    return end


class DataWatch:
    """Follows how the batches of a fit are drawn from its loaders; 1 to 5 microseconds a batch.

    Args:
        before_draw: called just before a batch is drawn that training will have.

    Attributes:
        position: in the epoch under way; None before the loader was iterated over.
        num_iterations: over the loader that were begun.
        held: path -> generator that an object of the training holds.
        restore: called once, just before the next batch is drawn, to restore what it needs.
    """

    def __init__(self, before_draw: Callable[[], object]) -> None:
        self.position: DataPosition | None = None
        self.num_iterations = 0
        self.held: Mapping[str, Held] = {}
        self.restore: Callable[[], object] | None = None
        self._before_draw = before_draw
        self._is_repeating = False
        self._let_go: Callable[[], object] = lambda: None

    def attach(self, loader: CombinedLoader) -> None:
        """Follow a loader; the one before it is let go."""
        self.detach()
        self._let_go = follow(loader, self)

    def detach(self) -> None:
        """Leave the loader as it was."""
        self._let_go()

    def capture(self) -> GeneratorStates:
        """Return the states of all generators now."""
        return GeneratorStates.capture(self.held)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Take what is drawn inside for batches that training had already."""
        self._is_repeating = True
        try:
            yield
        finally:
            self._is_repeating = False

    # what the loader calls

    def begin_iteration(self) -> None:
        """Keep the generators with which an iteration over the loader begins."""
        self.num_iterations += 1
        self.position = DataPosition(before_iteration=self.capture())

    def begin_draw(self) -> None:
        """Restore what the next batch needs, and keep the generators before the first one."""
        if not self._is_repeating:
            restore, self.restore = self.restore, None
            if restore is not None:
                restore()
            self._before_draw()
        if self.position is not None and not self.position.num_drawn:
            self.position = replace(self.position, before_first=self.capture())

    def end_draw(self, batch: Any) -> None:
        """Count a batch that was drawn."""
        position = self.position
        if position is not None:
            digest = position.first_digest or format_digest(_digest_batch(batch))
            self.position = replace(position, num_drawn=position.num_drawn + 1, first_digest=digest)


def _digest_batch(batch: Any) -> int:
    """Return a digest of the tensors, arrays and plain values of a batch; on other devices only of their shapes."""
    texts = (f"{name}={_leaf(leaf)};" for name, leaf in leaves(batch, "batch", is_whole=True))
    return digest_bytes("".join(texts).encode())


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        if leaf.device.type != "cpu":
            return f"{leaf.device.type} {leaf.dtype} {tuple(leaf.shape)}"
        with unobserved():
            return format_digest(digest_tensor(leaf))
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return format_digest(digest_bytes(np.ascontiguousarray(leaf).data))
    is_plain = leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes)
    return repr(leaf) if is_plain else type(leaf).__qualname__
