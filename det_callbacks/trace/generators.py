"""Random generators in a step: an op that draws reads its generator's state, and the ledger knows all of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from det_callbacks.digest.components import tensor_bits
from det_callbacks.digest.device.deferred import Bits, DeferredDigests, value_of
from det_callbacks.internals.torch import generator_address
from det_callbacks.rng import (
    PROCESS,
    TORCH_CPU,
    Homes,
    digest_generator,
    generator_on,
    home_devices,
    is_default,
    is_readable,
    name_of,
    used_generators,
)
from det_callbacks.runs.evidence import SEED, Row

PASSED = "generator on "  # begins the names of generators that are passed to an op


class GeneratorTrail:
    """Per generator, the last sites of the step that read or advanced it.

    Generators that are passed to an op share a name; their addresses tell them apart.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start a step; ask on the main thread."""
        # the same for the whole step: ops of a backward pass run on threads whose current device is another
        self.homes: Homes = home_devices()
        self._last: dict[object, tuple[int, ...]] = {}
        self._held: list[Generator] = []
        self._drawing: object = None

    def read(self, name: str, position: int, generator: Generator | None = None) -> tuple[int, ...]:
        """Note that the state was digested at a position; return the sites it follows from."""
        key: object = name
        if generator is not None:
            key = generator_address(generator)
            if key not in self._last:
                self._held.append(generator)
        edges = self._last.get(key, ())
        self._last[key] = (position,)
        self._drawing = key
        return edges

    def note_draw(self, position: int) -> None:
        """Note that the op at a position advanced the generator read last."""
        self._last[self._drawing] = (*self._last[self._drawing], position)


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any], homes: Homes) -> tuple[str, Generator]:
    """Return the generator that an op draws from: the one passed, else its device's default."""
    device = kwargs.get("device")
    for value in (*args, *kwargs.values()):
        if isinstance(value, Generator):
            if not is_default(value):
                return f"{PASSED}{value.device.type}", value
            device = value.device
        elif device is None and isinstance(value, Tensor):
            device = value.device
    own = None if device is None else generator_on(torch.device(device))
    if own is None:
        return TORCH_CPU, torch.default_generator
    kind, index, generator = own
    return name_of(kind, index, homes), generator


class Ledger:
    """Collects what state every generator was in at each point of a step, as evidence; some 5 microseconds a point."""

    def __init__(self) -> None:
        self.held: Mapping[str, Any] = {}  # further generators by name: torch's, NumPy's or Python's
        self._rows: list[tuple[str, str, Bits, str]] = []
        self._deferred = DeferredDigests()

    def mark(self, point: str, *, with_seeds: bool = False) -> None:
        """Note the states of all generators; while a graph is captured, not those of devices."""
        for name, held in (*PROCESS.items(), *used_generators(), *self.held.items()):
            if is_readable(held):
                self.note(point, name, digest_generator(held))
                if with_seeds and isinstance(held, Generator):
                    self.note(point, SEED + name, held.initial_seed() & 0xFFFF_FFFF_FFFF_FFFF)

    def note(self, point: str, name: str, value: int = 0, text: str = "") -> None:
        """Note something else at a point."""
        self._rows.append((point, name, value, text))

    def note_tensor(self, point: str, name: str, tensor: Tensor) -> None:
        """Note the digest of a tensor, read now in the order of its device's work."""
        bits = tensor_bits(tensor, self._deferred)
        self._deferred.flush()  # nobody tells of writes to it
        self._rows.append((point, name, bits, ""))

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor on the host, to be read after the next ``take``."""
        return self._deferred.fetch(tensor)

    def take(self, step: int) -> list[Row]:
        """Return what was collected since the last time, as rows of a step; waits for devices that were read."""
        known = self._deferred.finish()
        rows, self._rows = self._rows, []
        return [Row(step, point, name, value_of(bits, known), text) for point, name, bits, text in rows]
