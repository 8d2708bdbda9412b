"""The default random generators of a process's accelerators, read and set without a device taking part.

Their states are numbers in host memory, a seed and a Philox offset, so that nothing here waits for a device or creates
a context on one: ``get_state`` and ``set_state`` of ``ATen/cuda/CUDAGeneratorImpl.cpp``, and alike for XPU and MPS.
Nothing here initialises a kind of device that the process has not used: after that it could not fork any more.

The device that is current when nobody chose another goes by "torch.cuda", the others by "torch.cuda:1": in a job of one
process a GPU all ranks have the same names, whichever GPU each has.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor

Kind = Literal["cuda", "xpu", "mps"]

KINDS: tuple[Kind, ...] = ("cuda", "xpu", "mps")

Homes = dict[str, int]
"""Kind of device -> index of the one that is the process's own."""

# What a device's generator starts from when nobody seeded it (c10::detail default_rng_seed_val, torch 2.13).
_DEFAULT_SEED = 67280421310721

_MAX_SEED = 2**32 - 1
"""The CPU's generator starts from 64 random bits when nobody seeded it; seeds up to this one are taken for a user's."""

# By their addresses, which torch 2.13 does not declare: ops get a new Python object for a generator.
_CPU_ADDRESS: int = torch.default_generator._cdata  # type: ignore[attr-defined]  # undeclared


# looked at in torch 2.13; its stubs do not have it, and builds without CUDA lack it: then nothing is left out
def _has_context(index: int) -> bool:
    has_context: Callable[[int], bool] | None = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return has_context is None or has_context(index)


def default_generators(kind: str) -> Sequence[Generator]:
    """Return the default generators of a kind of device, by index; none where the process has not used that kind.

    A Mac has one device, which is there without being initialised.
    """
    if kind == "cuda":
        return torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    if kind == "xpu":
        return torch.xpu.default_generators if torch.xpu.is_initialized() else ()
    # looked at in torch 2.13: torch.mps has no public name for its generator
    if kind == "mps" and torch.backends.mps.is_available() and not torch.mps._is_in_bad_fork():
        return (torch.mps._get_default_mps_generator(),)
    return ()


def current_index(kind: str) -> int:
    """Return the index of the calling thread's current device, of a kind that the process has used."""
    if kind == "cuda":
        return torch.cuda.current_device()
    return torch.xpu.current_device() if kind == "xpu" else 0


def home_devices() -> Homes:
    """Return the current device of each kind that the process has used; 1 microsecond.

    Ask on the main thread, where no ``with torch.cuda.device(1)`` is open: a backward thread has a device of its own.
    """
    return {kind: current_index(kind) for kind in KINDS if default_generators(kind)}


def is_capturing() -> bool:
    """Return whether the current stream is captured into a graph: then no state of a generator can be read or set.

    Creates no context (``torch.cuda.is_current_stream_capturing``, torch 2.13).
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    # looked at in torch 2.13: as for CUDA, but only in the module of its graphs
    return torch.xpu.is_initialized() and torch.xpu.graphs.is_current_stream_capturing()


def is_readable(generator: object) -> bool:
    """Return whether the state of a generator, of any kind, can be read and set now."""
    return not isinstance(generator, Generator) or generator.device.type == "cpu" or not is_capturing()


def name_of(kind: str, index: int, homes: Homes) -> str:
    """Return the name of a device's generator; a kind that is used since ``homes`` was made gets its home now."""
    if kind not in homes:
        homes[kind] = current_index(kind)
    return f"torch.{kind}" if homes[kind] == index else f"torch.{kind}:{index}"


def used_generators(homes: Homes | None = None) -> Iterator[tuple[str, Generator]]:
    """Yield (name, generator) of the devices that the process has used.

    Of CUDA's: those with a context of this process, and its home. Of XPU's, which do not tell, all that it sees.
    Not all can be read at all times: ``is_readable``. Costs some microseconds a device.

    Args:
        homes: of the process; None takes the current devices.
    """
    homes = home_devices() if homes is None else homes
    for kind in KINDS:
        for index, generator in enumerate(default_generators(kind)):
            name = name_of(kind, index, homes)
            if kind != "cuda" or index == homes[kind] or _has_context(index):
                yield name, generator


def every_generator() -> list[Generator]:
    """Return those of all devices of the kinds that the process has used, also of those that it could use next."""
    return [generator for kind in KINDS for generator in default_generators(kind)]


def generator_on(device: torch.device) -> tuple[str, int, Generator] | None:
    """Return (kind, index, default generator) of a device that is about to be used; None for the CPU and the like."""
    kind = device.type
    if kind not in KINDS:
        return None
    generators = default_generators(kind)
    if not generators:
        torch.get_device_module(kind).init()  # what the caller does next, too
        generators = default_generators(kind)
    index = current_index(kind) if device.index is None else device.index
    return kind, index, generators[index]


def is_default(generator: Generator) -> bool:
    """Return whether a generator is a default one, of the CPU or of a device."""
    address = generator._cdata  # type: ignore[attr-defined]  # undeclared
    return address == _CPU_ADDRESS or any(
        address == one._cdata  # type: ignore[attr-defined]  # undeclared
        for one in default_generators(generator.device.type)
    )


def set_default_state(kind: str, index: int | None, state: Tensor) -> bool:
    """Set the state of a device's default generator; where the process has not used devices yet, once it does.

    Args:
        kind: of the device.
        index: of the device; None takes the current one.
        state: uint8, on the CPU.

    Returns:
        Whether there is such a device, and it can be done now: not while a graph is captured.
    """
    generators = default_generators(kind)
    if generators:
        place = current_index(kind) if index is None else index
        if place >= len(generators) or is_capturing():
            return False
        generators[place].set_state(state)
        return True
    if kind not in KINDS or kind == "mps":
        return False
    devices: Any = torch.get_device_module(kind)
    if not devices.is_available() or (index or 0) >= devices.device_count():
        return False
    devices.set_rng_state(state, kind if index is None else index)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStates:
    """The states of the generators of one kind of device at one moment, all devices that the process sees.

    Attributes:
        kind: of the devices.
        states: by index; none where the process had not used that kind.
        start: the seed from which those start that were not there.
    """

    kind: Kind
    states: Sequence[Tensor]
    start: int

    def read(self) -> list[Tensor]:
        """Return the states now."""
        return _states_of(self.kind)

    def put_back(self) -> None:
        """Put the states back; generators that came into being meanwhile start again."""
        if not self.states:
            if self.kind != "mps":
                torch.get_device_module(self.kind).manual_seed_all(self.start)
            return
        for generator, state in zip(default_generators(self.kind), self.states, strict=False):
            generator.set_state(state)


def keep_states() -> list[KeptStates]:
    """Return the states of all devices' generators, to be put back in this process.

    A generator that does not exist yet will start from the seed of ``torch.manual_seed``, or from torch's default when
    that was never called. A seed given to CUDA alone before its first use is not known.
    """
    seed = torch.initial_seed()
    start = seed if seed <= _MAX_SEED else _DEFAULT_SEED
    return [KeptStates(kind=kind, states=_states_of(kind), start=start) for kind in KINDS]


def _states_of(kind: str) -> list[Tensor]:
    return [generator.get_state() for generator in default_generators(kind)]
