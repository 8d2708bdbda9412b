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
)
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


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
    # a copy audits its replicas too, as one that ``ddp_spawn`` sends to its ranks
    callback = DeterminismCallback(tmp_path, audit_replicas_every_n_steps=5, on_divergence="warn")
    for item in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert vars(item._replicas) == vars(callback._replicas)
        assert item._replicas is not callback._replicas


@pytest.mark.parametrize(("on_divergence", "num_steps"), [("raise", 1), ("collect", 4), ("warn", 4)])
def test_what_a_divergence_leads_to(on_divergence: Any, num_steps: int, reference: Path, tmp_path: Path) -> None:
    callback = DeterminismCallback(reference, current=tmp_path / "current", on_divergence=on_divergence)
    fit = Fit(callback)
    with torch.no_grad():
        fit.model.first.weight.add_(1)
    expects: Any = pytest.warns if on_divergence == "warn" else pytest.raises
    with expects(DivergenceWarning if on_divergence == "warn" else DivergenceError, match=r"first\.weight differs"):
        fit.run()
    assert callback.verdict is not None
    assert callback.verdict.verdict == "diverged"
    counts = (fit.trainer.global_step, callback.verdict.counts.steps_compared)
    assert (*counts, Run.open(tmp_path / "current").rank(0).num_steps) == (num_steps,) * 3
    assert_nothing_left(fit, callback)


def test_a_callback_that_is_disabled_one_too_many_or_without_processes(
    reference: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disabled = DeterminismCallback(tmp_path / "disabled", mode="disabled")
    Fit(disabled, DeterminismCallback(tmp_path / "run", mode="record", level="state")).run()
    assert disabled.verdict is None
    with pytest.raises(SelectionError, match="two DeterminismCallbacks"):
        Fit(*(DeterminismCallback(tmp_path / name, mode="record") for name in ("a", "b"))).run()
    fit = Fit(DeterminismCallback(reference, current=tmp_path / "current"))
    monkeypatch.setattr(pl.Trainer, "world_size", property(lambda self: 2))
    with pytest.raises(DetCallbacksError, match=r"has 2 processes, and torch\.distributed knows of 1") as caught:
        fit.run()
    assert caught.value.exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_resumed_run_is_verified_from_its_own_first_step_on(tmp_path: Path) -> None:
    whole, checkpoint = tmp_path / "whole", tmp_path / "epoch.ckpt"
    Fit(DeterminismCallback(whole, mode="record"), model=Steady, max_epochs=2).run()
    first = Fit(DeterminismCallback(tmp_path / "run", mode="record"), model=Steady).run()
    first.trainer.save_checkpoint(checkpoint)
    callback = DeterminismCallback(whole, current=tmp_path / "current")
    Fit(callback, model=Steady, max_epochs=2).run(ckpt_path=str(checkpoint))
    assert callback.verdict is not None
    assert (callback.verdict.verdict, callback.verdict.coverage.steps) == ("match", (4, 7))
    fit = Fit(DeterminismCallback(tmp_path / "run", mode="record", level="state"), model=Steady, max_epochs=2)
    with pytest.raises(ReferenceFormatError, match="selection"):
        fit.run(ckpt_path=str(checkpoint))
    assert Run.open(tmp_path / "run").is_complete
    checkpoint.with_name("epoch.ckpt.digests.json").unlink()
    weights = torch.load(checkpoint, weights_only=True)
    weights["state_dict"]["first.weight"][0, 0] += 1
    torch.save(weights, checkpoint)
    fit = Fit(DeterminismCallback(whole, current=tmp_path / "other"), model=Steady, max_epochs=2)
    with pytest.raises(DivergenceError, match=r"first\.weight") as caught:
        fit.run(ckpt_path=str(checkpoint))
    assert caught.value.verdict is not None
    found = caught.value.verdict.first_divergence
    assert found is not None
    assert (found.step, found.name, found.is_origin) == (4, "first.weight", False)
