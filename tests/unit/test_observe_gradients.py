"""Gradients that are observed, replaced, or never come."""

from pathlib import Path
from typing import Any

import pytest
import torch
from observing import names
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from det_callbacks import (
    CoverageWarning,
    DivergenceWarning,
    ObserverContext,
    observe_grad,
    observe_non_deterministic_grad,
)
from det_callbacks.observers.registry import REGISTRY


@pytest.fixture(autouse=True)
def _no_observer_is_left() -> Any:
    yield
    assert not is_in_torch_dispatch_mode()
    assert REGISTRY.sink is None


def test_each_backward_pass_is_an_occurrence_of_the_gradient(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(2))
    with ObserverContext(tmp_path, "run") as observer:
        for _ in range(3):
            observe_grad("w", weight)
            (weight * 2).sum().backward()
            (weight * 3).sum().backward()
            observer.next_step()
    assert [names(observer.path, step) for step in range(3)] == [["grad of w"] * 2] * 3
    assert not weight._backward_hooks


def test_a_gradient_that_never_comes_is_reported(tmp_path: Path) -> None:
    def run(name: str, reference: Path | None, *, goes_back: bool) -> ObserverContext:
        x = torch.ones(2, requires_grad=True)
        with ObserverContext(tmp_path, name, reference) as observer:
            observe_grad("x", x)
            observe_grad("never", torch.ones(2))
            if goes_back:
                x.sum().backward()
        return observer

    with pytest.warns(CoverageWarning, match="grad of never was observed, and no backward"):
        run("r", None, goes_back=True)
    assert names(tmp_path / "r") == ["grad of x", "grad of never"]
    with (
        pytest.warns(CoverageWarning, match="grad of x was observed"),
        pytest.warns(CoverageWarning, match="grad of never"),
        pytest.warns(DivergenceWarning),
    ):
        found = run("c", tmp_path / "r", goes_back=False).mismatches
    assert ("grad of x", "structure") in [(one.name, one.kind) for one in found]


@pytest.mark.parametrize("function", [observe_grad, observe_non_deterministic_grad])
def test_a_gradient_that_is_undefined_never_comes(tmp_path: Path, function: Any) -> None:
    def run() -> None:
        left, right = torch.ones(2, 2, requires_grad=True).unbind()
        with ObserverContext(tmp_path, "run"):
            function("left", left)
            function("right", right)
            left.sum().backward()  # the hook of the other is called with None

    with pytest.warns(CoverageWarning, match="grad of right was observed, and no backward"):
        run()
    assert names(tmp_path / "run") == ["grad of left", "grad of right"]


def test_a_gradient_of_another_branch_is_left_alone(tmp_path: Path) -> None:
    def gradients(name: str, scale: float, reference: Path | None = None) -> tuple[list[float], list[float]]:
        a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        left, right = a * 1, b * 1
        with ObserverContext(tmp_path, name, reference):
            observe_non_deterministic_grad("right", right)  # whose backward runs first
            ((left + right) * scale).sum().backward()  # one tensor is the gradient of both
        assert a.grad is not None
        assert b.grad is not None
        return a.grad.tolist(), b.grad.tolist()

    assert gradients("r", 2.0) == ([2.0], [2.0])
    assert gradients("c", 3.0, tmp_path / "r") == ([3.0], [2.0])
