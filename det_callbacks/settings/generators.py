"""The states of random generators: finds, reads, compares and restores them.

The functions do not wait for a device or create a context on one, since the states are in host
memory (``ATen/cuda/CUDAGeneratorImpl.cpp``). They initialise no kind of device either, since a
process cannot fork after that. The generator of the process's device is named "torch.cuda", others
"torch.cuda:1": all ranks have the same names.
"""

import base64
import ctypes
import functools
import json
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Generator

from det_callbacks.digest.host import digest_bytes
from det_callbacks.internals.torch import generator_address, has_cuda_context, mps_generators

KINDS = ("cuda", "xpu", "mps")

Homes = dict[str, int]  # kind of device -> index of the process's device

Held = (
    Generator | np.random.Generator | np.random.BitGenerator | np.random.RandomState | random.Random
)
"""A generator that an object holds; ``np.random.Generator`` and ``RandomState`` share
their bit generator's state.
"""
HELD_TYPES = get_args(Held)

TORCH_CPU = "torch.cpu"
PROCESS: Mapping[str, Any] = {
    "python": random,
    "numpy": np.random,
    TORCH_CPU: torch.default_generator,
}
"""The global generators, except those of devices; the modules have the
methods of their generators.
"""

# The seed of a device generator that was never seeded (c10::detail
# default_rng_seed_val, torch 2.13).
_DEFAULT_SEED = 67280421310721

_MT19937_BYTES = 624 * 4 + 4  # numpy/random/src/mt19937/mt19937.h: uint32_t key[624]; int pos


def default_generators(kind: str) -> Sequence[Generator]:
    """Return the default generators of a kind of device, by index;
    none if the process has not used that kind.
    """
    if kind in ("cuda", "xpu"):
        devices: Any = torch.cuda if kind == "cuda" else torch.xpu
        return devices.default_generators if devices.is_initialized() else ()
    # a Mac has one device, which needs no initialisation
    return mps_generators() if kind == "mps" and torch.backends.mps.is_available() else ()


def current_index(kind: str) -> int:
    """Return the index of the thread's current device of a kind that the process has used."""
    return 0 if kind == "mps" else int(torch.get_device_module(kind).current_device())


def home_devices() -> Homes:
    """Return the thread's current device of each kind that the process has used;
    backward threads have others.
    """
    return {kind: current_index(kind) for kind in KINDS if default_generators(kind)}


def is_capturing() -> bool:
    """Return whether a graph captures the current stream, which blocks access to
    the states of generators.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    # same as for CUDA, but only torch.xpu.graphs has the function (torch 2.13)
    return torch.xpu.is_initialized() and torch.xpu.graphs.is_current_stream_capturing()


def is_readable(generator: object) -> bool:
    """Return whether the state of a generator can be read and set now."""
    return (
        not isinstance(generator, Generator) or generator.device.type == "cpu" or not is_capturing()
    )


def name_of(kind: str, index: int, homes: Homes) -> str:
    """Return the name of a device's generator; add a kind of device to ``homes``
    on its first use.
    """
    if kind not in homes:
        homes[kind] = current_index(kind)
    return f"torch.{kind}" if homes[kind] == index else f"torch.{kind}:{index}"


def used_generators(homes: Homes | None = None) -> Iterator[tuple[str, Generator]]:
    """Yield the name and generator of each device that the process has used;
    for XPU, of every device.
    """
    homes = {} if homes is None else homes
    for kind in KINDS:
        for index, generator in enumerate(default_generators(kind)):
            name = name_of(kind, index, homes)
            if kind != "cuda" or index == homes[kind] or has_cuda_context(index):
                yield name, generator


def generator_on(device: torch.device) -> tuple[str, int, Generator] | None:
    """Return kind, index and default generator of a device before its use,
    or None for the CPU and the like.
    """
    kind = device.type
    if kind not in KINDS:
        return None
    if not default_generators(kind):
        torch.get_device_module(kind).init()  # the caller is about to do the same
    index = current_index(kind) if device.index is None else device.index
    return kind, index, default_generators(kind)[index]


def is_default(generator: Generator) -> bool:
    """Return whether a generator is a default generator, of the CPU or of a device."""
    defaults = (torch.default_generator, *default_generators(generator.device.type))
    return generator_address(generator) in map(generator_address, defaults)


def digest_generator(generator: Any) -> int:
    return digest_bytes(state_bytes(generator))


def state_bytes(generator: Any) -> bytes:
    """Return a generator's state, without a normal number that NumPy may hold back;
    takes 0.5 to 3 microseconds.
    """
    if _is_python(generator):
        return _python_state(generator)
    bits = np.random.get_bit_generator() if generator is np.random else generator
    if isinstance(bits, np.random.MT19937):
        return _bytes_at(bits.ctypes.state_address, _MT19937_BYTES)
    # last: for other classes torch asks a metaclass, in Python
    if isinstance(generator, Generator):
        state = generator.get_state()
        return _bytes_at(state.data_ptr(), state.nbytes)
    return json.dumps(_read(bits)).encode()


def _bytes_at(address: int, nbytes: int) -> bytes:
    """Return a copy of memory, at a fifth of the cost of ``ctypes.string_at``."""
    return _array_of(nbytes).from_address(address).raw


@functools.cache  # states have few sizes
def _array_of(nbytes: int) -> "type[ctypes.Array[ctypes.c_char]]":
    return ctypes.c_char * nbytes


def _python_state(generator: Any) -> bytes:
    """Return the state of a Python generator: its words, and a normal number that it may hold back.

    ``getstate`` takes 12 microseconds, at each of five points in a step. So this function reads the
    words from the object's memory, after comparing them with ``getstate`` once per process.
    """
    own = generator.getstate.__self__  # for the module ``random``, the object behind its functions
    if type(own).getstate is not random.Random.getstate or not _has_known_layout():
        return _python_state_of_getstate(generator)
    index_and_words = _bytes_at(id(own) + object.__basicsize__, _MT19937_BYTES)
    held_back = own.gauss_next
    words = index_and_words[4:] + index_and_words[:4]
    return words if held_back is None else words + repr(held_back).encode()


def _python_state_of_getstate(generator: Any) -> bytes:
    _, words, held_back = generator.getstate()
    content = array("I", words).tobytes()
    return content if held_back is None else content + repr(held_back).encode()


@functools.cache
def _has_known_layout() -> bool:
    """Return whether a ``random.Random`` begins with its index and its 624 words in
    memory (CPython 3.11 to 3.14).

    See ``RandomObject`` in CPython's ``Modules/_randommodule.c``; a word has 4 bytes.
    """
    if (
        random.Random.__basicsize__ < object.__basicsize__ + _MT19937_BYTES
        or array("I").itemsize != 4
    ):
        return False
    probe = random.Random(5)
    memory = _bytes_at(id(probe) + object.__basicsize__, _MT19937_BYTES)
    return memory[4:] + memory[:4] == _python_state_of_getstate(probe)


def _read(generator: Any) -> Any:
    """Return the state of a generator in a form that JSON represents exactly."""
    if isinstance(generator, Generator):
        return base64.b64encode(generator.get_state().numpy().tobytes()).decode()
    if _is_python(generator):
        version, words, held_back = generator.getstate()
        return [version, [*words], held_back]
    state = generator.get_state(legacy=False) if _is_legacy(generator) else _bits(generator).state
    # NumPy arrays and numbers
    return json.loads(json.dumps(state, default=lambda value: value.tolist()))


def _write(generator: Any, state: Any) -> None:
    """Restore a state that ``_read`` returned; NumPy accepts lists for its arrays."""
    if isinstance(generator, Generator):
        generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
    elif _is_python(generator):
        version, words, held_back = state
        generator.setstate((version, tuple(words), held_back))
    elif _is_legacy(generator):
        generator.set_state(state)
    else:
        _bits(generator).state = state


def _is_python(generator: Any) -> bool:
    return generator is random or isinstance(generator, random.Random)


def _is_legacy(generator: Any) -> bool:
    return generator is np.random or isinstance(generator, np.random.RandomState)


def _bits(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The states of generators at one moment, by name, in a form for JSON,
    or None if a state could not be read.
    """

    states: Mapping[str, Any]

    @classmethod
    def capture(cls, held: Mapping[str, Held] | None = None) -> "GeneratorStates":
        """Return the states of the global generators, and of those that objects hold, by path."""
        generators = {**PROCESS, **dict(used_generators()), **(held or {})}
        return cls(
            {name: _read(one) if is_readable(one) else None for name, one in generators.items()}
        )

    def restore(self, held: Mapping[str, Held] | None = None) -> list[str]:
        """Restore the states, a name without index on the current device;
        return the names that cannot be restored.
        """
        generators = {**PROCESS, **(held or {})}
        missing = []
        for name, state in self.states.items():
            generator = generators.get(name)
            kind, _, index = name.removeprefix("torch.").partition(":")
            if generator is not None and state is not None and is_readable(generator):
                _write(generator, state)
            elif (
                generator is not None
                or state is None
                or not self._restore_device(kind, index, state)
            ):
                missing.append(name)
        return missing

    def _restore_device(self, kind: str, index: str, state: str) -> bool:
        """Set the state of a device's default generator; return whether the
        process uses that device.
        """
        generators = default_generators(kind)
        place = int(index) if index else current_index(kind) if generators else 0
        if place >= len(generators) or is_capturing():
            return False
        if index and place == current_index(kind):  # restored under the name without index
            return False
        _write(generators[place], state)
        return True


class RewindPoint:
    """The current states of the global generators, including all devices,
    and of the generators ``passed``.
    """

    def __init__(self, passed: Iterable[Generator] = (), *, with_python: bool = True) -> None:
        self._kinds = {kind: default_generators(kind) for kind in KINDS}
        devices = (one for generators in self._kinds.values() for one in generators)
        own = PROCESS.values() if with_python else (torch.default_generator,)
        self._states = [(one, _read(one)) for one in (*own, *devices, *passed)]
        self._seed = torch.initial_seed()

    def has_moved(self) -> bool:
        """Return whether a generator has drawn since."""
        return any(_read(generator) != state for generator, state in self._states)

    def put_back(self, *, restarts_new: bool = False) -> None:
        """Restore the states; with ``restarts_new``, reseed the generators of
        devices first used since.
        """
        for generator, state in self._states:
            _write(generator, state)
        for kind, generators in self._kinds.items():
            if restarts_new and not generators and kind != "mps":
                # an unseeded CPU generator has a random 64-bit seed, which devices did not get
                seed = self._seed if self._seed < 2**32 else _DEFAULT_SEED
                torch.get_device_module(kind).manual_seed_all(seed)
