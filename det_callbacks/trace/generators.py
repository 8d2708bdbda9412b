"""Random generators as inputs: an op that draws random numbers reads its generator's state."""

from typing import Any

import torch
from torch import Generator, Tensor

from det_callbacks.rng import TORCH_CPU, Homes, generator_on, home_devices, is_default, name_of

PASSED = "generator on "
"""Begins the names of generators that are passed to an op."""


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

    def read(self, name: str, position: int, generator: Generator | None = None) -> tuple[int, ...]:
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


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any], homes: Homes) -> tuple[str, Generator]:
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
                return f"{PASSED}{value.device.type}", value
            device = value.device
        elif device is None and isinstance(value, Tensor):
            device = value.device
    own = None if device is None else generator_on(torch.device(device))
    if own is None:
        return TORCH_CPU, torch.default_generator
    kind, index, generator = own
    return name_of(kind, index, homes), generator
