"""Observations inside a Trainer: they go into the run of the DeterminismCallback."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from styles import Classifier, Validated, train
from torch import Tensor
from torch.nn.functional import cross_entropy
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
from det_callbacks.runs.program import Site
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE

_noise = itertools.count(1)


class Observed(Classifier):
    """Observes values and gradients; what it adds to its hidden layer differs at each run."""

    is_noisy = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs))
        if self.is_noisy:
            hidden.data.add_(next(_noise) / 100)
        observe_non_deterministic("after noise", hidden)
        observe("hidden.mean/std", {"mean": hidden.mean(), "std": [hidden.std(), 3, "text"]})
        observe_grad("hidden", hidden)
        return self.last(hidden)


class Noisy(Observed):
    is_noisy = True


def record(folder: Path, model: type[Classifier], **options: Any) -> Any:
    return train(model, DeterminismCallback(folder, mode="record", **options), epochs=1)


def verify(folder: Path, current: Path, model: type[Classifier]) -> DeterminismCallback:
    callback = DeterminismCallback(folder, current=current)
    train(model, callback, epochs=1)
    return callback


def named_sites(folder: Path, step: int = 0) -> list[Site]:
    view = Run.open(folder).view(0, 0, step)
    return [site for site in view.program.sites if site.name and ("hidden" in site.name or "noise" in site.name)]


@pytest.mark.parametrize("level", ["op", "state"])
def test_observations_are_sites_of_the_run_at_every_level(level: str, tmp_path: Path) -> None:
    record(tmp_path / "run", Observed, level=level)
    found = [(site.phase, site.module, site.op, site.name) for site in named_sites(tmp_path / "run")]
    paths = ("['mean']", "['std'][0]", "['std'][1]", "['std'][2]")
    assert found == [
        ("forward", "", "", "after noise"),
        *(("forward", "", "", f"hidden.mean/std{path}") for path in paths),
        ("backward", "", "", "grad of hidden"),
    ]
    callback = verify(tmp_path / "run", tmp_path / "current", Observed)
    assert callback.verdict.verdict == "match"
    assert callback.verdict.coverage.replayed["after noise"]["differing"] == 0
    if level == "op":
        with pytest.raises(DivergenceError, match=r"aten\.add_\.Tensor"):  # the noise itself is an op
            verify(tmp_path / "run", tmp_path / "noisy", Noisy)


class Regions(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        hidden = self.first(inputs)
        with enable_hash_mode():
            hidden = torch.relu(hidden)
            enable_hash_mode()
            hidden = hidden * 2
            disable_hash_mode()
        return cross_entropy(self.last(hidden), labels)


class LeavesOpen(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            enable_hash_mode()
        return super().training_step(batch, batch_idx)


def test_regions_add_ops_at_level_module(tmp_path: Path) -> None:
    record(tmp_path / "run", Regions, level="module")
    sites = Run.open(tmp_path / "run").view(0, 0, 1).program.sites
    assert [site.op for site in sites if site.op and site.role == "output"] == ["aten.relu.default", "aten.mul.Tensor"]
    callback = verify(tmp_path / "run", tmp_path / "current", Regions)
    assert callback.verdict.verdict == "match"


@pytest.mark.parametrize("level", ["module", "state"])
# ours, of a region that is too late
@pytest.mark.filterwarnings("ignore:enable_hash_mode records nothing:det_callbacks.CoverageWarning")
def test_a_region_that_is_left_open_goes_on_in_the_next_step_and_not_in_between(level: str, tmp_path: Path) -> None:
    record(tmp_path / "run", LeavesOpen, level=level)
    run = Run.open(tmp_path / "run")
    assert run.is_complete
    assert run.rank(0).num_steps == 4
    assert any(site.op for site in run.view(0, 0, 2).program.sites) is (level != "state")
    callback = verify(tmp_path / "run", tmp_path / "current", LeavesOpen)
    assert callback.verdict.verdict == "match"


@pytest.mark.parametrize("function", [observe_non_deterministic, observe_non_deterministic_grad])
def test_what_is_replayed_needs_every_step(function: Callable[..., Any], tmp_path: Path) -> None:
    class Replays(Classifier):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            function("hidden", hidden)
            return self.last(hidden)

    with pytest.raises(SelectionError, match="Record with every_n_steps=1"):
        record(tmp_path / "run", Replays, level="state", every_n_steps=2)


class Checkpointed(Validated):
    """Observes a gradient inside checkpointed regions of both kinds, and a value in its validation."""

    def forward(self, inputs: Tensor) -> Tensor:
        def block(hidden: Tensor, name: str) -> Tensor:
            hidden = torch.tanh(hidden)
            observe_grad(name, hidden)
            return (hidden * hidden).exp()

        hidden = checkpoint(block, self.first(inputs), "inner", use_reentrant=False)
        return self.last(checkpoint(block, hidden, "reentrant", use_reentrant=True))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        observe("in validation", batch[0])


def test_gradients_in_checkpointed_regions_and_values_outside_of_the_steps(tmp_path: Path) -> None:
    with pytest.warns(CoverageWarning, match="'in validation' was observed outside the steps of the Determinism"):
        record(tmp_path / "run", Checkpointed)
    sites = Run.open(tmp_path / "run").view(0, 0, 1).program.sites
    assert [sum(site.name == f"grad of {name}" for site in sites) for name in ("inner", "reentrant")] == [1, 1]


class OpensAnother(Classifier):
    folder = Path()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with ObserverContext(self.folder, "inner"):
            return super().training_step(batch, batch_idx)


def test_an_observer_inside_a_recorded_fit_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(OpensAnother, "folder", tmp_path)
    with pytest.raises(TraceError, match="Another observer is active"):
        record(tmp_path / "run", OpensAnother)
    with ObserverContext(tmp_path, "after"):
        observe("nothing is left active", 1)
