"""Whatever state a module keeps beside its tensors is the same for both sides, and afterwards."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from det_callbacks import compare_modules


class Counter:
    def __init__(self) -> None:
        self.n = 1
        self.deep = {"list": [1, {2}]}


class Counting(nn.Module):
    """Multiplies by a number that each call changes."""

    def __init__(self, state: Any, read: Callable[[Any], float], step: Callable[[Any], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.state, self.read, self.step = state, read, step

    def forward(self, x: Tensor) -> Tensor:
        self.step(self.state)
        return self.linear(x) * self.read(self.state)


def grow(state: Any) -> None:
    state.deep["list"][1].add(len(state.deep["list"][1]) + 7)
    state.n += 1


CASES: dict[str, tuple[Any, Callable[[Any], float], Callable[[Any], object]]] = {
    "array": (np.ones(1), lambda c: float(c[0]), lambda c: np.add(c, 1, out=c)),
    "object": (Counter(), lambda c: c.n + len(c.deep["list"][1]), grow),
    "nested": ({"a": [4]}, lambda c: c["a"][0], lambda c: c["a"].__setitem__(0, c["a"][0] + 1)),
    "deque in a tuple": ((deque([1]),), lambda c: len(c[0]), lambda c: c[0].append(1)),
    "object in an object": (
        SimpleNamespace(inner=Counter()),
        lambda c: c.inner.n,
        lambda c: setattr(c.inner, "n", c.inner.n + 1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_forward_pass_counts_is_the_same_on_both_sides(name: str) -> None:
    state, read, step = CASES[name]
    torch.manual_seed(0)
    module = Counting(state, read, step)
    before = read(state)
    report = compare_modules(module, module, torch.ones(2, 3), iterations=2)
    assert report.equal, str(report)
    assert read(module.state) == before


def test_it_counts_within_a_side() -> None:
    state, read, step = CASES["array"]
    seen: list[float] = []
    module = Counting(state, lambda c: seen.append(float(c[0])) or read(c), step)
    compare_modules(module, module, torch.ones(2, 3), iterations=2)
    assert seen == [2.0, 2.0, 3.0, 3.0]  # the sides take turns
