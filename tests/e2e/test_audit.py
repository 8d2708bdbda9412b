"""Audits of real trainings: what is nondeterministic is found, nothing else is, and the training goes on unharmed."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from nondeterministic_ops import Planted
from styles import STYLES, Classifier, Samples, train
from tiers import rest_slow
from torch import Tensor, library
from torch.utils.data import DataLoader
from trainers import LIGHTNING_ADVICE, has_same_weights, quiet_trainer

from det_callbacks import AuditError, DeterminismCallback, DivergenceWarning, NothingComparedError, SelectionError
from det_callbacks.patterns import OpPattern

pytestmark = LIGHTNING_ADVICE


class Noisy(Classifier):
    """Three nondeterministic ops, each in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.planted = Planted()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs) + self.planted(inputs[:, :4]))


PLANTED = {
    ("forward", "planted.first", "planted.noisy.default"),
    ("backward", "planted.second", "planted.noisy_backward.default"),
    ("forward", "planted.third", "planted.noisy_.default"),
}


def audit(folder: Path, **options: Any) -> DeterminismCallback:
    return DeterminismCallback(None, mode="audit", current=folder, **options)


def assert_equal_trainings(one: Any, other: Any) -> None:
    assert has_same_weights(one[0], other[0])
    for loss, audited_loss in zip(one[1], other[1], strict=True):
        assert (loss is None and audited_loss is None) or torch.equal(loss, audited_loss)
    assert torch.equal(one[2]["torch"], other[2]["torch"])
    assert one[2]["numpy"] == other[2]["numpy"]


@pytest.mark.parametrize("style", rest_slow(STYLES, every=6))
def test_nothing_is_reported_and_nothing_changes(style: str, tmp_path: Path) -> None:
    module, options = STYLES[style]
    callback = audit(tmp_path / "audit", only_steps=(0, 1, 3))
    assert_equal_trainings(train(module, **options), train(module, callback, **options))
    assert callback.audit_report.findings == ()
    assert callback.audit_report.num_compared > 20
    assert json.loads((tmp_path / "audit" / "audit.json").read_text()) == callback.audit_report.to_dict()
    assert (tmp_path / "audit" / "replay.yaml").read_text().endswith("\n[]\n")


def test_three_nondeterministic_ops_are_found_and_no_other(tmp_path: Path) -> None:
    callback = audit(tmp_path / "audit")
    with pytest.raises(AuditError, match="3 ops gave other bits") as caught:
        train(Noisy, callback, epochs=1)
    report = callback.audit_report
    assert caught.value.exit_code == 1
    assert caught.value.report == report
    assert pickle.loads(pickle.dumps(caught.value)).report == report
    assert {(found.phase, found.module, found.op) for found in report.findings} == PLANTED
    assert report.steps == (0, 1, 2)
    for found in report.findings:
        assert found.steps == (0, 1, 2)
        assert found.judgement == "nondeterministic"
        assert found.num_differing
        assert found.max_ulps
        assert found.source[0].startswith("tests/nondeterministic_ops.py:")
        assert OpPattern.parse(found.pattern).matches(found.phase, found.module, found.op)
    assert set(report.replay) == {f"{phase}/{module}:{op}" for phase, module, op in PLANTED}


@library.custom_op("audited::faulty", mutates_args=())
def faulty(x: Tensor) -> Tensor:
    return x + _fault()


@library.custom_op("audited::faulty_", mutates_args={"x"})
def faulty_(x: Tensor) -> None:
    x.add_(_fault())


faulty.register_autograd(lambda ctx, gradient: gradient)
FAULTY_RUNS: list[int] = []
"""Runs of the two ops, from 1 on, that give other bits; each call of them has two, and a third where these differ."""
_num_runs = [0]


def _fault() -> float:
    _num_runs[0] += 1
    return float(_num_runs[0]) if _num_runs[0] in FAULTY_RUNS else 0.0


class Faulty(Classifier):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(faulty(torch.relu(self.first(inputs))))


class FaultyInPlace(Classifier):
    def forward(self, inputs: Tensor) -> Tensor:
        scratch = torch.ones_like(inputs)
        faulty_(scratch)
        return self.last(torch.relu(self.first(inputs * scratch)))


@pytest.mark.parametrize(
    ("module", "runs", "judgement", "steps"),
    [
        (Faulty, [3], "transient", (1,)),  # the first run of the second step's call: the third agrees with the second
        (FaultyInPlace, [4], "transient", (1,)),  # its second run: the third agrees with the first
        (FaultyInPlace, [3, 4], "nondeterministic", (1,)),  # three runs, three results
        (Faulty, [1, 4], "nondeterministic", (0, 1)),  # once in each of two steps
    ],
)
def test_a_fault_that_comes_once_is_transient(
    module: Any, runs: list[int], judgement: str, steps: tuple[int, ...], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FAULTY_RUNS", runs)
    monkeypatch.setattr(sys.modules[__name__], "_num_runs", [0])
    callback = audit(tmp_path / "audit", on_divergence="warn")
    advice = "suspect the hardware" if judgement == "transient" else "Make these ops deterministic"
    with pytest.warns(DivergenceWarning, match=advice):
        train(module, callback, epochs=1)
    (found,) = callback.audit_report.findings
    assert (found.judgement, found.steps) == (judgement, steps)
    assert found.op.startswith("audited.faulty")
    assert callback.audit_report.replay == ((found.pattern,) if judgement == "nondeterministic" else ())


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    class Stops(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 1:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    model, callback = Stops(), audit(tmp_path / "audit")
    trainer = quiet_trainer(callback)
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(model, DataLoader(Samples(), batch_size=8))
    assert "training_step" not in vars(trainer.strategy)
    assert callback.audit_report is None
    assert not (tmp_path / "audit").exists()


def test_an_audit_of_less_than_everything_is_refused(tmp_path: Path) -> None:
    refused: list[Any] = [{"level": "module"}, {"modules": ("last",)}, {"phases": ("backward",)}, {"replay": ("*",)}]
    for options in refused:
        with pytest.raises(SelectionError, match="An audit looks at every op"):
            audit(tmp_path / "audit", **options)


def test_what_an_earlier_audit_found_is_gone_when_the_next_one_stops(tmp_path: Path) -> None:
    train(Classifier, audit(tmp_path / "audit"), epochs=1)
    assert (tmp_path / "audit" / "replay.yaml").exists()
    with pytest.raises(NothingComparedError, match="had none of the steps that only_steps asks for \\(100\\)"):
        train(Classifier, audit(tmp_path / "audit", only_steps=(100,)), epochs=1)
    assert list((tmp_path / "audit").iterdir()) == []


def test_the_first_steps_of_a_fit_are_audited_whatever_their_numbers(tmp_path: Path) -> None:
    class StartsLate(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.fit_loop.epoch_loop.batch_progress.total.ready = 40

    callback = audit(tmp_path / "audit")
    train(Classifier, StartsLate(), callback, epochs=1)
    assert len(callback.audit_report.steps) == 3
    assert callback.audit_report.steps[0] > 30
