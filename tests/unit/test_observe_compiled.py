"""Observations inside torch.compile: a graph break that says so, and nothing without an observer."""

from pathlib import Path

import pytest
import torch
from compiling import COMPILING
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from det_callbacks import (
    CoverageWarning,
    ObserverContext,
    observe,
    observe_grad,
    observe_non_deterministic,
    observe_non_deterministic_grad,
)
from det_callbacks.runs.store import Run

pytestmark = COMPILING


def noisy(weight: Tensor, x: Tensor, noise: Tensor) -> Tensor:
    hidden = torch.relu(weight * x)
    observe("hidden", {"k": [hidden, 3, None], "n": x.shape[0]})
    hidden = torch.exp(hidden.sin() + noise)  # autograd saves the result of exp
    observe_non_deterministic("noisy", hidden)
    observe_non_deterministic_grad("noisy", hidden)
    hidden = hidden * 3
    observe_grad("after", hidden)
    return hidden.sum()


def train(folder: Path, name: str, function: object, reference: str | None = None) -> tuple[ObserverContext, Tensor]:
    weight = torch.ones(4, requires_grad=True)
    where = None if reference is None else folder / reference
    with ObserverContext(folder, name, where, raise_on_mismatch=True) as observer:
        for _ in range(2):
            loss = function(weight, torch.arange(4.0), torch.rand(4))  # other noise in each run
            loss.backward()
            observe("gradient", weight.grad)
            observer.next_step()
    return observer, weight.grad


def test_values_and_gradients_are_recorded_and_put_back_and_a_graph_break_is_said_once(tmp_path: Path) -> None:
    compiled = torch.compile(noisy, backend="aot_eager")
    with pytest.warns(CoverageWarning, match=r"torch\.compile breaks its graph there") as said:
        _, gradient = train(tmp_path, "reference", compiled)
    assert len(said) == 1
    with pytest.warns(CoverageWarning):
        observer, replayed = train(tmp_path, "current", compiled, "reference")
    assert observer.verdict.verdict == "match"
    assert observer.verdict.coverage.replayed["noisy"]["differing"] == 2
    assert torch.equal(gradient, replayed)
    train(tmp_path, "eager", noisy)
    names = [
        [site.name for site in Run.open(tmp_path / name).view(0, 0, 1).program.sites] for name in ("eager", "reference")
    ]
    assert names[0] == names[1]
    assert names[0][:4] == ["hidden['k'][0]", "hidden['k'][1]", "hidden['k'][2]", "hidden['n']"]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="det_callbacks"):
        train(tmp_path, "full", torch.compile(noisy, fullgraph=True, backend="eager"))


def test_without_an_observer_the_graph_is_whole(tmp_path: Path) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(noisy, backend=counter)

    def call() -> None:
        compiled(torch.ones(4), torch.arange(4.0), torch.rand(4))

    call()
    assert counter.frame_count == 1
    with pytest.warns(CoverageWarning), ObserverContext(tmp_path, "run"):
        call()
    count = counter.frame_count
    assert count > 2
    call()
    assert counter.frame_count == count


def test_observation_in_a_checkpointed_and_compiled_function(tmp_path: Path) -> None:
    def inner(x: Tensor) -> Tensor:
        return observe("inner", x.sin()).exp()

    def model(weight: Tensor, x: Tensor, noise: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(inner, weight * x, use_reentrant=False).sum()

    _, gradient = train(tmp_path, "eager", model)
    compiled = torch.compile(model, backend="aot_eager")
    _, other = train(tmp_path, "reference", compiled)  # Dynamo leaves the region to eager code
    observer, _ = train(tmp_path, "current", compiled, "reference")
    assert observer.verdict.verdict == "match"
    assert torch.equal(gradient, other)
