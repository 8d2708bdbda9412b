"""Observations inside torch.compile: ops of the graph, or a graph break that says so."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compiling import COMPILING
from msgspec import structs
from tiers import rest_slow
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from det_callbacks import (
    CoverageWarning,
    ObserverContext,
    observe,
    observe_non_deterministic,
    observe_non_deterministic_grad,
)
from det_callbacks.runs.store import Run

pytestmark = COMPILING


def noisy(weight: Tensor, x: Tensor, noise: Tensor) -> Tensor:
    hidden = torch.relu(weight * x)
    observe("hidden", {"k": [hidden, 3, None, True], "text": "é", "f": 0.1})
    hidden = torch.exp(hidden.sin() + noise)  # autograd saves the result of exp
    observe_non_deterministic("noisy", hidden)
    observe("after", hidden * 2)
    return (hidden * 3).sum()


def train(
    folder: Path,
    name: str,
    function: Callable[..., Tensor],
    reference: str | None = None,
    steps: int = 2,
) -> tuple[ObserverContext, Tensor]:
    weight = torch.ones(4, requires_grad=True)
    where = None if reference is None else folder / reference
    with ObserverContext(folder, name, where, raise_on_mismatch=True) as observer:
        for _ in range(steps):
            loss = function(weight, torch.arange(4.0), torch.rand(4))  # other noise in each run
            loss.backward()
            observe("loss", loss)
            observe("gradient", weight.grad)
            observer.next_step()
    return observer, weight.grad


@pytest.mark.parametrize("backend", rest_slow(["aot_eager", "inductor"], every=2))
def test_observations_are_ops_of_one_graph_and_the_sites_of_eager_code(backend, tmp_path):
    compiled = torch.compile(noisy, fullgraph=True, backend=backend)
    _, gradient = train(tmp_path, "compiled", compiled)
    observer, replayed = train(tmp_path, "current", compiled, "compiled")
    # the verdict is a match, of the gradients too, although autograd saved the live bits first
    assert observer.verdict.coverage.replayed["noisy"]["differing"] == 2
    assert torch.equal(gradient, replayed)
    train(tmp_path, "eager", noisy)
    steps = [Run.open(tmp_path / name).view(0, 0, 0) for name in ("eager", "compiled")]
    # the backend calls its graph as a module, which is a name of its own
    eager, compiled = (
        [structs.replace(site, module="") for site in step.program.sites] for step in steps
    )
    assert eager == compiled
    assert steps[0].record.digests[:6].tolist() == steps[1].record.digests[:6].tolist()
    paths = (*(f"['k'][{index}]" for index in range(4)), "['text']", "['f']")
    assert [site.name for site in eager][:6] == [f"hidden{path}" for path in paths]


def test_without_an_observer_nothing_is_in_the_graph(tmp_path):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(noisy, fullgraph=True, backend=counter)

    def call() -> None:
        compiled(torch.ones(4), torch.arange(4.0), torch.rand(4))

    def num_own_ops() -> int:
        return sum("det_callbacks" in str(node.target) for node in counter.graphs[-1].graph.nodes)

    call()
    assert (counter.frame_count, num_own_ops()) == (1, 0)
    # compiled once more when an observer is there, and not again for the next one
    for name in ("one", "two"):
        with ObserverContext(tmp_path, name):
            call()
        assert (counter.frame_count, num_own_ops()) == (2, 3)
    call()
    assert counter.frame_count == 2


def test_gradients_break_the_graph_and_say_so_once(tmp_path):
    def model(weight: Tensor, x: Tensor, noise: Tensor) -> Tensor:
        hidden = weight * x
        observe_non_deterministic_grad("hidden", hidden)
        return (hidden.sin() * x).sum()

    with pytest.warns(CoverageWarning, match=r"torch\.compile breaks its graph") as said:
        observer, _ = train(
            tmp_path, "reference", torch.compile(model, backend="aot_eager"), steps=3
        )
    assert len(said) == 1
    assert ["_gradient" in reason for reason in counters["graph_break"]] == [True]
    names = [site.name for site in Run.open(observer.path).view(0, 0, 1).program.sites]
    assert names == ["grad of hidden", "loss", "gradient"]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="det_callbacks"):
        train(tmp_path, "full", torch.compile(model, fullgraph=True, backend="eager"))


def test_observation_in_a_checkpointed_and_compiled_function(tmp_path):
    def inner(x: Tensor) -> Tensor:
        return observe("inner", x.sin()).exp()

    def model(weight: Tensor, x: Tensor, noise: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(inner, weight * x, use_reentrant=False).sum()

    compiled = torch.compile(model, backend="aot_eager")
    _, gradient = train(tmp_path, "eager", model, steps=1)
    _, other = train(tmp_path, "reference", compiled, steps=1)
    assert torch.equal(gradient, other)
    train(tmp_path, "current", compiled, "reference", steps=1)


def test_a_size_that_is_only_known_when_the_graph_runs(tmp_path):
    def sized(x: Tensor) -> Tensor:
        return observe("q", {"x": x * 2, "n": x.shape[0]})["x"]

    compiled = torch.compile(sized, backend="eager", fullgraph=True, dynamic=True)
    for name, function, reference in (("run", compiled, None), ("plain", sized, tmp_path / "run")):
        with ObserverContext(tmp_path, name, reference) as observer:
            for length in (3, 5):
                function(torch.ones(length))
    assert (observer.mismatches, observer.verdict.counts.sites_compared) == ((), 4)
