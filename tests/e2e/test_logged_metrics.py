"""What a module logs: recorded at the end of validations, epochs and tests, and compared by name, bit for bit."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import StopError
from logging_fits import (
    Also,
    Changed,
    Draws,
    LateChanged,
    Logged,
    Rounds,
    Session,
    Silent,
    Timed,
    assert_diff_agrees,
    loader,
    record,
    verdict_of,
)
from processes import Ended, run_ranks
from styles import Samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, compare_runs
from det_callbacks.callback.fits import take_unfinished
from det_callbacks.errors import (
    DivergenceError,
    DivergenceWarning,
    NothingComparedError,
    ReferenceFormatError,
    ReferenceNotFoundError,
    SelectionError,
)
from det_callbacks.runs.metrics import read_metrics
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Verdict

pytestmark = [LIGHTNING_ADVICE]


def test_metrics_of_validations_and_epochs_are_recorded_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session("record", tmp_path / "run").fit()
    readings = [*read_metrics(Run.open(tmp_path / "run"), 0).by_key.values()]
    assert [(reading.where, reading.step, reading.epoch) for reading in readings] == [
        ("validation", 2, 0), ("epoch", 2, 0), ("validation", 5, 1), ("epoch", 5, 1),
    ]  # fmt: skip
    assert {"val/loss", "val/largest"} <= set(readings[0].metrics)
    assert {"train/loss", "train/loss_epoch"} <= set(readings[1].metrics)
    computed = session.model.trainer.callback_metrics
    for name in ("val/loss", "train/loss_epoch"):
        shown = {**readings[2].metrics, **readings[3].metrics}[name].value
        assert shown == repr(computed[name].item())
    again = Session("verify", tmp_path / "run").fit()
    verdict = verdict_of(again)
    num_metrics = sum(len(reading.metrics) for reading in readings)
    assert (verdict.verdict, verdict.coverage.metrics) == ("match", num_metrics)
    assert f"{num_metrics} metrics, against" in capsys.readouterr().out
    record(tmp_path / "other")
    compared = compare_runs(tmp_path / "run", tmp_path / "other")
    assert (compared.verdict, compared.coverage.metrics) == ("match", num_metrics)


@pytest.mark.parametrize(
    ("changed", "cause", "name", "said"),
    [
        ({"validation": lambda: loader(Changed)}, "data_content", "val/loss", "first batch of loader 0: batch[0]"),
        ({"validation": lambda: loader(LateChanged)}, "unknown", "val/loss", "what is known of the data"),
        ({"validation": lambda: loader(num_samples=8)}, "data_content", "val/loss", "samples of loader 0"),
        ({"model": Draws}, "structure", "val/drawn", "only in the current run"),
        ({"model": Rounds}, "unknown", "val/loss", '"!metric/val/loss"'),
    ],
    ids=["first batch", "later batch", "fewer", "one more", "computed otherwise"],
)  # fmt: skip
def test_a_metric_that_differs_alone(tmp_path: Path, changed: dict[str, Any], cause: str, name: str, said: str) -> None:
    reference = record(tmp_path / "run")
    make = changed.pop("validation", loader)
    session = Session("verify", reference, current=tmp_path / "current", **changed)
    with pytest.raises(DivergenceError) as caught:
        session.fit(make())
    verdict = verdict_of(session)
    assert caught.value.verdict == verdict
    first = verdict.first_divergence
    assert (verdict.verdict, verdict.cause) == ("diverged", cause)
    assert (first.phase, first.name, first.rank, first.step, first.is_origin) == ("metric", name, 0, 2, None)
    assert f"etric {name} in the validation after step 2" in verdict.explanation
    assert said in str(caught.value)
    assert verdict.counts.steps_compared == 3  # stopped at the end of the validation
    assert_diff_agrees(reference, verdict)
    other = Session("record", tmp_path / "other", **changed).fit(make())
    compared = compare_runs(reference, other.callback.reference)
    assert (compared.verdict, compared.cause, compared.first_divergence) == ("diverged", cause, first)


@pytest.mark.parametrize("selection", [{"every_n_steps": 2}, {"every_n_steps": 5}, {"only_steps": [3]}], ids=str)
def test_metrics_are_compared_whatever_steps_are_recorded(tmp_path: Path, selection: dict[str, Any]) -> None:
    reference = record(tmp_path / "run", **selection)
    assert verdict_of(Session("verify", reference).fit()).verdict == "match"
    with pytest.raises(DivergenceError, match="Metric val/loss in the validation after step 2 differs"):
        Session("verify", reference).fit(loader(Changed))


@pytest.mark.parametrize("on_divergence", ["collect", "warn"])
def test_metrics_go_on_being_compared_where_nothing_stops(tmp_path: Path, on_divergence: str) -> None:
    reference = record(tmp_path / "run", model=Draws)
    session = Session("verify", reference, current=tmp_path / "current", on_divergence=on_divergence, model=Draws)

    class Draw(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.fit_loop.epoch_loop.total_batch_idx == 5:
                torch.rand(1)

    with pytest.raises(DivergenceError) if on_divergence == "collect" else pytest.warns(DivergenceWarning):
        session.fit(None, Draw(), max_epochs=2)
    verdict = verdict_of(session)
    assert (verdict.verdict, verdict.cause, verdict.first_divergence.name) == ("diverged", "rng", "val/drawn")
    assert verdict.counts.steps_compared == 6
    assert any("generator torch.cpu" in line for line in verdict.evidence)
    assert_diff_agrees(reference, verdict)


def test_a_metric_comes_after_the_steps_of_its_epoch(tmp_path: Path) -> None:
    reference = record(tmp_path / "run")
    with pytest.warns(DivergenceWarning):
        other = Session("verify", reference, seed=1, on_divergence="warn", current=tmp_path / "current").fit()
    verdict = verdict_of(other)
    assert (verdict.cause, verdict.first_divergence.phase) == ("initial_weights", "state")
    assert_diff_agrees(reference, verdict)


def test_metrics_of_which_one_run_has_more(tmp_path: Path) -> None:
    reference, other = record(tmp_path / "run"), record(tmp_path / "other", model=Also)
    session = Session("verify", reference, model=Also, current=tmp_path / "more")
    with pytest.raises(DivergenceError, match="Metric also of epoch 1 is only in the current run"):
        session.fit()
    assert verdict_of(session).first_divergence.kind == "extra"
    assert_diff_agrees(reference, verdict_of(session))
    session = Session("verify", other, current=tmp_path / "less")
    with pytest.raises(DivergenceError, match="Metric also of epoch 1 is only in the reference"):
        session.fit()
    assert verdict_of(session).first_divergence.kind == "missing"
    assert_diff_agrees(other, verdict_of(session))
    session = Session("verify", reference, current=tmp_path / "seldom")
    with pytest.raises(DivergenceError, match="in the validation after step 2 is only in the reference, and 1 more"):
        session.fit(check_val_every_n_epoch=2)
    assert_diff_agrees(reference, verdict_of(session))
    common = Session("verify", reference, steps="common")
    assert verdict_of(common.fit(check_val_every_n_epoch=2)).verdict == "match"


def test_a_metric_is_left_out_by_a_pattern(tmp_path: Path) -> None:
    reference = record(tmp_path / "run", model=Timed)
    with pytest.raises(DivergenceError, match="Metric epoch_time of epoch 0 differs"):
        Session("verify", reference, model=Timed).fit()
    modules = ["*", "!metric/*_time"]
    reference = record(tmp_path / "left-out", model=Timed, modules=modules)
    assert verdict_of(Session("verify", reference, model=Timed).fit()).verdict == "match"
    assert verdict_of(Session("verify", reference, model=Timed, modules=modules).fit()).verdict == "match"
    names = [name for reading in read_metrics(Run.open(reference), 0).by_key.values() for name in reading.metrics]
    assert "val/loss" in names
    assert "epoch_time" not in names
    for wrong in ("metric/val", "!net.*"):
        with pytest.raises(SelectionError, match=r'a metric is left out by "!metric/NAME"'):
            Session("record", tmp_path / "wrong", modules=["*", wrong])
    with pytest.raises(SelectionError, match="at least one pattern"):
        Session("record", tmp_path / "wrong", modules=["!metric/loss"])


CALLS: dict[str, Callable[..., Session]] = {"trainer.validate": Session.validate, "trainer.test": Session.test}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_alone_is_recorded_and_verified(tmp_path: Path, call: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = CALLS[call]
    run(Session("record", tmp_path / "run"))
    assert f"recorded 2 metrics of {call}, in {tmp_path / 'run'}" in capsys.readouterr().out
    session = run(Session("verify", tmp_path / "run"))
    verdict = verdict_of(session)
    assert (verdict.verdict, verdict.coverage.metrics) == ("match", 2)
    assert verdict.explanation == "All 2 metrics agree, bit for bit."
    assert f"match: verified 2 metrics, against {tmp_path / 'run'}" in capsys.readouterr().out
    changed = Session("verify", tmp_path / "run", current=tmp_path / "current")
    with pytest.raises(DivergenceError, match=rf" in {call} differs"):
        run(changed, loader(Changed))
    assert (verdict_of(changed).cause, verdict_of(changed).first_divergence.phase) == ("data_content", "metric")
    assert_diff_agrees(tmp_path / "run", verdict_of(changed))
    run(Session("record", tmp_path / "other"))
    assert compare_runs(tmp_path / "run", tmp_path / "other").verdict == "match"


def test_nothing_logged_alone_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NothingComparedError, match=r"Nothing of trainer.test was recorded.*no metric was logged"):
        Session("record", tmp_path / "none", model=Silent).test()
    assert not Run.open(tmp_path / "none").is_complete
    Session("record", tmp_path / "run").test()
    with pytest.raises(NothingComparedError, match="Nothing was compared"):
        Session("verify", tmp_path / "run", steps="common", model=Silent).test()
    with pytest.raises(NothingComparedError, match=r"Nothing of trainer.test was recorded in, or compared"):
        Session("verify", tmp_path / "run").test(limit_test_batches=0)
    with pytest.raises(ReferenceNotFoundError):
        Session("verify", tmp_path / "nowhere").test()
    Session("record", tmp_path / "fit", model=Silent).fit().test()
    assert "recorded nothing of trainer.test" in capsys.readouterr().out.splitlines()[-1]
    session = Session("verify", tmp_path / "fit", model=Silent).fit().test()
    assert (verdict_of(session).verdict, verdict_of(session).coverage.metrics) == ("match", 0)


def test_the_parts_of_a_session_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(session: Session, test: Any = None) -> Session:
        return session.validate().fit().test().test(test)

    run(Session("record", tmp_path / "run"))
    assert Run.open(tmp_path / "run").is_complete
    capsys.readouterr()
    session = Session("verify", tmp_path / "run").validate()
    assert "part 1 (trainer.validate) of 4 agrees" in capsys.readouterr().out
    assert session.callback.verdict is None
    session.fit().test().test()
    verdict = verdict_of(session)
    assert (verdict.verdict, verdict.counts.steps_compared) == ("match", 6)
    run(Session("record", tmp_path / "other"))
    compared = compare_runs(tmp_path / "run", tmp_path / "other")
    assert (compared.verdict, compared.coverage.metrics) == ("match", verdict.coverage.metrics)
    with pytest.raises(DivergenceError, match=r"in trainer.test \(call 2\) differs"):
        run(Session("verify", tmp_path / "run", on_divergence="collect"), loader(Changed))


def test_a_test_that_never_comes_is_missing(tmp_path: Path) -> None:
    Session("record", tmp_path / "run").fit().test()
    Session("verify", tmp_path / "run", current=tmp_path / "current").fit()
    error = take_unfinished()
    assert isinstance(error, DivergenceError)
    assert "holds 2 parts (fit, trainer.test), and this process ended after 1" in str(error)
    assert "Metric test/loss in trainer.test is only in the reference, and 1 more metric" in str(error)
    assert_diff_agrees(tmp_path / "run", error.verdict)
    assert verdict_of(Session("verify", tmp_path / "run", steps="common").fit()).verdict == "match"


class Broken(pl.Callback):
    def on_test_batch_end(self, *_: Any) -> None:
        raise OSError("the disk is gone")


def test_a_test_that_breaks_off_is_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = Session("record", tmp_path / "run").fit()
    with pytest.raises(OSError, match="the disk is gone"):
        session.trainer(Broken()).test(session.model, loader(), verbose=False)
    assert "trainer.test was stopped by OSError" in capsys.readouterr().out
    assert verdict_of(Session("verify", tmp_path / "run").fit()).verdict == "match"
    alone = Session("record", tmp_path / "alone")
    with pytest.raises(OSError, match="the disk is gone"):
        alone.trainer(Broken()).test(alone.model, loader(), verbose=False)
    with pytest.raises(ReferenceFormatError, match="incomplete"):
        Session("verify", tmp_path / "alone").test()


class Saves(pl.Callback):
    """Saves after a validation, at the end of an epoch, or in the middle of one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"batch-{trainer.global_step - 1}.ckpt")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"epoch-{trainer.current_epoch}.ckpt")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"validation-{trainer.current_epoch}.ckpt")


@pytest.mark.parametrize("saved", ["epoch-0", "validation-0", "batch-3"])
def test_metrics_of_a_resumed_run(tmp_path: Path, saved: str) -> None:
    whole = record(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeterminismCallback, "_read_epoch", _killed_after_two(DeterminismCallback._read_epoch))
        first = Session("record", tmp_path / "resumed")
        with pytest.raises(StopError):
            first.fit(None, Saves(tmp_path))
    options = {"ckpt_path": tmp_path / f"{saved}.ckpt", "weights_only": False}
    Session("record", tmp_path / "resumed").fit(**options)
    for reference, current in itertools.permutations([whole, tmp_path / "resumed"]):
        verdict = compare_runs(reference, current)
        assert verdict.verdict == "match", verdict.explanation
        assert verdict.coverage.metrics >= 4
    assert verdict_of(Session("verify", tmp_path / "resumed").fit()).verdict == "match"
    verdict = verdict_of(Session("verify", whole).fit(**options))
    assert (verdict.verdict, verdict.coverage.metrics > 0) == ("match", True)
    session = Session("verify", whole, current=tmp_path / "current")
    with pytest.raises(DivergenceError, match="Metric val/loss in the validation after step 5 differs"):
        session.fit(loader(Changed), **options)
    assert_diff_agrees(whole, verdict_of(session))


def _killed_after_two(read: Any) -> Any:
    calls = itertools.count()

    def read_or_die(self: Any, trainer: pl.Trainer) -> Any:
        if next(calls) == 2:  # before the fit, after epoch 0, after epoch 1
            raise StopError
        return read(self, trainer)

    return read_or_die


def test_a_resumed_run_keeps_its_last_test(tmp_path: Path) -> None:
    first = Session("record", tmp_path / "run").fit(None, Saves(tmp_path), max_epochs=2)
    first.test(loader(Changed))
    options = {"ckpt_path": tmp_path / "epoch-1.ckpt", "weights_only": False, "max_epochs": 3}
    second = Session("record", tmp_path / "run").fit(**options)
    assert not [key for key in read_metrics(Run.open(tmp_path / "run"), 0).by_key if key[0] == "trainer.test"]
    second.test()
    whole = Session("verify", tmp_path / "run").fit(max_epochs=3).test()
    assert (verdict_of(whole).verdict, verdict_of(whole).counts.steps_compared) == ("match", 9)


def test_damaged_metrics_are_an_error(tmp_path: Path) -> None:
    reference, other = record(tmp_path / "run"), record(tmp_path / "other")
    path = reference / "rank-00000" / "attempt-000.metrics.jsonl"
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    for damaged in (
        content[:-1].replace(b"0", b"1", 1) + b"\n",
        b"{}\n" + content,
        content.replace(b'"step":2', b'"step":4', 1),
    ):
        path.write_bytes(damaged)
        for compare in (lambda: compare_runs(reference, other), lambda: Session("verify", reference).fit()):
            with pytest.raises(ReferenceFormatError, match=r"attempt-000\.metrics\.jsonl is damaged: line 1"):
                compare()
    path.write_bytes(content[: -len(lines[-1]) // 2])  # torn: what was written whole counts
    assert compare_runs(reference, other).first_divergence.kind == "extra"
    path.unlink()
    assert compare_runs(reference, other).first_divergence.kind == "extra"


class OnRanks(Logged):
    """Reduces its validation loss over the ranks; is given another batch on rank 1 where a test asks for it."""

    is_faulty = False

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        inputs, labels = batch
        if self.is_faulty and self.global_rank == 1 and self.global_step == 4:
            inputs = inputs + 1
        self.log("val/loss", cross_entropy(self(inputs), labels), sync_dist=True)
        self.log("val/own", cross_entropy(self(inputs), labels), rank_zero_only=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        inputs, labels = batch
        self.log("test/loss", cross_entropy(self(inputs), labels), sync_dist=True)


class FaultyOnRank1(OnRanks):
    is_faulty = True


@pytest.mark.ddp
def test_ranks_stop_together_where_a_metric_differs(tmp_path: Path) -> None:
    def run(mode: str, model: type[OnRanks], folder: str) -> list[Ended]:
        def body(rank: int) -> None:
            pl.seed_everything(0, verbose=False)
            level = {"level": "state"} if mode == "record" else {}
            callback = DeterminismCallback(tmp_path / "run", mode=mode, current=tmp_path / folder, **level)
            options = {"devices": 2, "strategy": "ddp", "default_root_dir": tmp_path, "num_sanity_val_steps": 1}
            module = model()
            data = [DataLoader(Samples(), 4) for _ in range(3)]
            quiet_trainer(callback, max_epochs=2, val_check_interval=2, **options).fit(module, *data[:2])
            quiet_trainer(callback, **options).test(module, data[2], verbose=False)

        return run_ranks(body, tmp_path / f"output-{folder}")

    ended = run("record", OnRanks, "record")
    assert [one.exit_code for one in ended] == [0, 0], ended
    assert "recorded 1 metric of trainer.test" in ended[0].output
    assert not (tmp_path / "run" / "rank-00001" / "attempt-000.metrics.jsonl").exists()
    ended = run("verify", OnRanks, "equal")
    assert [one.exit_code for one in ended] == [0, 0], ended
    assert "match: verified 16 steps of 2 ranks" in ended[0].output
    ended = run("verify", FaultyOnRank1, "current")
    assert [one.exit_code for one in ended] == [1, 1], ended
    for one in ended:
        assert "etric val/loss in the validation after step 3 differs" in one.output
    verdict = Verdict.from_dict(json.loads((tmp_path / "current" / "verdict.json").read_text()))
    assert (verdict.counts.steps_compared, verdict.first_divergence.rank, verdict.cause) == (8, 0, "unknown")
    assert_diff_agrees(tmp_path / "run", verdict)


@pytest.mark.ddp
def test_a_test_alone_on_two_ranks(tmp_path: Path) -> None:
    def run(mode: str) -> list[Ended]:
        def body(rank: int) -> None:
            pl.seed_everything(0, verbose=False)
            callback = DeterminismCallback(tmp_path / "run", mode=mode, current=tmp_path / mode)
            options = {"devices": 2, "strategy": "ddp", "default_root_dir": tmp_path}
            quiet_trainer(callback, **options).test(OnRanks(), DataLoader(Samples(), 4), verbose=False)

        return run_ranks(body, tmp_path / f"output-{mode}")

    for mode, line in (
        ("record", "recorded 1 metric of trainer.test"),
        ("verify", "match: verified 1 metric, against"),
    ):
        ended = run(mode)
        assert [one.exit_code for one in ended] == [0, 0], ended
        assert line in ended[0].output


def test_nothing_of_the_training_changes(tmp_path: Path) -> None:
    def bits(*callbacks: pl.Callback) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Draws()
        trainer = quiet_trainer(*callbacks, max_epochs=2, num_sanity_val_steps=1, val_check_interval=2)
        trainer.fit(model, loader(), DataLoader(Samples(), 4, shuffle=True))
        metrics = [value for _, value in sorted(trainer.callback_metrics.items())]
        return [*model.state_dict().values(), *metrics, torch.get_rng_state()]

    callback = DeterminismCallback(tmp_path / "run", mode="record", level="state")
    for alone, watched in zip(bits(), bits(callback), strict=True):
        assert torch.equal(alone, watched)
