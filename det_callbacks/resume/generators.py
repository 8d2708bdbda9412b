"""The states of random generators, as plain data that goes into a JSON file and back."""

import base64
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator

from det_callbacks.device_generators import (
    KINDS,
    current_index,
    default_generators,
    is_readable,
    set_default_state,
    used_generators,
)

Held = Generator | np.random.Generator | np.random.BitGenerator | np.random.RandomState | random.Random
"""A generator that some object holds; ``np.random.Generator`` and ``RandomState`` share their bit generator's state."""

HELD_TYPES = (Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)

PYTHON = "python"
NUMPY = "numpy"
TORCH_CPU = "torch.cpu"

_OF_DEVICES = tuple(f"torch.{kind}" for kind in KINDS)


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """Where generators were at one moment.

    Attributes:
        states: name -> state in a form that JSON holds exactly (bytes as base64, floats as hexadecimal text); None for
            one that could not be read. The process's own are "python", "numpy", "torch.cpu", "torch.cuda" of the
            current device and "torch.cuda:1" of another; those that objects hold go by path.
    """

    states: Mapping[str, Any]

    @classmethod
    def capture(cls, held: Mapping[str, Held] | None = None) -> "GeneratorStates":
        """Return the states of all generators of the process, and of those that objects hold.

        50 microseconds, most of them NumPy's, and 3 for each device that was used; no device synchronisation. While a
        graph is captured, those of devices cannot be read.

        Args:
            held: path -> generator.
        """
        states = {
            PYTHON: _read_python(random),
            NUMPY: _encode(np.random.get_state(legacy=False)),
            TORCH_CPU: _text(torch.get_rng_state().numpy().tobytes()),
        }
        for name, one in (*used_generators(), *(held or {}).items()):
            states[name] = _read(one) if is_readable(one) else None
        return cls(states)

    def restore(self, held: Mapping[str, Held] | None = None) -> list[str]:
        """Put the states back; return the names of those whose generator is not there (any more).

        The current device gets the state of the one that was current, whichever index each has, and the others that of
        their index. States that name no current device are older: each goes to its index, a single one to the current.

        Args:
            held: path -> generator, as for ``capture``.
        """
        missing = []
        for name, state in self.states.items():
            if name == PYTHON:
                _write_python(random, state)
            elif name == NUMPY:
                np.random.set_state(_decode(state))
            elif name == TORCH_CPU:
                torch.set_rng_state(_tensor(state))
            elif name.startswith(_OF_DEVICES):
                if state is None or not self._write_device(name, state):
                    missing.append(name)
            elif state is not None and held is not None and name in held and is_readable(held[name]):
                _write(held[name], state)
            else:
                missing.append(name)
        return missing + self._without_state()

    def _write_device(self, name: str, state: Any) -> bool:
        kind, _, index = name.removeprefix("torch.").partition(":")
        place = int(index) if index else None
        own = f"torch.{kind}"
        if index and own in self.states:
            if default_generators(kind) and place == current_index(kind):
                return False  # it has the state of the device that was current
        elif index and self._num_devices(own) == 1:
            place = None
        return set_default_state(kind, place, _tensor(state))

    def _without_state(self) -> list[str]:
        """Return the current devices that older states do not name, though they name others."""
        return [
            name
            for kind in KINDS
            if (own := f"torch.{kind}") not in self.states and self._num_devices(own) > 1 and default_generators(kind)
            if (name := f"{own}:{current_index(kind)}") not in self.states
        ]

    def _num_devices(self, own: str) -> int:
        return sum(name.startswith(f"{own}:") for name in self.states)

    def differing(self, other: "GeneratorStates") -> list[str]:
        """Return the names of the generators whose states differ, or that only one side has."""
        names = sorted({*self.states, *other.states})
        return [name for name in names if self.states.get(name) != other.states.get(name)]


def _read(generator: Held) -> Any:
    if isinstance(generator, Generator):
        return _text(generator.get_state().numpy().tobytes())
    if isinstance(generator, random.Random):
        return _read_python(generator)
    if isinstance(generator, np.random.RandomState):
        return _encode(generator.get_state(legacy=False))
    if isinstance(generator, np.random.Generator):
        return _encode(generator.bit_generator.state)
    return _encode(generator.state)


def _write(generator: Held, state: Any) -> None:
    if isinstance(generator, Generator):
        generator.set_state(_tensor(state))
    elif isinstance(generator, random.Random):
        _write_python(generator, state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_decode(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _decode(state)
    else:
        generator.state = _decode(state)


def _read_python(generator: Any) -> Any:
    version, words, held_back = generator.getstate()
    if not words or not isinstance(words, tuple):
        return [version, None, None]  # SystemRandom and the like never come here: getstate raises
    return [version, _text(array("Q", words).tobytes()), None if held_back is None else held_back.hex()]


def _write_python(generator: Any, state: Any) -> None:
    version, words, held_back = state
    content = array("Q")
    content.frombytes(base64.b64decode(words))
    generator.setstate((version, tuple(content), None if held_back is None else float.fromhex(held_back)))


def _encode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "bytes": _text(value.tobytes())}
    if isinstance(value, float | np.floating):
        return {"float": float(value).hex()}
    return int(value) if isinstance(value, np.integer) else value


def _decode(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"float"}:
        return float.fromhex(value["float"])
    if set(value) == {"dtype", "shape", "bytes"}:
        content = np.frombuffer(base64.b64decode(value["bytes"]), dtype=value["dtype"])
        return content.reshape(value["shape"]).copy()
    return {key: _decode(item) for key, item in value.items()}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
