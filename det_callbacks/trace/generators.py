"""Random generators as inputs: an op that draws random numbers reads its generator's state."""

import random
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from det_callbacks.digest import digest_bytes, digest_memory


class GeneratorName(str):
    """Name of a generator, "torch.cpu"; tells a generator's row from that of an input tensor."""

    __slots__ = ()


TORCH_CPU = GeneratorName("torch.cpu")
PYTHON = GeneratorName("python")
NUMPY = GeneratorName("numpy")


class GeneratorTrail:
    """Per generator, the last sites of the step that read or advanced it."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, ...]] = {}
        self._drawing = ""

    def clear(self) -> None:
        """Start a step."""
        self._last.clear()
        self._drawing = ""

    def read(self, name: GeneratorName, position: int) -> tuple[int, ...]:
        """Note that the state was digested at a position; return the sites it follows from."""
        edges = self._last.get(name, ())
        self._last[name] = (position,)
        self._drawing = name
        return edges

    def note_draw(self, position: int) -> None:
        """Note that the op at a position advanced the generator read last."""
        self._last[self._drawing] = (*self._last.get(self._drawing, ()), position)


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[GeneratorName, Generator]:
    """Return the generator that an op draws from: the one passed, else its device's default."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Generator):
            return GeneratorName(f"generator on {value.device.type}"), value
    device = kwargs.get("device")
    if device is None:
        device = next((value.device for value in args if isinstance(value, Tensor)), None)
    if device is not None and torch.device(device).type == "cuda":
        index = torch.device(device).index
        return GeneratorName("torch.cuda"), torch.cuda.default_generators[
            torch.cuda.current_device() if index is None else index
        ]
    return TORCH_CPU, torch.default_generator


def digest_generator(generator: Generator) -> int:
    """Return the digest of a generator's state; 2 microseconds on the CPU, no device synchronisation."""
    state = generator.get_state()
    return digest_memory(state.data_ptr(), state.nbytes)


def digest_python_generator() -> int:
    """Return the digest of the state of Python's ``random``; some 20 microseconds."""
    version, words, gauss = random.getstate()
    return digest_bytes(np.array(words, dtype="<u4").tobytes() + repr((version, gauss)).encode())


def digest_numpy_generator() -> int:
    """Return the digest of the state of NumPy's global generator; some 40 microseconds."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    return digest_bytes(np.asarray(keys).tobytes() + repr((name, position, has_gauss, gauss)).encode())
