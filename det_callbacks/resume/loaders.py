"""How the batches of an epoch are drawn, and drawing them again.

Nothing here changes what is drawn: a run that is watched has the data and the generator states of one that is not.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from det_callbacks.digest import digest_bytes, digest_tensor, unobserved
from det_callbacks.resume.state import DataPosition
from det_callbacks.rng import GeneratorStates, Held
from det_callbacks.trace.leaves import leaves


class Follower(Protocol):
    """What is told of each iteration over a loader and of each batch."""

    def begin_iteration(self) -> None:
        """Called before the loader makes its iterators."""

    def begin_draw(self) -> None:
        """Called before a batch is drawn."""

    def end_draw(self, batch: Any) -> None:
        """Called with a batch that was drawn."""


class _Followed(CombinedLoader):
    """A loader that tells its followers; those that came last are told first before, and last after."""

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
    """Tell a follower of what a loader does; return what ends that, in whatever order several end.

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
    """Follows how the batches of a fit are drawn from its loaders.

    Costs 1 to 5 microseconds a batch and one pass over its tensors at memory speed.

    Attributes:
        position: in the epoch under way.
        num_iterations: over the loader that were begun.
        looks_ahead: Lightning draws a batch before it is trained on, so that the generators are kept before each batch:
            50 microseconds more.
        held: path -> generator that an object of the training holds.
        before_draw: called just before a batch is drawn that training will have.
        pending: called once, just before the next batch is drawn, to put back what it needs.
    """

    def __init__(self) -> None:
        self.position = DataPosition()
        self.num_iterations = 0
        self.looks_ahead = False
        self.held: Mapping[str, Held] = {}
        self.before_draw: Callable[[], object] = lambda: None
        self.pending: Callable[[], object] | None = None
        self._repeats: DataPosition | None = None
        self._before_repeated: GeneratorStates | None = None
        self._used_generators = False
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

    # drawing again

    def begin_repeat(self, position: DataPosition) -> None:
        """From here on batches are drawn again, as they were drawn up to a position."""
        self._repeats = position
        self._used_generators = False
        if position.before_iteration is not None:
            position.before_iteration.restore(self.held)

    def end_repeat(self) -> bool | None:
        """Draw new batches from here on.

        Returns:
            Whether the batches were the same; None where that cannot be told, because drawing them used generators that
            training used in between.
        """
        repeated, self._repeats, self._before_repeated = self._repeats, None, None
        assert repeated is not None, "repeating was begun"
        if self.position.first_digest != repeated.first_digest:
            return False
        if self.position.chain == repeated.chain:
            return True
        return None if self._used_generators else False

    # what the loader calls

    def begin_iteration(self) -> None:
        """Note that the loader begins to be iterated over."""
        self.num_iterations += 1
        self.position = DataPosition(before_iteration=self.capture())

    def begin_draw(self) -> None:
        """Note, and put back, generators before a batch is drawn."""
        repeats, position = self._repeats, self.position
        if repeats is not None:
            if not position.num_drawn and repeats.before_first is not None:
                repeats.before_first.restore(self.held)
            elif position.num_drawn == repeats.num_drawn - 1 and repeats.before_last is not None:
                repeats.before_last.restore(self.held)
            self._before_repeated = self.capture()
        elif self.pending is not None:
            pending, self.pending = self.pending, None
            pending()
        states = self.capture() if self.looks_ahead or not position.num_drawn else None
        if not position.num_drawn:
            position = replace(position, before_first=states)
        if repeats is None:
            self.position = position
            self.before_draw()
        self.position = replace(position, before_last=states if self.looks_ahead else None)

    def end_draw(self, batch: Any) -> None:
        """Count a batch that was drawn."""
        position = self.position
        digest = _digest_batch(batch)
        if self._before_repeated is not None and position.num_drawn:
            self._used_generators |= bool(self.capture().differing(self._before_repeated))
        self.position = replace(
            position,
            num_drawn=position.num_drawn + 1,
            first_digest=position.first_digest if position.num_drawn else digest,
            chain=digest_bytes(struct.pack("<2Q", position.chain, digest)),
        )


def _digest_batch(batch: Any) -> int:
    """Return a digest of the tensors, arrays and plain values of a batch; on other devices only of their shapes."""
    digests: list[int] = []
    for name, leaf in leaves(batch, "batch", is_whole=True):
        digests += (digest_bytes(name.encode()), _digest_leaf(leaf))
    return digest_bytes(struct.pack(f"<{len(digests)}Q", *digests))


def _digest_leaf(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        if leaf.device.type != "cpu":
            return digest_bytes(f"{leaf.device.type} {leaf.dtype} {tuple(leaf.shape)}".encode())
        with unobserved():
            return digest_tensor(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return digest_bytes(np.ascontiguousarray(leaf).data)
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes):
        return digest_bytes(repr(leaf).encode())
    return digest_bytes(type(leaf).__qualname__.encode())
