"""Observations inside a Trainer: they go into the run of the DeterminismCallback."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Validated, train
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from trainers import LIGHTNING_ADVICE

from det_callbacks import (
    CoverageWarning,
    DeterminismCallback,
    DivergenceError,
    ObserverContext,
    SelectionError,
    TraceError,
    disable_hash_mode,
    enable_hash_mode,
    observe,
    observe_grad,
    observe_non_deterministic,
    observe_non_deterministic_grad,
)
from det_callbacks.runs.program import Program
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE

_calls = itertools.count(1)


class Calls(Validated):
    """Hands what its layers give to each other to a function,
    and batches of validation to another one.
    """

    def __init__(
        self, function: Callable[[Tensor, int], Tensor], validated: Callable[[Tensor], object]
    ) -> None:
        super().__init__()
        self.function, self.validated = function, validated

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.function(self.first(inputs), self.global_step))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated(batch[0])


def fit(callback: DeterminismCallback, function: Any, validated: Any = id) -> DeterminismCallback:
    train(partial(Calls, function, validated), callback, epochs=1)
    return callback


def recorded(folder: Path, function: Any, validated: Any = id, **options: Any) -> Program:
    fit(DeterminismCallback(folder / "run", mode="record", **options), function, validated)
    run = Run.open(folder / "run")
    assert (run.is_complete, run.rank(0).num_steps) == (True, 4)
    return run.view(0, 0, 2).program


def matching(folder: Path, function: Any) -> dict[str, Any]:
    verdict = fit(DeterminismCallback(folder / "run", current=folder / "current"), function).verdict
    assert verdict.verdict == "match"
    return verdict.coverage.replayed


def observed(hidden: Tensor, index: int, *, is_noisy: bool = False) -> Tensor:
    """Observes values and gradients; what it may add to them differs at each run."""
    hidden = torch.relu(hidden)
    if is_noisy:
        hidden.data.add_(next(_calls) / 100)
    observe_non_deterministic("after noise", hidden)
    observe("hidden.mean/std", {"mean": hidden.mean(), "std": [hidden.std(), 3, "text"]})
    return observe_grad("hidden", hidden)


@pytest.mark.parametrize("level", ["op", "state"])
def test_observations_are_sites_of_the_run_at_every_level(level, tmp_path):
    sites = recorded(tmp_path, observed, level=level).sites
    found = [(site.phase, site.module, site.op, site.name) for site in sites]
    paths = ("['mean']", "['std'][0]", "['std'][1]", "['std'][2]")
    assert [
        place for place in found if "hidden" in (place[3] or "") or "noise" in (place[3] or "")
    ] == [
        ("forward", "", "", "after noise"),
        *(("forward", "", "", f"hidden.mean/std{path}") for path in paths),
        ("backward", "", "", "grad of hidden"),
    ]
    assert matching(tmp_path, observed)["after noise"]["differing"] == 0
    if level == "op":
        # the noise itself is an op
        with pytest.raises(DivergenceError, match=r"aten\.add_\.Tensor"):
            matching(tmp_path, partial(observed, is_noisy=True))


def with_regions(hidden: Tensor, index: int) -> Tensor:
    """Opens and closes regions in each step, and leaves one open that goes on in the next."""
    hidden = hidden.sin() if index else hidden
    with enable_hash_mode():
        hidden = torch.relu(hidden)
        enable_hash_mode()
        hidden = hidden * 2
        disable_hash_mode()
    if index == 0:
        enable_hash_mode()
    return hidden.tanh()


@pytest.mark.parametrize("level", ["module", "state"])
# ours, of a region that is too late
@pytest.mark.filterwarnings("ignore:enable_hash_mode records nothing:det_callbacks.CoverageWarning")
def test_regions_add_ops_and_one_that_is_left_open_goes_on_in_the_next_step(level, tmp_path):
    sites = recorded(tmp_path, with_regions, level=level).sites
    ops = [
        site.op for site in sites if site.phase == "forward" and site.role == "output" and site.op
    ]
    own = ["aten.sin.default", "aten.relu.default", "aten.mul.Tensor", "aten.tanh.default"]
    assert [op for op in ops if op in own] == (own if level == "module" else [])
    matching(tmp_path, with_regions)


@pytest.mark.parametrize("function", [observe_non_deterministic, observe_non_deterministic_grad])
def test_what_is_replayed_needs_every_step(function, tmp_path):
    with pytest.raises(SelectionError, match="Record with every_n_steps=1"):
        recorded(
            tmp_path, lambda hidden, _: function("hidden", hidden), level="state", every_n_steps=2
        )


def checkpointed(hidden: Tensor, index: int) -> Tensor:
    """Observes a gradient inside checkpointed regions of both kinds."""

    def block(hidden: Tensor, name: str) -> Tensor:
        hidden = torch.tanh(hidden)
        observe_grad(name, hidden)
        return (hidden * hidden).exp()

    hidden = checkpoint(block, hidden, "inner", use_reentrant=False)
    return checkpoint(block, hidden, "reentrant", use_reentrant=True)


def test_gradients_in_checkpointed_regions_and_values_outside_of_the_steps(tmp_path):
    with pytest.warns(
        CoverageWarning, match="'in validation' was observed outside the steps of the Determinism"
    ):
        names = [
            site.name
            for site in recorded(tmp_path, checkpointed, partial(observe, "in validation")).sites
        ]
    assert [names.count(f"grad of {name}") for name in ("inner", "reentrant")] == [1, 1]


def test_an_observer_inside_a_recorded_fit_is_refused(tmp_path):
    def opening_another(hidden: Tensor, index: int) -> Tensor:
        with ObserverContext(tmp_path, "inner"):
            return hidden

    with pytest.raises(TraceError, match="Another observer is already active"):
        recorded(tmp_path, opening_another)
    with ObserverContext(tmp_path, "after"):
        observe("nothing is left active", 1)
