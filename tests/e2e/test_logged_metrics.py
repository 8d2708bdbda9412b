"""What a module logs: recorded at the end of validations, epochs and tests,
and compared by name, bit for bit.
"""

import itertools
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Classifier, RaiseAt, Samples, StopError
from judged import require_one_verdict
from lightning.pytorch.callbacks import LambdaCallback
from processes import run_ranks, verdict_in
from resumes import SaveAfter
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset
from trainers import LIGHTNING_ADVICE, quiet_trainer
from versions import LIGHTNING

from det_callbacks import DeterminismCallback, cli, compare_runs
from det_callbacks.errors import (
    DivergenceError,
    NothingComparedError,
    ReferenceFormatError,
    SelectionError,
)
from det_callbacks.runs.metrics import read_metrics
from det_callbacks.runs.store import Run
from det_callbacks.training.recording import take_unfinished
from det_callbacks.verdict import Verdict

pytestmark = LIGHTNING_ADVICE
SLOW = pytest.mark.slow


class Logged(Classifier):
    """Logs in training, validation and test, and what a test asks for besides."""

    def __init__(self, also: str = "") -> None:
        super().__init__()
        self.also = also

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.also == "another step" and self.global_step == 1:
            loss = loss * 1.5
        if self.also != "nothing":
            self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def _look(self, name: str, batch: Any) -> None:
        if self.also == "nothing":
            return
        inputs, labels = batch
        if self.also == "another batch" and (self.global_rank, self.global_step) == (1, 4):
            inputs = inputs + 1
        predicted = self(inputs)
        loss = cross_entropy(predicted, labels) + (1e-3 if self.also == "another loss" else 0)
        self.log_dict({f"{name}/loss": loss, f"{name}/largest": predicted.max()}, sync_dist=True)
        if self.trainer.world_size > 1:
            self.log(f"{name}/own", loss, rank_zero_only=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._look("val", batch)
        if self.also == "a draw":
            self.log("val/drawn", torch.rand(()))

    def test_step(self, batch, batch_idx):
        self._look("test", batch)

    def on_train_epoch_end(self) -> None:
        if self.also == "a clock":
            self.log("epoch_time", time.perf_counter())
        elif self.also == "late" and self.current_epoch:
            self.log("late", 1.0)


def loader(num_samples: int = 12, *, other: int | None = None) -> DataLoader[Any]:
    samples = Samples()
    if other is not None:
        samples.tensors[0][other] += 1
    # draws from no other
    return DataLoader(Subset(samples, range(num_samples)), 4, generator=torch.Generator())


class Session:
    """One process's use of one callback: fits, tests and so on, with one model."""

    def __init__(self, mode: str, reference: Path, *, also: str = "", **arguments: Any) -> None:
        pl.seed_everything(0, verbose=False)
        arguments = {"level": "state" if mode == "record" else None, **arguments}
        self.callback = DeterminismCallback(reference, mode=mode, **arguments)
        self.model, self.root = Logged(also), reference.parent

    def trainer(self, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
        given = {
            "max_epochs": 2,
            "num_sanity_val_steps": 1,
            "default_root_dir": self.root,
            **options,
        }
        return quiet_trainer(self.callback, *callbacks, **given)

    def fit(
        self, *callbacks: pl.Callback, data: Any = None, resume: Any = None, **options: Any
    ) -> "Session":
        trainer = self.trainer(*callbacks, **options)
        # Lightning 2.6 asks for it; older versions have no other way to load
        how_to_load = {"weights_only": False} if resume and LIGHTNING >= (2, 6) else {}
        trainer.fit(self.model, loader(), data or loader(), ckpt_path=resume, **how_to_load)
        return self

    def test(self, data: Any = None, **options: Any) -> "Session":
        self.trainer(**options).test(self.model, data or loader(), verbose=False)
        return self

    @property
    def verdict(self) -> Verdict:
        return self.callback.verdict

    def validate(self) -> "Session":
        self.trainer().validate(self.model, loader(), verbose=False)
        return self


def record(folder: Path, **options: Any) -> Path:
    Session("record", folder, **options).fit()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Path:
    return record(tmp_path_factory.mktemp("whole") / "run")


def diverges(session: Session, words: str, *callbacks: pl.Callback, **options: Any) -> Verdict:
    with pytest.raises(DivergenceError, match=words) as caught:
        session.fit(*callbacks, **options)
    verdict = session.verdict
    assert caught.value.verdict == verdict
    return verdict


class Beside(pl.Callback):
    """Puts a value of its own beside what is logged, as LearningRateMonitor does."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.callback_metrics["lr"] = torch.tensor(trainer.current_epoch)


def test_metrics_of_validations_and_epochs_are_recorded_and_verified(whole, tmp_path, capsys):
    session = Session("record", tmp_path / "other").fit(Beside())
    readings = [*read_metrics(Run.open(tmp_path / "other"), 0).by_key.values()]
    places = [("validation", 2, 0), ("epoch", 2, 0), ("validation", 5, 1), ("epoch", 5, 1)]
    assert [(reading.where, reading.step, reading.epoch) for reading in readings] == places
    computed = session.model.trainer.callback_metrics
    last = {"val/loss", "val/largest"}, {"train/loss", "train/loss_epoch"}
    for reading, names in zip(readings[2:], last, strict=True):
        assert {reading.metrics[name].value for name in names} == {
            repr(computed[name].item()) for name in names
        }
    num_metrics = sum(len(reading.metrics) for reading in readings)
    verdict = Session("verify", whole).fit().verdict
    assert (verdict.verdict, verdict.coverage.metrics) == ("match", num_metrics)
    assert f"{num_metrics} metrics, against" in capsys.readouterr().out
    assert compare_runs(whole, tmp_path / "other").coverage.metrics == num_metrics
    cli.main(["show", str(tmp_path / "other")])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("metrics "))
    assert {name for reading in readings for name in reading.metrics} == {
        *line.partition(": ")[2].split(", ")
    }


FEWER = {"limit_val_batches": 1}


@pytest.mark.parametrize(
    ("recorded", "session", "fitted", "cause", "words"),
    [
        (None, {}, {"data": {"other": 0}}, "data_content", "first batch of loader 0: batch[0]"),
        pytest.param(
            None,
            {},
            {"data": {"num_samples": 8}},
            "data_content",
            "samples of loader 0",
            marks=SLOW,
        ),
        (
            None,
            {},
            {"data": {"other": 5}},
            "unknown",
            "only the first batch of each loader is compared",
        ),
        (None, {}, FEWER, "settings", "which explains the first difference. Metric val/loss"),
        (None, {}, {"data": {"other": 0}, **FEWER}, "data_content", "first batch of loader 0"),
        (
            None,
            {},
            {"check_val_every_n_epoch": 2},
            "settings",
            "step 2 is only in the reference, and 1 more",
        ),
        (
            None,
            {},
            {"val_check_interval": 2},
            "settings",
            "Metric val/loss in the validation after step 1 is only in",
        ),
        # metrics are not blamed for steps that were not recorded
        (
            0,
            {"also": "another step"},
            {},
            "unknown",
            "may have started before step 3, in steps that were not",
        ),
        (
            2,
            {"also": "another loss"},
            {},
            "unknown",
            """again with modules=["*", "!metric/val/loss"]""",
        ),
        (0, {}, {"limit_train_batches": 2}, "structure", "Check where epochs end: limit_train"),
    ],
    ids=str,
)
def test_a_metric_that_differs_alone_is_explained(
    recorded, session, fitted, cause, words, whole, tmp_path
):
    reference = whole if recorded is None else record(tmp_path / "run", only_steps=[recorded])
    options = {**fitted, "data": loader(**fitted.get("data", {}))}
    verdict = diverges(
        Session("verify", reference, current=tmp_path / "current", **session), "etric", **options
    )
    first = verdict.first_divergence
    assert (verdict.verdict, verdict.cause) == ("diverged", cause)
    assert (first.phase, first.name, first.rank, first.is_origin) == ("metric", "val/loss", 0, None)
    assert words in " ".join(verdict.explanation.split())
    assert (verdict.explanation.partition(" is ")[0].removeprefix("trainer.") in fitted) == (
        cause == "settings"
    )


def test_what_only_one_run_has_and_lacking_steps_before_the_metrics_that_they_move(whole, tmp_path):
    more = Session("verify", whole, current=tmp_path / "more", also="late")
    assert (
        diverges(more, "Metric late of epoch 1 is only in the current run").first_divergence.kind
        == "extra"
    )
    common = Session("verify", whole, steps="common").fit(check_val_every_n_epoch=2)
    assert common.verdict.verdict == "match"
    for kind, recorded, now in (("missing", 3, 2), ("extra", 2, 3)):
        Session("record", tmp_path / kind).fit(max_epochs=1, limit_train_batches=recorded)
        session = Session("verify", tmp_path / kind, current=tmp_path / f"{kind}-now")
        verdict = diverges(session, "only in the", max_epochs=1, limit_train_batches=now)
        first = verdict.first_divergence
        assert (verdict.verdict, first.step, first.phase, first.kind) == (
            "diverged",
            2,
            "other",
            kind,
        )
        assert "etric" not in verdict.explanation


def test_a_metric_is_left_out_by_a_pattern(tmp_path):
    reference = record(tmp_path / "run", also="a clock")
    with pytest.raises(DivergenceError, match="Metric epoch_time of epoch 0 differs"):
        Session("verify", reference, also="a clock").fit()
    modules = ["*", "!metric/*_time"]
    reference = record(tmp_path / "left-out", also="a clock", modules=modules)
    assert (
        Session("verify", reference, also="a clock", modules=modules).fit().verdict.verdict
        == "match"
    )
    with pytest.raises(SelectionError, match=r'to leave out a metric, add "!metric/NAME"'):
        Session("record", tmp_path / "wrong", modules=["*", "metric/val"])


def test_a_call_alone_is_recorded_and_verified_unless_nothing_is_logged(tmp_path, capsys):
    run = tmp_path / "run"
    Session("record", run).test()
    assert f"recorded 2 metrics of trainer.test in {run}" in capsys.readouterr().out
    verdict = Session("verify", run).test().verdict
    assert (verdict.verdict, verdict.coverage.metrics) == ("match", 2)
    assert verdict.explanation == "All 2 metrics agree, bit for bit."
    assert f"match: verified 2 metrics, against {run}" in capsys.readouterr().out
    with pytest.raises(DivergenceError, match=r" in trainer.test differs") as caught:
        Session("verify", run, current=tmp_path / "current").test(loader(other=0))
    assert (caught.value.verdict.cause, caught.value.verdict.first_divergence.phase) == (
        "data_content",
        "metric",
    )
    with pytest.raises(
        NothingComparedError, match=r"trainer.test logged no metric, so nothing was recorded"
    ):
        Session("verify", run).test(limit_test_batches=0)
    with pytest.raises(
        NothingComparedError, match=r"trainer.test logged no metric, so nothing was recorded"
    ):
        Session("record", tmp_path / "none", also="nothing").test()
    assert not (tmp_path / "none" / "run.json").exists()
    Session("record", tmp_path / "fit", also="nothing").fit().test()
    assert "recorded 0 metrics of trainer.test" in capsys.readouterr().out.splitlines()[-1]


def test_a_run_with_steps_outlives_metrics_alone_and_a_test_that_breaks_off(tmp_path, capsys):
    run = tmp_path / "run"
    broken = partial(RaiseAt, "on_test_batch_end", OSError("the disk is gone"), call=1)
    for session in (Session("record", run).fit(), Session("record", tmp_path / "alone")):
        with pytest.raises(OSError, match="the disk is gone"):
            session.trainer(broken()).test(session.model, loader(), verbose=False)
        assert "stopped by OSError" in capsys.readouterr().out
    assert list((tmp_path / "alone").iterdir()) == []
    Session("record", run, overwrite=True).test()
    assert f"in {run}/.replacement; {run} is unchanged" in capsys.readouterr().out
    assert Session("verify", run).fit().verdict.verdict == "match"
    Session("record", run, overwrite=True).fit()
    assert (run / ".replacement").exists()
    assert Session("verify", run).fit().verdict.verdict == "match"
    assert not (run / ".replacement").exists()


def test_the_parts_of_a_session_are_one_run_and_told_apart(tmp_path, capsys):
    run = tmp_path / "run"

    def whole_session(mode: str, *, first: Any = None, last: Any = None, **options: Any) -> Session:
        session = Session(mode, run, **options)
        return session.validate().test(first).fit(max_epochs=1).validate().test().test(last)

    whole_session("record")
    calls = [key for key in read_metrics(Run.open(run), 0).by_key if key[0].startswith("trainer.")]
    assert [(where, is_after) for where, _, is_after in calls] == [
        *(("trainer.validate", False), ("trainer.test", False)),
        *(("trainer.validate", True), ("trainer.test", True), ("trainer.test", True)),
    ]
    assert Run.open(run).is_complete
    capsys.readouterr()
    assert whole_session("verify").verdict.verdict == "match"
    assert "part 1 (trainer.validate) of 6 matches" in capsys.readouterr().out
    for part, words in (
        ("first", "test/loss in trainer.test differs"),
        ("last", r"\(call 2\) after step 2 differs"),
    ):
        with pytest.raises(DivergenceError, match=words) as caught:
            whole_session("verify", current=tmp_path / part, **{part: loader(other=0)})
        assert caught.value.verdict.cause == "data_content"
    with pytest.raises(
        DivergenceError, match=r"val/loss in trainer.validate is only in the reference"
    ):
        Session("verify", run, current=tmp_path / "current").fit(max_epochs=1)
    # a test that never comes
    Session("verify", run, current=tmp_path / "ended").validate().test().fit(max_epochs=1)
    error = take_unfinished()
    assert isinstance(error, DivergenceError)
    assert "this process ended after 3 of the 6 parts (" in str(error)
    assert "in trainer.validate after step 2 is only in the reference, and 5 more metric" in str(
        error
    )
    verdict = Session("verify", run, steps="common").fit(max_epochs=1).validate().test().verdict
    # the choices of the fit are the run's, also of the one that a validation
    # without optimizers came before
    assert (verdict.verdict, verdict.environment) == ("match", ())


@pytest.mark.parametrize(
    ("after", "at", "ends"),
    [
        *((after, "train_batch_end", ends) for after, ends in ((4, 6), (4, 5), (3, 6))),
        (3, "validation_end", 6),
    ],
)
def test_metrics_of_a_resumed_run(after, at, ends, whole, tmp_path):
    stops, num = RaiseAt("on_train_epoch_end", StopError(), call=2), {3: 4, 4: 2}[after]
    with pytest.raises(StopError) if ends == 6 else nullcontext():
        callbacks = [SaveAfter(tmp_path, after, at=at), *[stops] * (ends == 6)]
        Session("record", tmp_path / "resumed").fit(*callbacks, max_steps=ends)
    checkpoint = tmp_path / f"{after}.ckpt"
    Session("record", tmp_path / "resumed").fit(resume=checkpoint)
    Session("record", tmp_path / "resumed").fit(resume=checkpoint, max_steps=5)
    with pytest.raises(
        DivergenceError, match="it repeated a recorded step or metric with a different result"
    ):
        Session("record", tmp_path / "resumed").fit(resume=checkpoint, data=loader(other=0))
    for reference, current in itertools.permutations([whole, tmp_path / "resumed"]):
        verdict = compare_runs(reference, current)
        assert (verdict.verdict, verdict.coverage.metrics) == ("match", 4 + num), (
            verdict.explanation
        )
    # after an epoch's last batch Lightning goes on without this hook of the next epoch
    starts = LambdaCallback(on_train_epoch_start=lambda _, module: module.log("started", 1.0))
    Session("record", tmp_path / "run").fit(starts)
    for reference, callbacks in ((whole, ()), (tmp_path / "run", (starts,))):
        verdict = Session("verify", reference).fit(*callbacks, resume=checkpoint).verdict
        assert (verdict.verdict, verdict.coverage.metrics >= num) == ("match", True)


def test_damaged_metrics_are_an_error(whole, tmp_path):
    reference = record(tmp_path / "run")
    path = reference / "rank-00000" / "attempt-000.metrics.jsonl"
    content = path.read_bytes()
    flipped, moved = (
        content[:-1].replace(b"0", b"1", 1) + b"\n",
        content.replace(b'"step":2', b'"step":4', 1),
    )
    cut = content[: -len(content.splitlines()[-1]) // 2]
    for says, damages in (
        ("line 1", (flipped, b"{}\n" + content, moved)),
        ("run.json has 4 readings, but", (cut, b"", None)),
    ):
        for damaged in damages:
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(
                ReferenceFormatError, match=rf"attempt-000\.metrics\.jsonl is damaged: {says}"
            ):
                compare_runs(reference, whole)
    with pytest.raises(ReferenceFormatError, match=r"attempt-000\.metrics\.jsonl is damaged"):
        Session("verify", reference).fit()


@pytest.mark.ddp
def test_ranks_stop_together_where_a_metric_differs(tmp_path):
    def fit_and_test(mode: str) -> None:
        also = "another batch" if mode == "verify" else ""
        session = Session(mode, tmp_path / "run", current=tmp_path / "current", also=also)
        session.fit(devices=2, strategy="ddp").test(devices=2, strategy="ddp")

    ended = run_ranks(lambda _: fit_and_test("record"), tmp_path / "recording", status=0)
    assert "recorded 3 metrics of trainer.test" in ended[0].output
    assert not (tmp_path / "run" / "rank-00001" / "attempt-000.metrics.jsonl").exists()
    ended = run_ranks(lambda _: fit_and_test("verify"), tmp_path / "verification", status=1)
    assert all(
        "etric val/loss in the validation after step 3 differs" in one.output for one in ended
    )
    verdict = Verdict.from_dict(verdict_in(tmp_path))
    assert (verdict.counts.steps_compared, verdict.first_divergence.rank, verdict.cause) == (
        8,
        0,
        "unknown",
    )
    require_one_verdict(verdict, tmp_path / "run", tmp_path / "current")


def test_a_draw_before_a_validation_is_named_where_no_step_is_recorded(tmp_path):
    def draw(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == 5:
            torch.rand(1)

    reference = record(tmp_path / "run", also="a draw", only_steps=[3])
    session = Session(
        "verify", reference, current=tmp_path / "current", on_divergence="collect", also="a draw"
    )
    verdict = diverges(session, "differs", LambdaCallback(on_validation_start=draw))
    assert (verdict.verdict, verdict.cause, verdict.first_divergence.name) == (
        "diverged",
        "rng",
        "val/drawn",
    )
    assert (
        "The generator torch.cpu differs, so seed the code that computes the metric."
        in verdict.explanation
    )
    trail = [(entry.kind, entry.name, entry.proven) for entry in verdict.trail]
    assert trail == [("generator", "torch.cpu", False), ("metric", "val/drawn", True)]
