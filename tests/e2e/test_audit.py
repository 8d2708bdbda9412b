"""Audits of real trainings: what is nondeterministic is found, nothing else is, and the training goes on unharmed."""

import itertools
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from styles import STYLES, Classifier, Samples, train
from torch import Tensor, library, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from det_callbacks import (
    AuditError,
    DeterminismCallback,
    DivergenceWarning,
    NothingComparedError,
    SelectionError,
    StepNotRepeatableError,
)
from det_callbacks.patterns import OpPattern

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",  # Lightning's advice on speed
    "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning",
    "ignore:.*`isinstance.treespec, LeafSpec.` is deprecated",  # Lightning's, of torch 2.13
)

AUDITS = ("ops", "step")
_calls = itertools.count(1)


def entropy() -> float:
    """Return a small number that no seed decides, another at each call."""
    return float(next(_calls)) + os.urandom(1)[0] / 256


@library.custom_op("audited::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + entropy()


noisy.register_autograd(lambda ctx, gradient: gradient)


@library.custom_op("audited::noisy_gradient", mutates_args=())
def noisy_gradient(gradient: Tensor) -> Tensor:
    return gradient * entropy()


@library.custom_op("audited::noisy_", mutates_args={"x"})
def noisy_(x: Tensor) -> None:
    x.add_(entropy())


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return noisy_gradient(gradient)


class Forward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(noisy(x))


class Backward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NoisyGradient.apply(x)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scratch = torch.zeros_like(x)
        noisy_(scratch)
        return x + scratch.sign()


class Noisy(Classifier):
    """Three nondeterministic ops, each in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Forward(), Backward(), InPlace()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.three(self.two(self.one(self.first(inputs)))))


PLANTED = {
    ("forward", "one", "audited.noisy.default"),
    ("backward", "two", "audited.noisy_gradient.default"),
    ("forward", "three", "audited.noisy_.default"),
}


def audit(folder: Path, **options: Any) -> DeterminismCallback:
    return DeterminismCallback(None, mode="audit", current=folder, **options)


def assert_equal_trainings(one: Any, other: Any) -> None:
    for (name, value), (_, audited) in zip(one[0].state_dict().items(), other[0].state_dict().items(), strict=True):
        assert torch.equal(value, audited), name
    for loss, audited_loss in zip(one[1], other[1], strict=True):
        assert (loss is None and audited_loss is None) or torch.equal(loss, audited_loss)
    assert torch.equal(one[2]["torch"], other[2]["torch"])
    assert one[2]["numpy"] == other[2]["numpy"]


@pytest.mark.parametrize("kind", AUDITS)
@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_reported_and_nothing_changes(style: str, kind: Any, tmp_path: Path) -> None:
    module, options = STYLES[style]
    callback = audit(tmp_path / "audit", audit=kind, audit_steps=(0, 1, 3))
    assert_equal_trainings(train(module, **options), train(module, callback, **options))
    assert callback.audit_report is not None
    assert callback.audit_report.findings == ()
    assert callback.audit_report.num_compared > 20
    assert json.loads((tmp_path / "audit" / "audit.json").read_text()) == callback.audit_report.to_dict()
    assert (tmp_path / "audit" / "replay.yaml").read_text().endswith("\n[]\n")


def test_three_nondeterministic_ops_are_found_and_no_other(tmp_path: Path) -> None:
    callback = audit(tmp_path / "audit")
    with pytest.raises(AuditError, match="3 ops gave other bits") as caught:
        train(Noisy, callback, epochs=1)
    report = callback.audit_report
    assert report is not None
    assert caught.value.exit_code == 1
    assert caught.value.report == report
    assert pickle.loads(pickle.dumps(caught.value)).report == report
    assert {(found.phase, found.module, found.op) for found in report.findings} == PLANTED
    assert report.steps == (0, 1, 2)
    for found in report.findings:
        assert found.steps == (0, 1, 2)
        assert found.judgement == "nondeterministic"
        assert found.num_elements
        assert found.max_ulps
        assert found.source[0].startswith("tests/e2e/test_audit.py:")
        assert OpPattern.parse(found.pattern).matches(found.phase, found.module, found.op)
    assert set(report.replay) == {f"{phase}/{module}:{op}" for phase, module, op in PLANTED}


def test_a_step_names_where_its_runs_begin_to_differ(tmp_path: Path) -> None:
    callback = audit(tmp_path / "audit", audit="step", on_divergence="warn")
    with pytest.warns(DivergenceWarning, match=r"audited\.noisy\.default"):
        train(Noisy, callback, epochs=1)
    assert callback.audit_report is not None
    found = {(found.phase, found.module, found.op) for found in callback.audit_report.findings}
    assert ("forward", "one", "audited.noisy.default") in found
    assert found <= PLANTED
    assert {found.judgement for found in callback.audit_report.findings} == {"nondeterministic"}


class Once(Classifier):
    """One op gives other bits once, at a call that a test chooses."""

    faulty_call = 3
    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(fault_once(torch.relu(self.first(inputs))))


@library.custom_op("audited::fault_once", mutates_args=())
def fault_once(x: Tensor) -> Tensor:
    Once.calls += 1
    return x + (1.0 if Once.calls == Once.faulty_call else 0.0)


fault_once.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize("faulty_call", [1, 2])
def test_a_fault_that_comes_once_is_transient(faulty_call: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Once, "calls", 0)
    monkeypatch.setattr(Once, "faulty_call", faulty_call)
    callback = audit(tmp_path / "audit", audit="step", on_divergence="warn")
    with pytest.warns(DivergenceWarning, match="suspect the hardware"):
        train(Once, callback, epochs=1)
    assert callback.audit_report is not None
    (found,) = callback.audit_report.findings
    assert (found.op, found.judgement, found.steps) == ("audited.fault_once.default", "transient", (0,))
    assert callback.audit_report.replay == ()


class Metered(Classifier):
    """With a metric, logged values, a counter, a lazily built list and a hidden state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.num_calls = 0
        self.history: list[float] = []
        self.hidden = torch.zeros(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        self.num_calls += 1
        logits = self(inputs) + self.hidden * 0.1 + self.num_calls * 0.01
        loss = cross_entropy(logits, labels)
        self.hidden = self.hidden + loss.detach()
        self.history.append(float(loss.detach()))
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def test_python_state_metrics_and_logged_values_are_put_back(tmp_path: Path) -> None:
    callback = audit(tmp_path / "audit", audit="step", audit_runs=3)
    logged = []
    results = []
    for callbacks in ((), (callback,)):
        result = train(Metered, *callbacks)
        results.append(result)
        logged.append({name: float(value) for name, value in result[0].trainer.callback_metrics.items()})
    assert_equal_trainings(*results)
    assert results[0][0].history == results[1][0].history
    assert results[0][0].num_calls == results[1][0].num_calls == 8
    assert logged[0] == logged[1]
    assert set(logged[0]) == {"accuracy", "accuracy_step", "accuracy_epoch", "loss", "loss_step", "loss_epoch"}
    assert callback.audit_report is not None
    names = " ".join(callback.audit_report.put_back)
    for name in ("model.first.weight", "model.history", "attributes of model", "model.accuracy", "logged values"):
        assert name in names
    assert "exp_avg" in names


class Reading(Classifier):
    """Draws from a Python generator in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = (value / 10 for value in range(100))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * next(self.stream)


def test_what_cannot_be_put_back_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StepNotRepeatableError, match=r"model\.stream \(a Python generator\)") as caught:
        train(Reading, audit(tmp_path / "audit", audit="step"))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "audit").exists()


_GLOBAL = [0.0]


class Global(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _GLOBAL[0] += 1
        return super().training_step(batch, batch_idx) * _GLOBAL[0]


def test_a_global_that_the_step_changes_is_told_from_an_op(tmp_path: Path) -> None:
    callback = audit(tmp_path / "audit", audit="step", on_divergence="warn")
    with pytest.warns(DivergenceWarning, match="did not begin from the same place"):
        train(Global, callback, epochs=1)
    assert callback.audit_report is not None
    assert {found.judgement for found in callback.audit_report.findings} == {"not held"}
    assert callback.audit_report.replay == ()


class FailsAgain(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if _GLOBAL[0] < 0:
            raise ValueError("only once")
        _GLOBAL[0] = -1.0
        return super().training_step(batch, batch_idx)


def test_a_step_that_fails_when_run_again_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.modules[__name__], "_GLOBAL", [0.0])
    with pytest.raises(StepNotRepeatableError, match=r"Step 0 ran once and failed .* ValueError: only once"):
        train(FailsAgain, audit(tmp_path / "audit", audit="step"))


@pytest.mark.parametrize("kind", AUDITS)
def test_an_exception_leaves_nothing_behind(kind: Any, tmp_path: Path) -> None:
    class Stops(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 1:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    model, callback = Stops(), audit(tmp_path / "audit", audit=kind)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, callbacks=[callback])  # fmt: skip
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(model, DataLoader(Samples(), batch_size=8))
    epoch_loop = trainer.fit_loop.epoch_loop
    assert "training_step" not in vars(trainer.strategy)
    assert "run" not in vars(epoch_loop.automatic_optimization)
    assert "run" not in vars(epoch_loop.manual_optimization)
    assert callback.audit_report is None
    assert not (tmp_path / "audit").exists()


@pytest.mark.parametrize(
    "options",
    [{"level": "module"}, {"modules": ("last",)}, {"phases": ("backward",)}, {"every_n_steps": 2}, {"replay": ("*",)}],
)
def test_an_audit_of_less_than_everything_is_refused(options: Any, tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="An audit looks at every op"):
        audit(tmp_path / "audit", **options)


@pytest.mark.parametrize("steps", [3, -1, "abc", [], [-1], [1.5], None, [True]])
def test_wrong_steps_are_refused(steps: Any, tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="audit_steps must be numbers of steps"):
        audit(tmp_path / "audit", audit_steps=steps)


def test_what_an_earlier_audit_found_is_gone_when_the_next_one_stops(tmp_path: Path) -> None:
    train(Classifier, audit(tmp_path / "audit"), epochs=1)
    assert (tmp_path / "audit" / "replay.yaml").exists()
    with pytest.raises(NothingComparedError):
        train(Classifier, audit(tmp_path / "audit", audit_steps=(100,)), epochs=1)
    assert list((tmp_path / "audit").iterdir()) == []


def test_steps_that_did_not_come_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(Classifier, audit(tmp_path / "audit", audit_steps=(1, 100)), epochs=1)
    assert "audited 1 step" in (told := capsys.readouterr().out)
    assert "1 step never came (100)" in told


def test_steps_that_never_come_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(NothingComparedError, match="had none of the steps that audit_steps asks for \\(100\\)"):
        train(Classifier, audit(tmp_path / "audit", audit_steps=(100,)))


# Lightning's, of a step that takes the iterator
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning")
def test_a_loader_iterator_cannot_be_run_again(tmp_path: Path) -> None:
    class Draws(Classifier):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    with pytest.raises(StepNotRepeatableError, match="dataloader_iter"):
        train(Draws, audit(tmp_path / "audit", audit="step"))
    callback = audit(tmp_path / "ops")
    train(Draws, callback)
    assert callback.audit_report is not None
    assert callback.audit_report.findings == ()
