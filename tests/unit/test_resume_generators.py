"""Generator states as plain data: what is read is what is put back, whichever generator it is."""

import functools
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from det_callbacks.resume import GeneratorStates, find_generators
from det_callbacks.resume.held import MAX_ITEMS


def draw_all() -> list[Any]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_global_generators_go_on_from_where_they_were_read() -> None:
    draw_all()  # leaves a second normal number held back in Python's and NumPy's generators
    states = GeneratorStates(json.loads(json.dumps(GeneratorStates.capture().states)))
    first = draw_all()
    assert draw_all() != first
    assert states.restore() == []
    assert draw_all() == first


HELD: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: torch.Generator().manual_seed(1), lambda one: torch.rand((), generator=one).item()),
    (lambda: random.Random(1), lambda one: (one.gauss(0, 1), one.random())),
    (lambda: np.random.default_rng(1), lambda one: (one.normal(), one.integers(1 << 40))),
    (lambda: np.random.RandomState(1), lambda one: (one.randn(), one.randint(1 << 30))),
    (lambda: np.random.Generator(np.random.Philox(1)), lambda one: one.normal()),
    (lambda: np.random.Generator(np.random.SFC64(1)), lambda one: one.integers(1 << 20)),
    (lambda: np.random.MT19937(1), lambda one: one.random_raw()),
]


@pytest.mark.parametrize(("make", "draw"), HELD)
def test_held_generators_go_on_from_where_they_were_read(make, draw) -> None:
    generator = make()
    draw(generator)
    states = GeneratorStates(json.loads(json.dumps(GeneratorStates.capture({"data.rng": generator}).states)))
    first = draw(generator)
    other = make()
    assert draw(other) != first
    assert states.restore({"data.rng": other}) == []
    assert draw(other) == first


def test_a_generator_that_is_gone_is_named() -> None:
    states = GeneratorStates.capture({"data.rng": random.Random(1)})
    assert states.restore({}) == ["data.rng"]


def test_states_that_differ_are_named() -> None:
    before = GeneratorStates.capture()
    torch.rand(())
    assert GeneratorStates.capture().differing(before) == ["torch.cpu"]
    assert before.differing(before) == []


class Slotted:
    __slots__ = ("rng",)


def test_generators_are_found_wherever_an_object_keeps_them() -> None:
    generators = [random.Random(index) for index in range(7)]
    slotted = Slotted()
    slotted.rng = generators[0]
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    module[1].noise = torch.Generator()

    def closure() -> float:
        return generators[1].random()

    inner = generators[2]
    root = SimpleNamespace(
        slotted=slotted,
        listed=[1, (generators[3],)],
        keyed={"a": generators[4]},
        partial=functools.partial(print, generators[5]),
        bound=generators[6].random,
        function=lambda: inner.random(),
        module=module,
        own=torch.default_generator,
        system=random.SystemRandom(),
        closure=closure,
    )
    root.itself = root
    found = find_generators({"root": root})
    assert found["root.slotted.rng"] is generators[0]
    assert found["root.listed[1][0]"] is generators[3]
    assert found["root.keyed['a']"] is generators[4]
    assert found["root.partial.args[0]"] is generators[5]
    assert found["root.function.inner"] is inner
    assert found["root.module.1.noise"] is module[1].noise
    assert found["root.closure.generators[1]"] is generators[1]
    assert all(one is not torch.default_generator for one in found.values())
    assert not any("system" in path for path in found)


def test_data_is_not_searched() -> None:
    root = SimpleNamespace(samples=[random.Random(0)] * (MAX_ITEMS + 1), trainer=SimpleNamespace(rng=random.Random(1)))
    assert find_generators({"root": root}, left=(dict,)) == {"root.trainer.rng": root.trainer.rng}
