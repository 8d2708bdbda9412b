"""Random generators in a step: their states, which sites they depend on, and a log of them.

An op that draws reads its generator's state, so the state is an input site of the op.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from det_callbacks.digest.components import tensor_bits
from det_callbacks.digest.deferred import Bits, DeferredDigests, value_of
from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.digest.unobserved import hidden
from det_callbacks.internals.torch import generator_address
from det_callbacks.runs.evidence import EvidenceKind, EvidenceRow
from det_callbacks.runs.program import IDLE, passed_on
from det_callbacks.settings.generators import (
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


class GeneratorReader:
    """Reads generators as 64 bits: 0 if nothing has drawn from one since the fit began, else a
    digest of its state.

    The state of an idle generator has no effect, so two runs may differ in it. The reader digests a
    state only if it changed since the last read. A generator that returns to its first state still
    counts as drawn from. A generator that did not exist, or was not idle, when reading began also
    counts as drawn from.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[bytes, int]] = {}
        self.has_begun = False

    def begin(self, idle: Collection[str] | None = None) -> dict[str, int]:
        """Treat these generators, or all, as idle from now on;
        return the digests of their states.
        """
        self.has_begun = True
        states = {
            name: state_bytes(generator)
            for name, generator in process_generators()
            if idle is None or name in idle
        }
        self._last = {name: (state, IDLE) for name, state in states.items()}
        return {name: digest_bytes(state) for name, state in states.items()}

    def read(self, name: str, generator: Any) -> int:
        """Return the bits of a readable generator."""
        state = state_bytes(generator)
        last = self._last.get(name)
        if last is not None and last[0] == state:
            return last[1]
        bits = digest_bytes(state)
        self._last[name] = state, bits
        return bits

    def idle(self) -> tuple[str, ...] | None:
        """Return the generators of the process that nothing has drawn from,
        or None before reading begins.
        """
        if not self.has_begun:
            return None
        return tuple(
            name for name, generator in process_generators() if self.read(name, generator) == IDLE
        )


def process_generators(homes: Homes | None = None) -> list[tuple[str, Any]]:
    """Return (name, generator) for readable generators of the process; during a capture,
    without those of devices.
    """
    of_devices = [
        (name, generator) for name, generator in used_generators(homes) if is_readable(generator)
    ]
    return [*PROCESS.items(), *of_devices]


class GeneratorTrail:
    """Keeps the last sites of the step that read or advanced each generator.

    Generators passed to an op share a name; addresses distinguish them.
    """

    def __init__(self) -> None:
        self.reader = GeneratorReader()
        self.clear()

    def clear(self) -> None:
        """Start a step; call it on the main thread."""
        # fixed for the step: threads of a backward pass may have different current devices
        self.homes: Homes = home_devices()
        self._last: dict[object, tuple[int, ...]] = {}
        self._held: list[Generator] = []
        # the generator read last, and the sites that its state depended on before
        self._drawing: object = None
        self._before: tuple[int, ...] = ()

    def read(self, name: str, position: int, generator: Generator | None = None) -> tuple[int, ...]:
        """Note the position where the state was digested; return the sites
        that the state depends on.
        """
        key: object = name
        if generator is not None:
            key = generator_address(generator)
            if key not in self._last:
                self._held.append(generator)
        self._before = self._last.get(key, ())
        self._last[key] = (position,)
        self._drawing = key
        return self._before

    def roll_back(self, mark: int) -> None:
        """Undo the last read if its site was at ``mark`` or later,
        because the call that read the state is dropped.
        """
        last = self._last.get(self._drawing)
        if last and last[0] >= mark:
            self._last[self._drawing] = self._before

    def note_draw(self, position: int) -> None:
        """Note that the op at a position advanced the last read generator."""
        self._last[self._drawing] = (*self._last[self._drawing], position)


def generator_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], homes: Homes
) -> tuple[str, Generator]:
    """Return the generator that an op draws from: the one passed, or the default of its device."""
    device = kwargs.get("device")
    for value in (*args, *kwargs.values()):
        if isinstance(value, Generator):
            if not is_default(value):
                return passed_on(value.device.type), value
            device = value.device
        elif device is None and isinstance(value, Tensor):
            device = value.device
    own = None if device is None else generator_on(torch.device(device))
    if own is None:
        return TORCH_CPU, torch.default_generator
    kind, index, generator = own
    return name_of(kind, index, homes), generator


class GeneratorLog:
    """Collects the states of all generators at moments of a step, as evidence; about 5 microseconds
    a moment.
    """

    def __init__(self, reader: GeneratorReader) -> None:
        self.held: Mapping[str, Any] = {}  # more generators of torch, NumPy or Python, by name
        self._reader = reader
        self._rows: list[tuple[str, EvidenceKind, str, str, Bits, str]] = []
        self._deferred = DeferredDigests()

    @hidden
    def mark(self, moment: str, *, with_seeds: bool = False) -> None:
        """Note the states of all generators; during a capture, without those of devices."""
        further = [(name, held) for name, held in self.held.items() if is_readable(held)]
        for name, generator in (*process_generators(), *further):
            self.note(moment, "generator", name, value=self._reader.read(name, generator))
            if with_seeds and isinstance(generator, Generator):
                self.note(
                    moment, "seed", name, value=generator.initial_seed() & 0xFFFF_FFFF_FFFF_FFFF
                )

    def begin(self, moment: str, idle: Collection[str] | None = None) -> None:
        """Treat these generators (or all) as idle up to now, and start to watch them; note the
        first state of each.
        """
        for name, digest in self._reader.begin(idle).items():
            self.note(moment, "start", name, value=digest, text=format_digest(digest))
            self._rows = [
                (*row[:4], IDLE, "") if row[1:3] == ("generator", name) else row
                for row in self._rows
            ]

    def note(
        self,
        moment: str,
        kind: EvidenceKind,
        of: str = "",
        part: str = "",
        *,
        value: Bits = 0,
        text: str = "",
    ) -> None:
        """Add a row; see ``EvidenceRow``."""
        self._rows.append((moment, kind, of, part, value, text))

    def note_tensor(self, kind: EvidenceKind, of: str, tensor: Tensor) -> None:
        """Note the digest of a tensor, read now in stream order."""
        bits = tensor_bits(tensor, self._deferred)
        self._deferred.flush()  # now, because nothing sees later writes to the tensor
        self.note("", kind, of, value=bits)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor on the host, which is valid after the next ``take``."""
        return self._deferred.fetch(tensor)

    def take(self, step: int) -> list[EvidenceRow]:
        """Return the rows collected since the last call; waits for devices that were read."""
        known = self._deferred.finish()
        rows, self._rows = self._rows, []
        return [
            EvidenceRow(step, moment, kind, of, part, value_of(bits, known), text)
            for moment, kind, of, part, bits, text in rows
        ]
