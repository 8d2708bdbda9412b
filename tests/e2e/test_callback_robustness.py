"""The callback when something goes wrong or ends early: nothing is left behind, nothing passes unsaid."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Fit, Plain, RaiseAt, StopError, assert_nothing_left, raising_inside, record
from judged import require_one_verdict
from styles import Classifier, Skipping, Validated
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode
from trainers import LIGHTNING_ADVICE

from det_callbacks import (
    CoverageWarning,
    DeterminismCallback,
    DivergenceError,
    NothingComparedError,
    TraceError,
)
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


# exceptions

HOOKS_BEFORE_AND_AFTER = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)


@pytest.mark.parametrize("place", ["training_step", "backward", "optimizer", "in a mode"])
@pytest.mark.parametrize("mode", ["record", "verify"])
def test_an_exception_inside_a_step(place: str, mode: str, tmp_path: Path) -> None:
    make = raising_inside(place)
    folder = tmp_path / "run"
    if mode == "verify":
        record(folder, model=raising_inside("nowhere"))
    callback = DeterminismCallback(folder, mode=mode, current=tmp_path / "current")
    fit = Fit(callback, model=make)
    with pytest.raises(StopError, match=place):
        fit.run()
    assert_nothing_left(fit, callback)
    assert callback.verdict is None
    stopped = Run.open(folder if mode == "record" else tmp_path / "current")
    assert not stopped.is_complete
    assert stopped.rank(0).steps(0).tolist() == ([0, 1] if mode == "record" else [])
    assert not (tmp_path / "current" / "verdict.json").exists()


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("hook", HOOKS_BEFORE_AND_AFTER)
def test_an_exception_in_a_callback_before_or_after_ours(hook: str, is_before: bool, tmp_path: Path) -> None:
    callback = DeterminismCallback(tmp_path / "run", mode="record")
    other = RaiseAt(hook, StopError(hook))
    fit = Fit(*((other, callback) if is_before else (callback, other)))
    with pytest.raises(StopError, match=hook):
        fit.run()
    assert_nothing_left(fit, callback)
    run = Run.open(tmp_path / "run")
    assert not run.is_complete
    has_third = hook == "on_train_batch_end" and not is_before
    assert run.rank(0).steps(0).tolist() == ([0, 1, 2] if has_third else [0, 1])
    assert "process did not end as it should" in str(run.incomplete_reason)


@pytest.mark.parametrize("hook", ["on_validation_batch_start", "on_validation_end", "on_sanity_check_start"])
def test_an_exception_in_a_validation(hook: str, tmp_path: Path) -> None:
    callback = DeterminismCallback(tmp_path / "run", mode="record")
    call = 1 if hook == "on_sanity_check_start" else 3
    fit = Fit(RaiseAt(hook, StopError(hook), call=call), callback, model=Validated, val_check_interval=2, max_epochs=2)
    with pytest.raises(StopError, match=hook):
        fit.run()
    assert_nothing_left(fit, callback)
    assert not Run.open(tmp_path / "run").is_complete


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start", "on_train_end"])
def test_an_exception_at_the_ends_of_a_fit(hook: str, tmp_path: Path) -> None:
    callback = DeterminismCallback(tmp_path / "run", mode="record")
    fit = Fit(RaiseAt(hook, StopError(hook), call=1), callback)
    with pytest.raises(StopError, match=hook):
        fit.run()
    assert_nothing_left(fit, callback)
    if hook in ("setup", "on_fit_start"):
        assert not (tmp_path / "run").exists()
    else:
        assert not Run.open(tmp_path / "run").is_complete


@pytest.mark.parametrize("hook", ["on_after_backward", "on_train_batch_end"])
def test_ctrl_c(hook: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = DeterminismCallback(tmp_path / "run", mode="record")
    fit = Fit(RaiseAt(hook, KeyboardInterrupt()), callback)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            fit.run()
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning leaves it ignored
    assert_nothing_left(fit, callback)
    run = Run.open(tmp_path / "run")
    assert not run.is_complete
    assert run.rank(0).num_steps == 2
    assert "recording stopped by KeyboardInterrupt after 2 steps" in capsys.readouterr().out


def test_a_verification_that_found_something_and_was_stopped_has_a_verdict(reference: Path, tmp_path: Path) -> None:
    callback = DeterminismCallback(reference, current=tmp_path / "current", on_divergence="collect")
    fit = Fit(callback, RaiseAt("on_train_batch_end", StopError()))
    with torch.no_grad():
        fit.model.first.weight.add_(1)
    with pytest.raises(StopError):
        fit.run()
    assert callback.verdict is not None
    assert callback.verdict.verdict == "diverged"
    require_one_verdict(callback.verdict, reference, tmp_path / "current")
    assert not Run.open(tmp_path / "current").is_complete


@pytest.mark.parametrize("options", [{"limit_train_batches": 0}, {"max_epochs": 0}])
@pytest.mark.parametrize("mode", ["record", "verify"])
def test_a_fit_without_steps_is_an_error(mode: Any, options: Any, reference: Path, tmp_path: Path) -> None:
    folder = reference if mode == "verify" else tmp_path / "run"
    callback = DeterminismCallback(folder, mode=mode, current=tmp_path / "current")
    fit = Fit(callback, **options)
    with pytest.raises(DivergenceError if mode == "verify" else NothingComparedError) as caught:
        fit.run()
    assert caught.value.exit_code == (1 if mode == "verify" else 2)
    assert_nothing_left(fit, callback)
    if mode == "record":
        assert not Run.open(folder).is_complete


# other modes, other loops


def test_a_module_that_ends_its_epoch_by_minus_one(tmp_path: Path) -> None:
    callback = DeterminismCallback(tmp_path / "run", mode="record")
    fit = Fit(callback, model=Skipping, max_epochs=2).run()
    assert_nothing_left(fit, callback)
    assert Run.open(tmp_path / "run").rank(0).num_steps == 4


def test_a_mode_below_the_whole_fit_counts_what_it_would_without_us(reference: Path, tmp_path: Path) -> None:
    with FlopCounterMode(display=False) as alone:
        Fit().run()
    callback = DeterminismCallback(reference, current=tmp_path / "current")
    with FlopCounterMode(display=False) as below:
        Fit(callback).run()
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    assert below.get_total_flops() == alone.get_total_flops() > 0


class CountingFlops(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with FlopCounterMode(display=False) as self.flops:
            return super().training_step(batch, batch_idx)


def test_a_mode_above_within_the_step_changes_nothing(tmp_path: Path) -> None:
    callback = DeterminismCallback(record(tmp_path / "run", model=Plain), current=tmp_path / "current")
    fit = Fit(callback, model=CountingFlops).run()
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    assert fit.model.flops.get_total_flops() > 0


class LeavingAModeOpen(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.flops = FlopCounterMode(display=False)
            self.flops.__enter__()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("mode", ["record", "verify"])
def test_a_mode_left_open_above_is_an_error_and_never_a_match(mode: Any, reference: Path, tmp_path: Path) -> None:
    folder = reference if mode == "verify" else tmp_path / "run"
    callback = DeterminismCallback(folder, mode=mode, current=tmp_path / "current")
    fit = Fit(callback, model=LeavingAModeOpen)
    with (
        pytest.warns(CoverageWarning, match="FlopCounterMode|_FlopCounterMode"),
        pytest.raises(TraceError, match="Step 1 could not be traced") as caught,
    ):
        fit.run()
    assert caught.value.exit_code == 2
    assert "Close that mode" in str(caught.value)
    assert callback.verdict is None
    # it is not ours to close; ours lies below it, turned off, until it is
    fit.model.flops.__exit__(None, None, None)
    for left in reversed(_get_current_dispatch_mode_stack()):
        assert left.recorder is None
        left.__exit__(None, None, None)
    assert "training_step" not in vars(fit.trainer.strategy)
    if mode == "record":
        assert Run.open(folder).rank(0).steps(0).tolist() == [0]
        assert not Run.open(folder).is_complete
