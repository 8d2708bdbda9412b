"""Trainings with nondeterministic ops: diverged without replay; with it a match,
and the recorded weights.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fits import STYLES, Classifier, Noisy, train
from tiers import rest_slow
from torch import Tensor
from trainers import LIGHTNING_ADVICE, has_same_weights

from det_callbacks import (
    CoverageWarning,
    DeterminismCallback,
    DivergenceError,
    ReplayError,
    SelectionError,
)
from det_callbacks.cli import main

pytestmark = LIGHTNING_ADVICE

NUMBERS = "forward/:aten._local_scalar_dense.*"
ALL = (
    "planted.noisy.default",
    "backward/*:planted.noisy_backward.default",
    "forward/:planted.noisy_.*",
    NUMBERS,
)


def record(folder: Path, model: type[Classifier] = Noisy, **options: Any) -> Any:
    return train(model, DeterminismCallback(folder, mode="record", **options), epochs=1)


def verify(folder: Path, current: Path, model: type[Classifier] = Noisy, **options: Any) -> Any:
    callback = DeterminismCallback(folder, current=current, **options)
    return callback, train(model, callback, epochs=1)


def test_steps_match_with_replay_and_diverge_without(tmp_path, capsys):
    recorded = record(tmp_path / "with", replay=ALL)
    assert "4 ops saved for replay" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "with")]) == 0
    assert f"saved for replay: {', '.join(ALL)}" in capsys.readouterr().out
    record(tmp_path / "without")

    callback, verified = verify(tmp_path / "with", tmp_path / "current")
    assert callback.verdict.verdict == "match"
    assert callback.verdict.counts.steps_compared == 4
    assert callback.verdict.counts.sites_differing == 0
    replayed = callback.verdict.to_dict()["coverage"]["replayed"]
    assert {name: (entry["count"], entry["differing"]) for name, entry in replayed.items()} == {
        "planted.noisy.default": (8, 8),
        "planted.noisy_.default": (4, 4),
        "planted.noisy_backward.default": (4, 4),
        "aten._local_scalar_dense.default": (4, 0),
    }
    assert (
        json.loads((tmp_path / "current" / "verdict.json").read_text())
        == callback.verdict.to_dict()
    )
    assert "4 ops replayed" in capsys.readouterr().out
    assert has_same_weights(recorded[0], verified[0])
    with pytest.raises(DivergenceError, match=r"planted\.noisy\.default"):
        verify(tmp_path / "without", tmp_path / "other")


class TwiceActivated(Classifier):
    """Another op, and after it a call of the replayed one that the reference has not."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(torch.relu(self.norm(self.first(inputs))) * 1.5)))


def test_a_call_more_than_was_saved_is_a_divergence_and_no_damage(tmp_path):
    record(tmp_path / "run", Classifier, replay=("aten.relu.*",))
    with pytest.raises(DivergenceError, match=r"aten\.mul\.Tensor.* ran only in the\scurrent\srun"):
        verify(tmp_path / "run", tmp_path / "current", TwiceActivated)


@pytest.mark.parametrize("style", rest_slow(sorted({*STYLES} - {"sparse"}), every=8))
def test_every_style_replays_all_that_can_be(style, tmp_path):
    """Everything is saved and put back: shapes, strides, in-place, foreach and fused ops,
    backward and optimizer.
    """
    module, options = STYLES[style]
    plain, _, states = train(module, **options)
    train(module, DeterminismCallback(tmp_path / "run", mode="record", replay=("*",)), **options)
    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    verified, _, verified_states = train(module, callback, **options)
    assert callback.verdict.verdict == "match"
    assert sum(entry["count"] for entry in callback.verdict.coverage.replayed.values()) > 40
    assert sum(entry["differing"] for entry in callback.verdict.coverage.replayed.values()) == 0
    assert has_same_weights(plain, verified)
    assert states == verified_states


# what is wrong is said


def test_a_pattern_that_means_nothing_is_said_at_the_end(tmp_path):
    with pytest.warns(
        CoverageWarning, match=r"replay patterns 'aten\.index_add_\.default', because no op"
    ):
        record(tmp_path / "run", replay=(*ALL, "aten.index_add_.default"), modules=("last",))
    callback, _ = verify(tmp_path / "run", tmp_path / "current")
    assert callback.verdict.coverage.replayed["planted.noisy.default"]["differing"] == 8


def test_the_disk_is_asked_before_anything_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=80 * 2**20))
    says = (
        r"Nothing was recorded: .* may save 17 MiB, .* has 80 MiB free .* pass a smaller "
        r"tensor_budget_mib"
    )
    with pytest.raises(ReplayError, match=says):
        record(tmp_path / "new" / "run", replay=ALL, tensor_budget_mib=17)
    assert not (tmp_path / "new").exists()
    record(tmp_path / "new" / "run", replay=ALL, tensor_budget_mib=16)


def test_what_an_audit_wrote_is_taken_as_it_is_and_other_patterns_than_the_references_are_refused(
    tmp_path,
):
    callback = DeterminismCallback(
        None, mode="audit", current=tmp_path / "audit", on_divergence="warn"
    )
    with pytest.warns(UserWarning, match="3 ops gave different bits"):
        train(Noisy, callback, epochs=1)
    replay = str(tmp_path / "audit" / "replay.yaml")
    record(tmp_path / "run", replay=replay)
    for patterns in (replay, callback.audit_report.replay[::-1]):
        verified, _ = verify(tmp_path / "run", tmp_path / "current", replay=patterns)
        assert verified.verdict.verdict == "match"
        assert len(verified.verdict.coverage.replayed) == 3
    with pytest.raises(SelectionError, match="was recorded with replay="):
        verify(tmp_path / "run", tmp_path / "current", replay=ALL)
