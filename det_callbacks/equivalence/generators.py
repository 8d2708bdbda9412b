"""The states of the random generators that an op may draw from: taken before a run, put back after it."""

import random
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from det_callbacks.device_generators import every_generator
from det_callbacks.trace.generators import digest_numpy_generator, digest_python_generator


class GeneratorStates:
    """The states of torch's default generators (CPU, and every device of the kinds in use) and of those passed.

    Those of devices that the process has not used are among them: the op may be the first on its device.

    Args:
        args: of the op.
        kwargs: of the op.
        with_python: take those of Python and NumPy as well, for code that is not torch's: some 40 microseconds, of
            which 31 are NumPy's.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, with_python: bool) -> None:
        generators = [torch.default_generator, *every_generator()]
        generators.extend(value for value in (*args, *kwargs.values()) if isinstance(value, Generator))
        self._generators = generators
        self._before: list[Tensor] = [generator.get_state() for generator in generators]
        self._after: list[Tensor] = []
        self._python: _PythonStates | None = _PythonStates() if with_python else None

    def rewind(self) -> None:
        """Remember where the first run left the generators, and put them back to where it began."""
        self._after = [generator.get_state() for generator in self._generators]
        _set(self._generators, self._before)
        if self._python is not None:
            self._python.rewind()

    def forward(self) -> None:
        """Put the generators where the first run left them."""
        _set(self._generators, self._after)
        if self._python is not None:
            self._python.forward()


class _PythonStates:
    """Those of Python's ``random`` and NumPy's global generator; written only when the run changed them."""

    def __init__(self) -> None:
        self._digests = _digests()
        self._before = _read()
        self._after: tuple[Any, Any] | None = None

    def rewind(self) -> None:
        if _digests() != self._digests:
            self._after = _read()
            _write(self._before)

    def forward(self) -> None:
        if self._after is not None:
            _write(self._after)
        elif _digests() != self._digests:
            _write(self._before)  # drawn from by the second run only


def _digests() -> tuple[int, int]:
    return digest_python_generator(), digest_numpy_generator()


def _read() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _write(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _set(generators: list[Generator], states: list[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
