"""What a divergence leads to, copies of the callback, and runs that are resumed."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Fit, Steady, assert_nothing_left
from trainers import LIGHTNING_ADVICE

from det_callbacks import (
    DetCallbacksError,
    DeterminismCallback,
    DivergenceError,
    DivergenceWarning,
    ReferenceFormatError,
    SelectionError,
    compare_runs,
)
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


@pytest.mark.parametrize("on_divergence", ["raise", "collect", "warn"])
def test_what_a_divergence_leads_to(on_divergence: Any, reference: Path, tmp_path: Path) -> None:
    callback = DeterminismCallback(reference, current=tmp_path / "current", on_divergence=on_divergence)
    fit = Fit(callback)
    with torch.no_grad():
        fit.model.first.weight.add_(1)
    if on_divergence == "warn":
        with pytest.warns(DivergenceWarning, match=r"first\.weight differs"):
            fit.run()
    else:
        with pytest.raises(DivergenceError, match=r"first\.weight differs"):
            fit.run()
    assert fit.trainer.global_step == (1 if on_divergence == "raise" else 4)
    assert callback.verdict is not None
    assert callback.verdict.verdict == "diverged"
    assert callback.verdict.counts.steps_compared == (1 if on_divergence == "raise" else 4)
    assert Run.open(tmp_path / "current").rank(0).num_steps == (1 if on_divergence == "raise" else 4)
    assert_nothing_left(fit, callback)


def test_disabled_does_nothing(tmp_path: Path) -> None:
    callback = DeterminismCallback(tmp_path / "run", mode="disabled")
    Fit(callback, DeterminismCallback(tmp_path / "other", mode="record")).run()
    assert not (tmp_path / "run").exists()
    assert callback.verdict is None


# copies, processes, checkpoints


def test_a_callback_can_be_copied_and_pickled_at_any_time(reference: Path, tmp_path: Path) -> None:
    copies: list[DeterminismCallback] = []

    class CopyInTheMiddle(pl.Callback):
        def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
            for item in trainer.callbacks:
                if isinstance(item, DeterminismCallback):
                    copies.extend([copy.deepcopy(item), pickle.loads(pickle.dumps(item))])

    callback = DeterminismCallback(reference, current=tmp_path / "current", steps="common", on_divergence="collect")
    assert vars(callback).keys() == vars(copy.deepcopy(callback)).keys()
    copies.extend([copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))])
    Fit(CopyInTheMiddle(), callback).run()
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    after = pickle.loads(pickle.dumps(callback))
    assert after.verdict == callback.verdict
    assert len(copies) == 10
    for number, item in enumerate((copies[0], copies[-1], after)):
        assert (item.reference, item.steps, item.on_divergence) == (reference, "common", "collect")
        item.current = tmp_path / f"current-{number}"
        Fit(item).run()
        assert item.verdict is not None
        assert item.verdict.verdict == "match"


def test_a_copy_audits_its_replicas_too(tmp_path: Path) -> None:
    """As one that ``ddp_spawn`` sends to its ranks."""
    callback = DeterminismCallback(tmp_path, audit_replicas_every_n_steps=5, on_divergence="warn")
    for item in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert vars(item._replicas) == vars(callback._replicas)
        assert item._replicas is not callback._replicas


def test_processes_that_cannot_talk_stop(reference: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    callback = DeterminismCallback(reference, current=tmp_path / "current")
    fit = Fit(callback)
    monkeypatch.setattr(pl.Trainer, "world_size", property(lambda self: 2))
    with pytest.raises(DetCallbacksError, match=r"has 2 processes, and torch\.distributed knows of 1") as caught:
        fit.run()
    assert caught.value.exit_code == 2
    assert not (tmp_path / "current").exists()


def test_two_active_callbacks_in_one_trainer_are_refused(tmp_path: Path) -> None:
    callbacks = [DeterminismCallback(tmp_path / name, mode="record") for name in ("a", "b")]
    # Lightning wants to tell callbacks of one class apart only when it saves their state
    with pytest.raises(SelectionError, match="two DeterminismCallbacks"):
        Fit(*callbacks).run()
    assert not any((tmp_path / name).exists() for name in ("a", "b"))


def test_a_resumed_recording_adds_an_attempt_and_equals_one_in_one_piece(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    Fit(DeterminismCallback(whole, mode="record"), model=Steady, max_epochs=2).run()

    run = tmp_path / "run"
    first = Fit(DeterminismCallback(run, mode="record"), model=Steady).run()
    checkpoint = tmp_path / "epoch.ckpt"
    first.trainer.save_checkpoint(checkpoint)
    Fit(DeterminismCallback(run, mode="record"), model=Steady, max_epochs=2).run(ckpt_path=str(checkpoint))

    resumed = Run.open(run)
    assert len(resumed.manifest.attempts) == 2
    assert resumed.is_complete
    assert resumed.rank(0).steps(0).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    verdict = compare_runs(whole, run)
    assert verdict.verdict == "match", verdict.explanation


def test_a_resumed_run_is_verified_from_its_own_first_step_on(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    Fit(DeterminismCallback(whole, mode="record"), model=Steady, max_epochs=2).run()
    first = Fit(model=Steady).run()
    checkpoint = tmp_path / "epoch.ckpt"
    first.trainer.save_checkpoint(checkpoint)

    callback = DeterminismCallback(whole, current=tmp_path / "current")
    Fit(callback, model=Steady, max_epochs=2).run(ckpt_path=str(checkpoint))
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    assert callback.verdict.coverage.steps == (4, 7)

    weights = torch.load(checkpoint, weights_only=True)
    weights["state_dict"]["first.weight"][0, 0] += 1
    torch.save(weights, checkpoint)
    callback = DeterminismCallback(whole, current=tmp_path / "other")
    with pytest.raises(DivergenceError, match=r"first\.weight"):
        Fit(callback, model=Steady, max_epochs=2).run(ckpt_path=str(checkpoint))
    assert callback.verdict is not None
    found = callback.verdict.first_divergence
    assert found is not None
    assert (found.step, found.name, found.is_origin) == (4, "first.weight", False)


def test_a_resumed_recording_with_another_selection_is_refused(tmp_path: Path) -> None:
    first = Fit(DeterminismCallback(tmp_path / "run", mode="record"), model=Steady).run()
    first.trainer.save_checkpoint(tmp_path / "epoch.ckpt")
    callback = DeterminismCallback(tmp_path / "run", mode="record", level="state")
    with pytest.raises(ReferenceFormatError, match="selection"):
        Fit(callback, model=Steady, max_epochs=2).run(ckpt_path=str(tmp_path / "epoch.ckpt"))
    assert Run.open(tmp_path / "run").is_complete
