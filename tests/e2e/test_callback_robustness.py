"""The callback when something goes wrong or ends early: nothing is left behind, nothing passes unsaid."""

import copy
import pickle
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Fit, Plain, RaiseAt, RaiseInside, StopError, Validated, assert_nothing_left, record
from judged import require_one_verdict
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode
from trainers import LIGHTNING_ADVICE

from det_callbacks import (
    CoverageWarning,
    DetCallbacksError,
    DeterminismCallback,
    DivergenceError,
    DivergenceWarning,
    NothingComparedError,
    SelectionError,
    TraceError,
)
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


@pytest.mark.parametrize(("place", "mode"), [("backward", "record"), ("in a mode", "record"), ("optimizer", "verify")])
def test_an_exception_inside_a_step(place: str, mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if mode == "verify":
        record(folder, model=RaiseInside)
    callback = DeterminismCallback(folder, mode=mode, current=tmp_path / "current")
    fit = Fit(callback, model=partial(RaiseInside, place))
    with pytest.raises(StopError, match=place):
        fit.run()
    assert_nothing_left(fit, callback)
    assert callback.verdict is None
    stopped = Run.open(folder if mode == "record" else tmp_path / "current")
    assert not stopped.is_complete
    assert stopped.rank(0).steps(0).tolist() == ([0, 1] if mode == "record" else [])
    assert not (tmp_path / "current" / "verdict.json").exists()


# (hook, call that raises, whether it comes before ours, steps that are recorded; none where no run is there)
HOOKS: list[Any] = [
    ("on_fit_start", 1, True, []),
    ("on_train_start", 1, True, []),
    ("on_before_backward", 1, False, []),
    ("on_after_backward", 3, True, [0, 1]),
    ("on_train_batch_start", 3, False, [0, 1]),
    ("on_train_batch_end", 3, True, [0, 1]),
    ("on_train_batch_end", 3, False, [0, 1, 2]),
    ("on_validation_batch_start", 3, True, [0, 1]),
    ("on_train_end", 1, True, [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("hook", "call", "is_before", "steps"), HOOKS)
def test_an_exception_in_another_callback(
    hook: str, call: int, is_before: bool, steps: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the backward pass somebody presses Ctrl-C, which Lightning makes an exit of."""
    is_ctrl_c = hook == "on_after_backward"
    callback = DeterminismCallback(tmp_path / "run", mode="record")
    other = RaiseAt(hook, KeyboardInterrupt() if is_ctrl_c else StopError(hook), call=call)
    fit = Fit(*((other, callback) if is_before else (callback, other)), model=Validated, val_check_interval=2)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit if is_ctrl_c else StopError):
        fit.run()
    signal.signal(signal.SIGINT, before)  # Lightning leaves it ignored
    assert_nothing_left(fit, callback)
    said = capsys.readouterr().out
    if not steps:
        assert not (tmp_path / "run" / "run.json").exists()
        assert (f"before its first new step: {tmp_path}" in said) == (hook != "on_fit_start")
        record(tmp_path / "run")
        return
    run = Run.open(tmp_path / "run")
    assert "process did not end as it should" in str(run.incomplete_reason)
    assert run.rank(0).steps(0).tolist() == steps
    reason = "KeyboardInterrupt" if is_ctrl_c else "StopError"
    assert f"recording stopped by {reason} after {len(steps)} steps" in said


def test_no_step_is_an_error_and_never_a_match(reference: Path, tmp_path: Path) -> None:
    cases: list[tuple[Any, Any]] = [({}, {"max_epochs": 0}), ({"only_steps": [99]}, {})]
    for arguments, options in cases:
        callback = DeterminismCallback(tmp_path / "run", mode="record", **arguments)
        fit = Fit(callback, **options)
        with pytest.raises(NothingComparedError) as caught:
            fit.run()
        assert caught.value.exit_code == 2
        assert_nothing_left(fit, callback)
        assert list((tmp_path / "run").iterdir()) == []
    with pytest.raises(DivergenceError):
        Fit(DeterminismCallback(reference, current=tmp_path / "current"), limit_train_batches=0).run()


class CountingFlops(Plain):
    """Within a mode in each step, which it may leave open."""

    def __init__(self, *, leaves_open: bool = False) -> None:
        super().__init__()
        self.leaves_open = leaves_open

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.flops = FlopCounterMode(display=False)
        self.flops.__enter__()
        loss = super().training_step(batch, batch_idx)
        if not self.leaves_open:
            self.flops.__exit__(None, None, None)
        return loss


def test_modes_below_and_above_change_nothing_and_one_left_open_is_no_match(tmp_path: Path) -> None:
    with FlopCounterMode(display=False) as alone:
        Fit(model=Plain).run()
    callback = DeterminismCallback(record(tmp_path / "run", model=Plain), current=tmp_path / "current")
    with FlopCounterMode(display=False) as below:
        fit = Fit(callback, model=CountingFlops).run()
    assert callback.verdict.verdict == "match"
    assert below.get_total_flops() == alone.get_total_flops() > 0
    assert fit.model.flops.get_total_flops() > 0

    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    fit = Fit(callback, model=partial(CountingFlops, leaves_open=True))
    with (
        pytest.warns(CoverageWarning, match="FlopCounterMode|_FlopCounterMode"),
        pytest.raises(TraceError, match=r"Step 0 could not be traced.*Close that mode") as caught,
    ):
        fit.run()
    assert (caught.value.exit_code, callback.verdict) == (2, None)
    # it is not ours to close; ours lies below it, turned off, until it is
    fit.model.flops.__exit__(None, None, None)
    for left in reversed(_get_current_dispatch_mode_stack()):
        assert left.recorder is None
        left.__exit__(None, None, None)
    assert "training_step" not in vars(fit.trainer.strategy)


def test_a_callback_can_be_copied_and_pickled_at_any_time(reference: Path, tmp_path: Path) -> None:
    def copied(callback: DeterminismCallback) -> list[DeterminismCallback]:
        return [copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))]

    callback = DeterminismCallback(reference, current=tmp_path / "current", steps="common", on_divergence="collect")
    copies = copied(callback)
    assert vars(callback).keys() == vars(copies[0]).keys()
    Fit(LambdaCallback(on_before_zero_grad=lambda *_: copies.extend(copied(callback))), callback).run()
    assert callback.verdict.verdict == "match"
    assert len(copies) == 10
    copies += copied(callback)
    assert copies[-1].verdict == callback.verdict
    for item in (copies[0], copies[9], copies[-1]):
        assert (item.reference, item.steps, item.on_divergence) == (reference, "common", "collect")
    copies[9].current = tmp_path / "again"
    Fit(copies[9]).run()
    assert copies[9].verdict.verdict == "match"
    # a copy audits its replicas too, as one that ``ddp_spawn`` sends to its ranks
    callback = DeterminismCallback(tmp_path, audit_replicas_every_n_steps=5, on_divergence="warn")
    for item in copied(callback):
        assert vars(item._replicas) == vars(callback._replicas)
        assert item._replicas is not callback._replicas


OUTCOMES: list[Any] = [("raise", DivergenceError, 1), ("warn", DivergenceWarning, 4), ("collect", StopError, 3)]


@pytest.mark.parametrize(("on_divergence", "outcome", "num_steps"), OUTCOMES)
def test_what_a_divergence_leads_to(
    on_divergence: Any, outcome: Any, num_steps: int, reference: Path, tmp_path: Path
) -> None:
    """Where it is collected, another callback stops the fit: there is a verdict all the same."""
    callback = DeterminismCallback(reference, current=tmp_path / "current", on_divergence=on_divergence)
    others = [RaiseAt("on_train_batch_end", StopError("stop"))] if outcome is StopError else []
    fit = Fit(callback, *others)
    with torch.no_grad():
        fit.model.first.weight.add_(1)
    words = "stop" if outcome is StopError else r"first\.weight differs"
    with pytest.warns(outcome, match=words) if on_divergence == "warn" else pytest.raises(outcome, match=words):
        fit.run()
    verdict = callback.verdict
    assert verdict.verdict == "diverged"
    require_one_verdict(verdict, reference, tmp_path / "current")
    run = Run.open(tmp_path / "current")
    assert run.is_complete == (outcome is not StopError)
    assert (fit.trainer.global_step, verdict.counts.steps_compared, run.rank(0).num_steps) == (num_steps,) * 3
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
