"""Random generators as inputs: an op that draws random numbers reads its generator's state."""

import _random
import random
import sys
from array import array
from ctypes import string_at
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from det_callbacks.device_generators import Homes, generator_on, home_devices, is_default, name_of
from det_callbacks.digest import digest_bytes, digest_memory


class GeneratorName(str):
    """Name of a generator, "torch.cpu"; tells a generator's row from that of an input tensor."""

    __slots__ = ()


TORCH_CPU = GeneratorName("torch.cpu")
PASSED = "generator on "
"""Begins the names of generators that are passed to an op."""

PYTHON = GeneratorName("python")
NUMPY = GeneratorName("numpy")

_MT19937_BYTES = 624 * 4 + 4  # numpy/random/src/mt19937/mt19937.h: uint32_t key[624]; int pos


# the generator that the functions of random are bound methods of; their stubs are plain functions
_python_random: Any = random.getstate.__self__  # type: ignore[attr-defined]  # undeclared


class GeneratorTrail:
    """Per generator, the last sites of the step that read or advanced it.

    Generators that are passed to an op share a name; their addresses tell them apart.

    Attributes:
        homes: the devices whose generators go by no index, the same for the whole step: ops of a backward pass run on
            threads whose current device is another.
    """

    def __init__(self) -> None:
        self.homes: Homes = home_devices()
        self._last: dict[object, tuple[int, ...]] = {}
        self._held: list[Generator] = []
        self._drawing: object = None

    def clear(self) -> None:
        """Start a step; ask on the main thread."""
        self.homes = home_devices()
        self._last.clear()
        self._held.clear()
        self._drawing = None

    def read(self, name: GeneratorName, position: int, generator: Generator | None = None) -> tuple[int, ...]:
        """Note that the state was digested at a position; return the sites it follows from.

        Args:
            name: of the generator.
            position: of the site.
            generator: itself, when its name is not its own; it is kept until the step ends.
        """
        key: object = name
        if generator is not None:
            key = generator._cdata  # type: ignore[attr-defined]  # torch 2.13: the address of the generator proper
            if key not in self._last:
                self._held.append(generator)
        edges = self._last.get(key, ())
        self._last[key] = (position,)
        self._drawing = key
        return edges

    def note_draw(self, position: int) -> None:
        """Note that the op at a position advanced the generator read last."""
        self._last[self._drawing] = (*self._last[self._drawing], position)


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any], homes: Homes) -> tuple[GeneratorName, Generator]:
    """Return the generator that an op draws from: the one passed, else its device's default.

    Args:
        args: of the op.
        kwargs: of the op.
        homes: the devices whose generators go by no index.
    """
    device = kwargs.get("device")
    for value in (*args, *kwargs.values()):
        if isinstance(value, Generator):
            if not is_default(value):
                return GeneratorName(f"{PASSED}{value.device.type}"), value
            device = value.device
        elif device is None and isinstance(value, Tensor):
            device = value.device
    own = None if device is None else generator_on(torch.device(device))
    if own is None:
        return TORCH_CPU, torch.default_generator
    kind, index, generator = own
    return GeneratorName(name_of(kind, index, homes)), generator


def digest_generator(generator: Generator) -> int:
    """Return the digest of a generator's state; 2 microseconds on the CPU, no device synchronisation."""
    state = generator.get_state()
    return digest_memory(state.data_ptr(), state.nbytes)


def digest_python_generator() -> int:
    """Return the digest of the state of Python's ``random``; 1 microsecond in CPython, else some 15.

    That is its position and its 624 words as they lie in memory (``getstate`` makes a tuple of them), and the second
    number of a pair of normal ones that it may hold back.
    """
    if _python_state is None:
        _, (*words, position), held_back = random.getstate()
        content = array("I", (position, *words)).tobytes()
    else:
        content = string_at(_python_state, _MT19937_BYTES)
        held_back = _python_random.gauss_next
    return digest_bytes(content if held_back is None else content + repr(held_back).encode())


def _find_python_state() -> int | None:
    """Return the address of the state of Python's ``random``; None where it does not lie as in CPython 3.11 to 3.14.

    ``Modules/_randommodule.c``: ``PyObject_HEAD; int index; uint32_t state[624]``.
    """
    head = object.__basicsize__
    if sys.implementation.name != "cpython" or _random.Random.__basicsize__ < head + _MT19937_BYTES:
        return None
    address = id(_python_random) + head
    *words, position = random.getstate()[1]
    is_there = string_at(address, _MT19937_BYTES) == array("I", (position, *words)).tobytes()
    return address if is_there else None


def digest_numpy_generator() -> int:
    """Return the digest of the state of NumPy's global generator; 1 microsecond for the default MT19937.

    That is its 624 words and its position as they lie in memory (``get_state`` takes 33 microseconds). The second
    number of a pair of normal ones that the legacy interface may hold back is not part of it.
    """
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in NumPy 2.4's stubs
    if isinstance(generator, np.random.MT19937):
        return digest_memory(generator.ctypes.state_address, _MT19937_BYTES)
    return digest_bytes(repr(generator.state).encode())


# Found once: the generator behind the functions of random lives as long as the process.
_python_state = _find_python_state()
