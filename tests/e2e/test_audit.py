"""Audits of real trainings: what is nondeterministic is found, nothing else is,
and the training goes on unharmed.
"""

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import STYLES, Classifier, Fit, Noisy, RaiseAt, StopError, assert_nothing_left, train
from lightning.pytorch.callbacks import LambdaCallback
from nondeterministic_ops import noisy_
from tiers import rest_slow
from torch import Tensor
from trainers import LIGHTNING_ADVICE, has_same_weights

from det_callbacks import AuditError, DeterminismCallback, DivergenceWarning, NothingComparedError
from det_callbacks.runs.selection import OpPattern

pytestmark = LIGHTNING_ADVICE


PLANTED = {
    ("forward", "", "planted.noisy.default"),
    ("backward", "", "planted.noisy_backward.default"),
    ("forward", "", "planted.noisy_.default"),
}


def audit(folder: Path, **options: Any) -> DeterminismCallback:
    return DeterminismCallback(None, mode="audit", current=folder, **options)


@pytest.mark.parametrize("style", rest_slow(STYLES, every=6))
def test_nothing_is_reported_and_nothing_changes(style, tmp_path):
    module, options = STYLES[style]
    callback = audit(tmp_path / "audit", only_steps=(0, 1, 3))
    (alone, losses, states), (audited, *others) = (
        train(module, **options),
        train(module, callback, **options),
    )
    assert has_same_weights(alone, audited)
    assert [losses, states] == others
    assert callback.audit_report.findings == ()
    assert callback.audit_report.num_compared > 20
    assert (
        json.loads((tmp_path / "audit" / "audit.json").read_text())
        == callback.audit_report.to_dict()
    )
    assert (tmp_path / "audit" / "replay.yaml").read_text().endswith("\n[]\n")


def test_three_nondeterministic_ops_are_found_and_no_other(tmp_path):
    """Those of the first steps of the fit, whatever their numbers."""

    def start_late(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.fit_loop.epoch_loop.batch_progress.total.ready = 40

    callback = audit(tmp_path / "audit")
    with pytest.raises(AuditError, match="3 ops gave different bits") as caught:
        train(Noisy, LambdaCallback(on_train_start=start_late), callback, epochs=1)
    report = callback.audit_report
    assert caught.value.report == report
    assert pickle.loads(pickle.dumps(caught.value)).report == report
    assert {(found.phase, found.module, found.op) for found in report.findings} == PLANTED
    assert report.steps == (40, 41, 42)
    for found in report.findings:
        assert found.steps == report.steps
        assert found.judgement == "nondeterministic"
        assert found.num_differing
        assert found.max_ulps
        assert found.source[0].startswith("tests/")
        assert OpPattern.parse(found.pattern).matches(found.phase, found.module, found.op)
    assert set(report.replay) == {f"{phase}/{module}:{op}" for phase, module, op in PLANTED}


class Faulty(Classifier):
    def forward(self, inputs: Tensor) -> Tensor:
        scratch = torch.ones_like(inputs)
        noisy_(scratch)
        return self.last(torch.relu(self.first(inputs * scratch)))


@pytest.mark.parametrize(
    ("runs", "judgement", "steps"),
    [
        # the first run of the second step's call: the third agrees with the second
        ([3], "transient", (1,)),
        ([4], "transient", (1,)),  # its second run: the third agrees with the first
        ([3, 4], "nondeterministic", (1,)),  # three runs, three results
        ([1, 4], "nondeterministic", (0, 1)),  # once in each of two steps
    ],
)
def test_a_fault_that_comes_once_is_transient(runs, judgement, steps, tmp_path, monkeypatch):
    # of runs; each call of the op has two, and a third where these differ
    numbers = itertools.count(1)
    added = (float(number) if number in runs else 0.0 for number in numbers)
    monkeypatch.setattr("nondeterministic_ops.entropy", lambda: next(added))
    callback = audit(tmp_path / "audit", on_divergence="warn")
    advice = (
        "Check the hardware first" if judgement == "transient" else "Make these ops deterministic"
    )
    with pytest.warns(DivergenceWarning, match=advice):
        train(Faulty, callback, epochs=1)
    (found,) = callback.audit_report.findings
    assert (found.judgement, found.steps, found.op) == (judgement, steps, "planted.noisy_.default")
    assert callback.audit_report.replay == (
        (found.pattern,) if judgement == "nondeterministic" else ()
    )


def test_an_audit_that_stops_leaves_nothing_behind_also_of_an_earlier_one(tmp_path):
    folder = tmp_path / "audit"

    def audit_once() -> None:
        train(Classifier, audit(folder), epochs=1)
        assert {path.name for path in folder.iterdir()} == {"audit.json", "replay.yaml"}

    audit_once()
    callback = audit(folder)
    fit = Fit(callback, RaiseAt("backward", StopError()))
    with pytest.raises(StopError):
        fit.run()
    assert_nothing_left(fit, callback)
    assert callback.audit_report is None
    assert list(folder.iterdir()) == []
    audit_once()
    with pytest.raises(NothingComparedError, match="ran none of the steps in only_steps \\(100\\)"):
        train(Classifier, audit(folder, only_steps=(100,)), epochs=1)
    assert list(folder.iterdir()) == []
