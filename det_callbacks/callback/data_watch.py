"""How the batches of an epoch are drawn, and drawing them again.

Nothing here changes what is drawn: a run that is watched has the data and the generator states of one that is not.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from det_callbacks.callback.followed import follow
from det_callbacks.digest import digest_bytes, digest_tensor, unobserved
from det_callbacks.resume import DataPosition, GeneratorStates
from det_callbacks.resume.generators import Held
from det_callbacks.trace.leaves import leaves

MAX_RESTARTS = 1_000
"""Restarts of a shorter loader that are kept of an epoch, at 15 KiB each."""


class DataWatch:
    """Follows how the batches of a fit are drawn from its loaders.

    Costs 1 to 5 microseconds a batch and one pass over its tensors at memory speed.

    Attributes:
        position: in the epoch under way.
        keeps_last: whether the generators are kept before each batch, which costs 50 microseconds a batch.
        before_draw: called just before a batch is drawn that training will have.
        pending: called once, just before the next batch is drawn, to put back what it needs.
    """

    def __init__(self) -> None:
        self.position = DataPosition()
        self.keeps_last = False
        self.before_draw: Callable[[], object] = lambda: None
        self.pending: Callable[[], object] | None = None
        self.held: Mapping[str, Held] = {}
        self.has_overflowed = False
        self._before_last_draw: DataPosition | None = None
        self._repeats: DataPosition | None = None
        self._used_generators = False
        self._before_repeated: GeneratorStates | None = None
        self._is_starting = False
        self._loader: CombinedLoader | None = None
        self._let_go: Callable[[], object] = lambda: None

    # attaching

    def attach(self, loader: CombinedLoader) -> None:
        """Follow a loader; the one before it is let go."""
        self.detach()
        self._loader, self._let_go = loader, follow(loader, self)
        for inner in loader.flattened:
            if isinstance(inner, DataLoader):
                # looked at in torch 2.13: `DataLoader.__iter__` makes its iterator by this method
                inner._get_iterator = self._at_restart(inner._get_iterator)  # type: ignore[method-assign]  # for a fit

    def detach(self) -> None:
        """Leave the loader as it was."""
        loader, self._loader = self._loader, None
        if loader is None:
            return
        self._let_go()
        for inner in loader.flattened:
            if isinstance(inner, DataLoader):
                vars(inner).pop("_get_iterator", None)

    def capture(self) -> GeneratorStates:
        """Return the states of all generators now."""
        return GeneratorStates.capture(self.held)

    @property
    def position_before_last(self) -> DataPosition | None:
        """Where the data was before the last batch was drawn; None where that is not kept."""
        return self._before_last_draw

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
        repeated, self._repeats = self._repeats, None
        self._before_repeated = None
        assert repeated is not None, "repeating was begun"
        mine, self.position = self.position, replace(self.position, num_iterations=repeated.num_iterations)
        if mine.first_digest != repeated.first_digest:
            return False
        if mine.chain == repeated.chain:
            return True
        return None if self._used_generators else False

    # what the loader calls

    def begin_iteration(self) -> None:
        """Note that the loader begins to be iterated over."""
        self._is_starting = True
        states = self.capture()
        self.position = DataPosition(num_iterations=self.position.num_iterations + 1, before_iteration=states)
        self._before_last_draw = None
        self.has_overflowed = False

    def end_iteration(self) -> None:
        """Note that its iterators are there."""
        self._is_starting = False

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
        states = self.capture() if self.keeps_last or not position.num_drawn else None
        if not position.num_drawn:
            position = replace(position, before_first=states)
        if repeats is None:
            self.position = position
            self.before_draw()
        self._before_last_draw = position if self.keeps_last else None
        self.position = replace(position, before_last=states if self.keeps_last else None)

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

    def _at_restart(self, make: Callable[[], Any]) -> Callable[[], Any]:
        def note_and_make() -> Any:
            if not self._is_starting:
                self._note_restart()
            return make()

        return note_and_make

    def _note_restart(self) -> None:
        position = self.position
        if self._repeats is not None:
            for drawn, states in self._repeats.restarts[len(position.restarts) :][:1]:
                if drawn == position.num_drawn:
                    states.restore(self.held)
        if len(position.restarts) >= MAX_RESTARTS:
            self.has_overflowed = True
            return
        restart = (position.num_drawn, self.capture())
        self.position = replace(position, restarts=(*position.restarts, restart))


def _digest_batch(batch: Any) -> int:
    """Return a digest of the tensors, arrays and plain values of a batch; on other devices only of their shapes."""
    found = leaves(batch, "batch", is_whole=True)
    return _join(*(part for name, leaf in found for part in (digest_bytes(name.encode()), _digest_leaf(leaf))))


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


def _join(*digests: int) -> int:
    return digest_bytes(struct.pack(f"<{len(digests)}Q", *digests))
