"""Random generators: what is read is what is put back, whichever it is;
those of devices are stood in for.
"""

import functools
import itertools
import json
import random
import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from det_callbacks import DeterminismSettings, HashMode, enforce_determinism
from det_callbacks.digest.triton_digest import Choice
from det_callbacks.environment.capture import capture_environment
from det_callbacks.runs.program import after_step
from det_callbacks.settings import generators as rng
from det_callbacks.settings.generators import (
    GeneratorStates,
    RewindPoint,
    digest_generator,
    home_devices,
    is_default,
    state_bytes,
    used_generators,
)
from det_callbacks.trace import generators as traced
from det_callbacks.trace.generators import GeneratorLog, GeneratorReader, generator_of
from det_callbacks.training.loading import MAX_ITEMS, find_generators


class StandInGenerator(Generator):
    """A generator with the state of CUDA's: 16 bytes on the host, a seed and a Philox offset."""

    def __new__(cls, *_: object) -> "StandInGenerator":
        return super().__new__(cls)

    def __init__(self, devices: "StandInDevices", index: int) -> None:
        self.devices, self.index = devices, index
        self.seed, self.offset = 67280421310721, 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def get_state(self) -> Tensor:
        assert not self.devices.is_capturing, "CUDA raises"
        return torch.frombuffer(
            bytearray(struct.pack("<Qq", self.seed, self.offset)), dtype=torch.uint8
        )

    def set_state(self, state: Tensor) -> None:
        assert (self.devices.is_capturing, state.dtype) == (False, torch.uint8), "CUDA raises"
        self.seed, self.offset = struct.unpack("<Qq", state.numpy().tobytes())

    def initial_seed(self) -> int:
        assert not self.devices.is_capturing, "CUDA raises"
        return self.seed


class StandInDevices:
    """What torch tells of the CUDA devices of a process,
    and the generators that it has for them.
    """

    def __init__(
        self, num_devices: int, *, contexts: Sequence[int] = (0,), current: int = 0
    ) -> None:
        self.generators = tuple(StandInGenerator(self, index) for index in range(num_devices))
        self.contexts = set(contexts)  # indices of the devices with a context
        self.current = current
        self.is_initialized = True  # the process has used CUDA
        self.is_capturing = False  # a CUDA graph: states can neither be read nor set
        # what torch was asked to do once CUDA is initialised
        self.queued: list[tuple[Any, ...]] = []

    def install(self, monkeypatch: Any) -> "StandInDevices":
        """Put them in torch's place until the test ends; initialising
        and synchronising are errors.
        """
        put = monkeypatch.setattr
        put(torch.cuda, "is_initialized", lambda: self.is_initialized)
        put(torch.cuda, "is_available", lambda: True)
        put(torch.cuda, "device_count", lambda: len(self.generators))
        put(torch.cuda, "default_generators", self.generators)
        put(torch.cuda, "current_device", lambda: self._is_used() and self.current)
        put(
            torch.cuda, "is_current_stream_capturing", lambda: self._is_used() and self.is_capturing
        )
        put(
            "det_callbacks.settings.generators.has_cuda_context",
            lambda index: self._is_used() and index in self.contexts,
        )
        put(torch.cuda, "manual_seed_all", self._manual_seed_all)
        choice = Choice(method=None, reason="there is no such device")
        put("det_callbacks.environment.capture.device_choice", lambda device: choice)
        for name in ("init", "_lazy_init", "synchronize", "get_rng_state"):
            put(torch.cuda, name, self._refuse)
        return self

    def _is_used(self) -> bool:
        assert self.is_initialized, "asked before the process has used CUDA"
        return True

    def _manual_seed_all(self, seed: int) -> None:
        if not self.is_initialized:
            self.queued.append(("seed", seed))
            return
        for generator in self.generators:
            generator.seed, generator.offset = seed, 0

    def _refuse(self, *_: object, **__: object) -> None:
        raise AssertionError(
            "CUDA is not to be initialised, nor waited for, on account of a generator"
        )


@pytest.fixture
def cuda(monkeypatch: Any) -> StandInDevices:
    """Four devices, the current one with the index 1, and a context on 1 and 3."""
    # a build with CUDA asks the devices at the first call of a process
    torch.backends.cudnn.version()
    return StandInDevices(4, contexts=(1, 3), current=1).install(monkeypatch)


def names() -> list[str]:
    return [name for name, _ in used_generators()]


def stored(states: GeneratorStates) -> GeneratorStates:
    return GeneratorStates(json.loads(json.dumps(states.states)))


def test_a_process_that_has_not_used_cuda_is_asked_nothing(cuda):
    cuda.is_initialized = False
    ledger = GeneratorLog(GeneratorReader())
    ledger.mark("fit start", with_seeds=True)
    with HashMode() as mode:
        pass
    found = [*(row.of for row in ledger.take(0)), *(site.name for site in mode.trace.program.sites)]
    assert not [name for name in (*found, *GeneratorStates.capture().states) if "cuda" in str(name)]
    RewindPoint(with_python=False).put_back()
    assert (home_devices(), capture_environment()["gpu.names"].value, cuda.queued) == ({}, [], [])


def test_the_current_device_has_no_index_unused_ones_no_name_and_an_op_reads_that_of_its_device(
    cuda,
):
    homes, (_, own, _, other) = home_devices(), cuda.generators
    assert names() == ["torch.cuda", "torch.cuda:3"]
    for device, name in (
        ("cuda", "torch.cuda"),
        ("cuda:1", "torch.cuda"),
        ("cuda:3", "torch.cuda:3"),
    ):
        assert generator_of((), {"device": torch.device(device)}, homes) == (
            name,
            other if "3" in name else own,
        )
    assert generator_of((torch.zeros(1),), {}, homes) == ("torch.cpu", torch.default_generator)
    cuda.current = 3  # a thread of the backward pass
    assert generator_of((), {"device": "cuda"}, homes) == ("torch.cuda:3", other)
    given = StandInGenerator(cuda, 3)
    assert generator_of((torch.zeros(1),), {"generator": other}, homes) == ("torch.cuda:3", other)
    assert generator_of((torch.zeros(1),), {"generator": given}, homes) == (
        "generator on cuda",
        given,
    )
    assert (is_default(other), is_default(given)) == (True, False)
    found = find_generators(
        {"root": SimpleNamespace(own=other, given=given, cpu=torch.default_generator)}
    )
    assert found == {"root.given": given}
    assert names() == ["torch.cuda:1", "torch.cuda"]
    cuda.contexts.clear()
    assert names() == ["torch.cuda"]


def test_those_of_xpu_and_of_a_mac_are_named_saved_and_put_back(monkeypatch):
    *of_xpu, of_mac = (torch.Generator().manual_seed(index) for index in range(3))
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "default_generators", of_xpu)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)
    monkeypatch.setattr(torch.xpu.graphs, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "_default_mps_generator", of_mac)
    assert names() == ["torch.xpu:0", "torch.xpu", "torch.mps"]
    states = stored(GeneratorStates.capture())
    first = [torch.rand((), generator=one).item() for one in (*of_xpu, of_mac)]
    assert states.restore() == []
    assert [torch.rand((), generator=one).item() for one in (*of_xpu, of_mac)] == first


def test_what_an_op_draws_follows_from_the_state_of_its_own_device(cuda, monkeypatch):
    mode, indices = HashMode(), itertools.cycle((3, 1, 3))
    monkeypatch.setattr(
        traced, "generator_on", lambda _: ("cuda", index := next(indices), cuda.generators[index])
    )
    for current, own, other in (
        (1, "torch.cuda", "torch.cuda:3"),
        (3, "torch.cuda:1", "torch.cuda"),
    ):
        cuda.current = current
        with mode:
            for _ in range(3):
                torch.bernoulli(torch.full((2,), 0.5))
        sites = mode.trace.program.sites
        rows = [
            (index, site.name, site.inputs)
            for index, site in enumerate(sites)
            if "cuda" in str(site.name)
        ]
        (of_1, _, _), (of_3, _, _), (again, _, _), *_ = rows
        first, second, last = (
            at for at, site in enumerate(sites) if site.op == "aten.bernoulli.default"
        )
        (again_1, _, _) = rows[3]
        expected = [
            (own, ()),
            (other, ()),
            (other, (of_3,)),
            (own, (of_1,)),
            (other, (again, first)),
        ]
        ends = [(own, (again_1, second)), (other, (rows[4][0], last))]
        expected += [(after_step(name), inputs) for name, inputs in ends]
        assert [(name, inputs) for _, name, inputs in rows] == expected


def test_seeds_are_noted_and_in_a_capture_nothing_is_read_nor_put_back(cuda):
    ledger, unread = (
        GeneratorLog(GeneratorReader()),
        ["torch.cuda", "torch.cuda:3", "noise on cuda"],
    )
    ledger.mark("batch start", with_seeds=True)
    noted = {("generator", "torch.cpu")}
    noted |= {
        (kind, f"torch.cuda{index}") for kind in ("generator", "seed") for index in ("", ":3")
    }
    assert noted <= {(row.kind, row.of) for row in ledger.take(0)}
    ledger.held = {"noise on cuda": StandInGenerator(cuda, 1)}
    readable = stored(GeneratorStates.capture(ledger.held))
    cuda.is_capturing = True
    ledger.mark("batch start", with_seeds=True)
    assert not [row.of for row in ledger.take(0) if "cuda" in row.of]
    unreadable = stored(GeneratorStates.capture(ledger.held))
    assert readable.restore(ledger.held) == unread
    cuda.is_capturing = False
    assert unreadable.restore(ledger.held) == unread


def test_each_device_gets_its_own_state_and_one_that_is_not_there_or_not_used_is_named(
    cuda, monkeypatch
):
    cuda.generators[1].offset, cuda.generators[3].offset = 8, 12
    states = stored(GeneratorStates.capture())
    for num_devices, current, missing, offsets in (
        (1, 0, ["torch.cuda:3"], [8]),  # the current device goes on though it has another index
        (4, 1, [], [0, 8, 0, 12]),
        (4, 3, ["torch.cuda:3"], [0, 0, 0, 8]),  # one device does not get two states
    ):
        other = StandInDevices(num_devices, current=current).install(monkeypatch)
        assert (states.restore(), [one.offset for one in other.generators]) == (missing, offsets)
    cuda.install(monkeypatch)
    cuda.is_initialized = False
    assert states.restore() == ["torch.cuda", "torch.cuda:3"]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(11)
        RewindPoint().put_back(restarts_new=True)
    assert cuda.queued == [("seed", 11)]


def test_rewinding_and_settings_leave_the_generators_as_they_were(cuda):
    # without a context: the op that is run again may be the first there
    cuda.generators[2].offset = 8
    point = RewindPoint()
    settings = DeterminismSettings(seed=3, cublas_workspace_config=None)
    for within, after in (
        (enforce_determinism(settings), lambda: None),
        (nullcontext(), lambda: point.put_back(restarts_new=True)),
    ):
        with within:
            cuda.current = 3
            for generator in cuda.generators:
                generator.seed, generator.offset = 3, 4
        after()
        assert [one.offset for one in cuda.generators] == [0, 0, 8, 0]
        cuda.current = 1


HELD: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: torch.Generator().manual_seed(1), lambda one: torch.rand((), generator=one).item()),
    (lambda: random.Random(1), lambda one: (one.gauss(0, 1), one.random())),
    (lambda: np.random.default_rng(1), lambda one: (one.normal(), one.integers(1 << 40))),
    (lambda: np.random.RandomState(1), lambda one: (one.randn(), one.randint(1 << 30))),
    (lambda: np.random.Generator(np.random.Philox(1)), lambda one: one.normal()),
    (lambda: np.random.MT19937(1), lambda one: one.random_raw()),
]


@pytest.mark.parametrize(("make", "draw"), [*HELD, (lambda: random, lambda _: random.gauss(0, 1))])
def test_the_digest_of_a_generator_follows_its_state(make, draw):
    generator, before, found = make(), random.getstate(), set()
    for _ in range(700):  # past the end of the 624 words, where all of them are made anew
        found.add(digest_generator(generator))
        draw(generator)
    assert len(found) == 700
    assert make() is random or digest_generator(make()) in found
    random.setstate(before)


def test_a_generator_reads_as_zero_until_something_draws_from_it():
    """Also one that comes back to where it began: it was drawn from."""
    held = torch.Generator().manual_seed(1)
    point = RewindPoint()
    reader, unbegun = GeneratorReader(), GeneratorReader()
    assert (reader.idle(), unbegun.read("numpy", np.random)) == (None, digest_generator(np.random))
    begun = reader.begin({"numpy", "torch.cpu"})
    assert begun == {
        "numpy": digest_generator(np.random),
        "torch.cpu": digest_generator(torch.default_generator),
    }
    assert reader.idle() == ("numpy", "torch.cpu")
    assert reader.read("python", random) == digest_generator(random)
    assert reader.read("held", held) == digest_generator(held)  # it was not there at the beginning
    np.random.rand()
    assert reader.idle() == ("torch.cpu",)
    assert reader.read("numpy", np.random) == digest_generator(np.random)
    point.put_back()
    assert reader.read("numpy", np.random) == begun["numpy"]
    torch.rand(1)
    point.put_back()
    # nobody saw it move, nor did a mark come between
    assert reader.read("torch.cpu", torch.default_generator) == 0


class OfItsOwn(random.Random):
    """A generator whose state is elsewhere than that of ``random.Random``."""

    number = 1

    def getstate(self) -> Any:
        return 3, (self.number,), None


def test_the_state_of_a_python_generator_is_what_getstate_tells(monkeypatch):
    for _ in range(700):  # past the end of its 624 words
        random.random()
    one, other = random.Random(3), OfItsOwn(3)
    assert state_bytes(one) == state_bytes(random.Random(3))
    before = digest_generator(other)
    other.number = 2
    assert digest_generator(other) != before
    for generator in (random, one):
        generator.gauss(0, 1)
        read = state_bytes(generator)
        with monkeypatch.context() as unknown:
            unknown.setattr(rng, "_has_known_layout", lambda: False)
            assert state_bytes(generator) == read


def test_every_generator_goes_on_from_where_it_was_read():
    own = [
        random.random,
        lambda: random.gauss(0, 1),
        np.random.rand,
        np.random.randn,
        lambda: torch.rand(()).item(),
    ]
    held = {f"held[{index}]": make() for index, (make, _) in enumerate(HELD)}

    def draw_all(held: dict[str, Any]) -> list[Any]:
        return [
            *(draw() for draw in own),
            *(draw(held[f"held[{index}]"]) for index, (_, draw) in enumerate(HELD)),
        ]

    draw_all(held)  # leaves a second normal number held back in Python's and NumPy's generators
    before = GeneratorStates.capture(held)
    states = stored(before)
    first = draw_all(held)
    assert draw_all(held) != first
    now = GeneratorStates.capture(held).states
    assert {name for name in now if now[name] != before.states[name]} == {
        "numpy",
        "python",
        "torch.cpu",
        *held,
    }
    others = {name: make() for name, (make, _) in zip(held, HELD, strict=True)}
    assert states.restore(others) == []
    assert draw_all(others) == first
    assert states.restore({}) == [*held]


def test_generators_are_found_wherever_an_object_keeps_them():
    inner, outer = random.Random(0), [random.Random(1)]
    slotted = type("Slotted", (), {"__slots__": ("rng",)})()
    slotted.rng = random.Random(2)
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    module[1].noise = torch.Generator()
    listed, keyed, bound = [1, (random.Random(3),)], {"a": random.Random(4)}, random.Random(6)
    partial = functools.partial(print, random.Random(5))
    root = SimpleNamespace(
        slotted=slotted, listed=listed, keyed=keyed, partial=partial, bound=bound.choice
    )
    root.function, root.closure = lambda: inner.random(), lambda: outer[0].random()
    root.module, root.own, root.system, root.itself = (
        module,
        torch.default_generator,
        random.SystemRandom(),
        root,
    )
    assert find_generators({"root": root}) == {
        "root.slotted.rng": slotted.rng,
        "root.listed[1][0]": listed[1][0],
        "root.keyed['a']": keyed["a"],
        "root.partial.args[0]": partial.args[0],
        "root.bound.__self__": bound,
        "root.function.inner": inner,
        "root.closure.outer[0]": outer[0],
        "root.module.1.noise": module[1].noise,
    }
    root = SimpleNamespace(
        samples=[inner] * (MAX_ITEMS + 1), trainer=SimpleNamespace(rng=random.Random(1))
    )
    found = find_generators({"root": root}, left=(dict,))
    assert found == {"root.trainer.rng": root.trainer.rng}, "data is not searched"
