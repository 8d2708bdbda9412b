"""Stand-ins for the CUDA devices of a process, as far as their random generators go: torch's own need a GPU."""

import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from det_callbacks.digest.device.triton_digest import Choice


class StandInGenerator(Generator):
    """A generator with the state of CUDA's: 16 bytes on the host, a seed and a Philox offset."""

    def __new__(cls, *_: object) -> "StandInGenerator":
        return super().__new__(cls)

    def __init__(self, devices: "StandInDevices", index: int) -> None:
        self.devices = devices
        self.index = index
        self.seed, self.offset = 67280421310721, 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def get_state(self) -> Tensor:
        self._assert_not_capturing()
        return torch.frombuffer(bytearray(struct.pack("<Qq", self.seed, self.offset)), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> None:
        self._assert_not_capturing()
        assert state.dtype is torch.uint8
        self.seed, self.offset = struct.unpack("<Qq", state.numpy().tobytes())

    def manual_seed(self, seed: int) -> "StandInGenerator":
        self._assert_not_capturing()
        self.seed, self.offset = seed, 0
        return self

    def initial_seed(self) -> int:
        self._assert_not_capturing()
        return self.seed

    def draw(self) -> None:
        """Advance as a small kernel does."""
        self.offset += 4

    def _assert_not_capturing(self) -> None:
        if self.devices.is_capturing:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.")


class StandInDevices:
    """What torch tells of the CUDA devices of a process, and the generators that it has for them."""

    def __init__(self, num_devices: int, *, contexts: Sequence[int] = (0,), current: int = 0) -> None:
        self.generators = tuple(StandInGenerator(self, index) for index in range(num_devices))
        self.contexts = set(contexts)  # indices of the devices with a context
        self.current = current
        self.is_initialized = True  # the process has used CUDA
        self.is_capturing = False  # a CUDA graph: states can neither be read nor set
        self.queued: list[tuple[Any, ...]] = []  # what torch was asked to do once CUDA is initialised

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "StandInDevices":
        """Put them in torch's place until the test ends; initialising and synchronising are errors."""
        put = monkeypatch.setattr
        put(torch.cuda, "is_initialized", lambda: self.is_initialized)
        put(torch.cuda, "is_available", lambda: True)
        put(torch.cuda, "device_count", lambda: len(self.generators))
        put(torch.cuda, "default_generators", self.generators)
        put(torch.cuda, "current_device", self._current_device)
        put(torch.cuda, "is_current_stream_capturing", lambda: self._is_used() and self.is_capturing)
        put("det_callbacks.rng._has_context", self._has_context)
        put(torch.cuda, "manual_seed_all", self._manual_seed_all)
        put(torch.cuda, "set_rng_state", lambda state, device: self.queued.append((state, device)))
        choice = Choice(method=None, reason="there is no such device")
        put("det_callbacks.environment.device_choice", lambda device: choice)
        for name in ("init", "_lazy_init", "synchronize", "get_rng_state"):
            put(torch.cuda, name, self._refuse)
        return self

    def _is_used(self) -> bool:
        assert self.is_initialized, "asked before the process has used CUDA"
        return True

    def _has_context(self, index: int) -> bool:
        return self._is_used() and index in self.contexts

    def _current_device(self) -> int:
        self._is_used()
        return self.current

    def _manual_seed_all(self, seed: int) -> None:
        if not self.is_initialized:
            self.queued.append(("seed", seed))
            return
        for generator in self.generators:
            generator.manual_seed(seed)

    def _refuse(self, *_: object, **__: object) -> None:
        raise AssertionError("CUDA is not to be initialised, nor waited for, on account of a generator")
