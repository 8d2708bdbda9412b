"""Random generators in a step: an op that draws reads its generator's state, and the ledger knows all of them."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from det_callbacks.digest.components import tensor_bits
from det_callbacks.digest.device.deferred import Bits, DeferredDigests, value_of
from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.environment.rng import (
    PROCESS,
    TORCH_CPU,
    Homes,
    generator_on,
    home_devices,
    is_default,
    is_readable,
    name_of,
    state_bytes,
    used_generators,
)
from det_callbacks.internals.torch import generator_address
from det_callbacks.runs.evidence import SEED, START, Row
from det_callbacks.runs.program import IDLE

PASSED = "generator on "  # begins the names of generators that are passed to an op


class GeneratorReader:
    """Reads generators as 64 bits: 0 as long as nothing has drawn from one since the fit began, else their state.

    Where an idle generator is decides nothing, so two runs need not agree on it. It is compared with its last state,
    and digested only where it has moved: one that comes back to where it began has been drawn from all the same.

    A generator that was not there, or not among the idle ones, when reading began counts as drawn from.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[bytes, int]] = {}
        self.has_begun = False

    def begin(self, idle: Collection[str] | None = None) -> dict[str, int]:
        """Take these generators of the process, or all, as idle from now on; return the digests of their states."""
        self.has_begun = True
        states = {name: state_bytes(held) for name, held in process_generators() if idle is None or name in idle}
        self._last.update((name, (state, IDLE)) for name, state in states.items())
        return {name: digest_bytes(state) for name, state in states.items()}

    def read(self, name: str, generator: Any) -> int:
        """Return the bits of a generator that can be read now."""
        state = state_bytes(generator)
        last = self._last.get(name)
        if last is not None and last[0] == state:
            return last[1]
        bits = digest_bytes(state)
        self._last[name] = state, bits
        return bits

    def idle(self) -> tuple[str, ...] | None:
        """Return the generators of the process that nothing has drawn from so far; None before reading began."""
        if not self.has_begun:
            return None
        return tuple(name for name, generator in process_generators() if self.read(name, generator) == IDLE)


def process_generators(homes: Homes | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (name, generator) of the process that can be read now; while a graph is captured, not those of devices."""
    yield from PROCESS.items()
    for name, generator in used_generators(homes):
        if is_readable(generator):
            yield name, generator


class GeneratorTrail:
    """Per generator, the last sites of the step that read or advanced it.

    Generators that are passed to an op share a name; their addresses tell them apart.
    """

    def __init__(self) -> None:
        self.reader = GeneratorReader()
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

    def __init__(self, reader: GeneratorReader) -> None:
        self.held: Mapping[str, Any] = {}  # further generators by name: torch's, NumPy's or Python's
        self._reader = reader
        self._rows: list[tuple[str, str, Bits, str]] = []
        self._deferred = DeferredDigests()

    def mark(self, point: str, *, with_seeds: bool = False) -> None:
        """Note the states of all generators; while a graph is captured, not those of devices."""
        held = ((name, one) for name, one in self.held.items() if is_readable(one))
        for name, generator in (*process_generators(), *held):
            self.note(point, name, self._reader.read(name, generator))
            if with_seeds and isinstance(generator, Generator):
                self.note(point, SEED + name, generator.initial_seed() & 0xFFFF_FFFF_FFFF_FFFF)

    def begin(self, point: str, idle: Collection[str] | None = None) -> None:
        """Take these generators, or all, as idle from now on, and up to now; note where each of them begins."""
        for name, digest in self._reader.begin(idle).items():
            self.note(point, START + name, digest, format_digest(digest))
            self._rows = [(*row[:2], IDLE, row[3]) if row[1] == name else row for row in self._rows]

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
