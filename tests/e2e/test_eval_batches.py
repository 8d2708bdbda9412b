"""Batches that are not trained on: recorded and compared when asked, in a fit and without one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from processes import Ended, run_ranks
from styles import Classifier, Samples
from torch.utils.data import DataLoader
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, compare_runs
from det_callbacks.callback.fits import take_unfinished
from det_callbacks.compare.eval_batches import read_batches
from det_callbacks.errors import (
    DivergenceError,
    NothingComparedError,
    ReferenceFormatError,
    ReferenceNotFoundError,
    SelectionError,
)
from det_callbacks.trace.store import Run
from det_callbacks.verdict import Verdict

pytestmark = [LIGHTNING_ADVICE]

ALL = {"validation_batches": True, "sanity_batches": True, "test_batches": True, "predict_batches": True}


class Few(Samples):
    """Samples for three batches."""

    def __len__(self) -> int:
        return 12


class Changed(Few):
    """Samples of which one is another."""

    def __getitem__(self, index: int) -> Any:
        inputs, label = super().__getitem__(index)
        return (inputs + 1 if index == 6 else inputs), label


class Evaluated(Classifier):
    def _look(self, batch: Any) -> None:
        inputs, _ = batch
        self(inputs)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._look(batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._look(batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch


def loader(kind: type[Samples] = Few) -> DataLoader[Any]:
    return DataLoader(kind(), 4, generator=torch.Generator())  # a validation draws from no other


class Session:
    """One process's use of one callback: fits, tests and so on, with one model."""

    def __init__(self, mode: str, reference: Path, **arguments: Any) -> None:
        torch.manual_seed(0)
        defaults = {"level": "state", **ALL} if mode == "record" else {}
        self.callback = DeterminismCallback(reference, mode=mode, **{**defaults, **arguments})
        self.model = Evaluated()
        self.root = reference.parent

    def trainer(self, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
        given = {"max_epochs": 2, "num_sanity_val_steps": 1, "default_root_dir": self.root, **options}
        return quiet_trainer(self.callback, *callbacks, **given)

    def fit(self, validation: Any = None, **options: Any) -> "Session":
        self.trainer(**options).fit(self.model, loader(), loader() if validation is None else validation)
        return self

    def test(self, data: Any = None, **options: Any) -> "Session":
        self.trainer(**options).test(self.model, loader() if data is None else data, verbose=False)
        return self

    def validate(self, data: Any = None) -> "Session":
        self.trainer().validate(self.model, loader() if data is None else data, verbose=False)
        return self

    def predict(self, data: Any = None) -> "Session":
        self.trainer().predict(self.model, loader() if data is None else data, return_predictions=False)
        return self


def verdict_of(session: Session) -> Verdict:
    assert session.callback.verdict is not None
    return session.callback.verdict


STAGES: dict[str, tuple[str, Callable[..., Any]]] = {
    "validation": ("validation", Session.validate),
    "test": ("test", Session.test),
    "predict": ("prediction", Session.predict),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_alone_is_recorded_and_verified(tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    word, run = STAGES[stage]
    run(Session("record", tmp_path / "run"))
    assert f"recorded 3 {word} batches, in {tmp_path / 'run'}" in capsys.readouterr().out
    session = Session("verify", tmp_path / "run")
    run(session)
    verdict = verdict_of(session)
    assert (verdict.verdict, verdict.coverage.batches) == ("match", {word: 3})
    assert verdict.explanation == f"All 3 {word} batches agree, bit for bit."
    assert f"match: verified 3 {word} batches, against {tmp_path / 'run'}" in capsys.readouterr().out
    with pytest.raises(DivergenceError) as caught:
        run(Session("verify", tmp_path / "run"), [loader(), loader(Changed)])
    found = caught.value.verdict
    assert found.first_divergence is not None
    assert (found.first_divergence.kind, found.first_divergence.phase) == ("extra", "data")
    with pytest.raises(DivergenceError) as caught:
        run(Session("verify", tmp_path / "run", current=tmp_path / "current"), loader(Changed))
    found = caught.value.verdict
    assert (found.verdict, found.cause) == ("diverged", "data_content")
    assert f"{word[1:]} batch 1: batch[0] differs in the {word}" in found.explanation
    again = compare_runs(tmp_path / "run", tmp_path / "current")
    assert (again.verdict, again.cause, again.first_divergence) == (found.verdict, found.cause, found.first_divergence)
    # a kill comes before that is written; the batch that differs is kept as soon as its stage is over
    (tmp_path / "current" / "rank-00000" / "compared.json").unlink()
    again = compare_runs(tmp_path / "run", tmp_path / "current")
    assert (again.verdict, again.cause, again.first_divergence) == (found.verdict, found.cause, found.first_divergence)


def test_the_parts_of_a_session_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(session: Session, test: Any = None) -> Session:
        return session.validate().fit().test(test).predict()

    run(Session("record", tmp_path / "run"))
    assert "6 steps" in capsys.readouterr().out.splitlines()[-1]
    assert Run.open(tmp_path / "run").is_complete
    session = Session("verify", tmp_path / "run").validate()
    assert "part 1 (validation) of 4 agrees" in capsys.readouterr().out
    session.fit().test().predict()
    assert verdict_of(session).verdict == "match"
    batches = {"validation": 9, "sanity check": 1, "test": 3, "prediction": 3}
    assert verdict_of(session).coverage.batches == batches
    assert "3 test batches" in capsys.readouterr().out.splitlines()[-1]
    run(Session("record", tmp_path / "other"))
    compared = compare_runs(tmp_path / "run", tmp_path / "other")
    assert (compared.verdict, compared.coverage.batches) == ("match", batches)
    with pytest.raises(DivergenceError, match=r"Test batch 1: batch\[0\] differs in the test"):
        run(Session("verify", tmp_path / "run", on_divergence="collect"), loader(Changed))


def test_a_test_that_never_comes_is_missing(tmp_path: Path) -> None:
    Session("record", tmp_path / "run").fit().test()
    Session("verify", tmp_path / "run", current=tmp_path / "current").fit()
    error = take_unfinished()
    assert isinstance(error, DivergenceError)
    assert "holds 2 parts (fit, test), and this process ended after 1" in str(error)
    assert (
        "Test batch 0: batch[0] is only in the reference in the test (segment 1 of the run), and 2 more batches"
        in str(error)
    )
    again = compare_runs(tmp_path / "run", tmp_path / "current")
    assert (again.verdict, again.first_divergence) == ("diverged", error.verdict.first_divergence)
    common = Session("verify", tmp_path / "run", steps="common").fit()
    assert verdict_of(common).verdict == "match"


def test_what_is_not_asked_for_is_said_and_nothing_compared_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Session("record", tmp_path / "run", test_batches=False).fit().test()
    assert "nothing of this test" not in capsys.readouterr().out
    Session("verify", tmp_path / "run").test()
    assert "nothing of this test is recorded or compared" in capsys.readouterr().out
    with pytest.raises(SelectionError, match="without test_batches"):
        Session("verify", tmp_path / "run", test_batches=True).test()
    with pytest.raises(ReferenceNotFoundError):
        Session("verify", tmp_path / "nowhere").test()
    with pytest.raises(NothingComparedError, match="had no batch"):
        Session("record", tmp_path / "none").test(limit_test_batches=0)


class Broken(pl.Callback):
    def on_test_batch_end(self, *_: Any) -> None:
        raise OSError("the disk is gone")


def test_a_test_that_breaks_off_leaves_an_incomplete_run(tmp_path: Path) -> None:
    session = Session("record", tmp_path / "run").fit()
    with pytest.raises(OSError, match="the disk is gone"):
        session.trainer(Broken()).test(session.model, loader(), verbose=False)
    assert not Run.open(tmp_path / "run").is_complete
    with pytest.raises(ReferenceFormatError, match="incomplete"):
        Session("verify", tmp_path / "run").fit()


class Late:
    """Validation data that differ from the second validation on."""

    def __init__(self) -> None:
        self.num_iterations = 0

    def __iter__(self) -> Any:
        self.num_iterations += 1
        return iter(loader(Changed if self.num_iterations > 3 else Few))  # the first is the sanity check

    def __len__(self) -> int:
        return 3


@pytest.mark.filterwarnings("ignore::det_callbacks.errors.DivergenceWarning")  # what on_divergence="warn" says
@pytest.mark.parametrize(
    "on_divergence", ["raise", *(pytest.param(way, marks=pytest.mark.slow) for way in ("collect", "warn"))]
)
def test_a_validation_that_differs_stops_the_fit_at_its_end(tmp_path: Path, on_divergence: str) -> None:
    def options(data: Any) -> dict[str, Any]:
        return {"validation": data, "max_epochs": 4}

    Session("record", tmp_path / "run").fit(**options([loader(), loader()]))
    session = Session("verify", tmp_path / "run", current=tmp_path / "current", on_divergence=on_divergence)
    if on_divergence == "warn":
        session.fit(**options([loader(), Late()]))
    else:
        with pytest.raises(DivergenceError):
            session.fit(**options([loader(), Late()]))
    verdict = verdict_of(session)
    assert verdict.counts.steps_compared == (6 if on_divergence == "raise" else 12)
    more = ", and 2 more batches" if on_divergence != "raise" else ""
    where = f"in the validation ahead of step 6{more}; the"
    assert f"alidation batch 1 of loader 1: batch[0] differs {where}" in verdict.explanation
    assert (verdict.verdict, verdict.cause) == ("diverged", "data_content")
    again = compare_runs(tmp_path / "run", tmp_path / "current")
    assert (again.verdict, again.cause, again.first_divergence) == (
        verdict.verdict,
        verdict.cause,
        verdict.first_divergence,
    )
    assert f"in the validation ahead of step 6{more}" in again.explanation


def test_a_sanity_check_that_differs_stops_before_the_first_step(tmp_path: Path) -> None:
    Session("record", tmp_path / "run").fit(num_sanity_val_steps=2)
    session = Session("verify", tmp_path / "run")
    with pytest.raises(DivergenceError, match=r"Sanity check batch 1: batch\[0\] differs in the sanity check"):
        session.fit(loader(Changed), num_sanity_val_steps=2)
    assert verdict_of(session).counts.steps_compared == 0


@pytest.mark.slow
def test_validations_of_which_one_run_has_fewer(tmp_path: Path) -> None:
    Session("record", tmp_path / "run").fit()
    session = Session("verify", tmp_path / "run", current=tmp_path / "current")
    with pytest.raises(DivergenceError, match="is only in the reference in the validation ahead of step 3"):
        session.fit(check_val_every_n_epoch=2)
    again = compare_runs(tmp_path / "run", tmp_path / "current")
    assert again.first_divergence == verdict_of(session).first_divergence
    common = Session("verify", tmp_path / "run", steps="common")
    assert verdict_of(common.fit(check_val_every_n_epoch=2)).verdict == "match"


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["fit", "fit and test"])
def test_a_resumed_recording_keeps_its_batches(tmp_path: Path, parts: str) -> None:
    class Saves(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    first = Session("record", tmp_path / "run")
    first.trainer(Saves(), max_epochs=3).fit(first.model, loader(), loader())
    if parts == "fit and test":
        first.test(loader(Changed))
    second = Session("record", tmp_path / "run")
    second.trainer(max_epochs=4).fit(
        second.model, loader(), loader(), ckpt_path=tmp_path / "1.ckpt", weights_only=False
    )
    if parts == "fit and test":
        second.test()
    assert Run.open(tmp_path / "run").is_complete
    whole = Session("verify", tmp_path / "run")
    whole.trainer(max_epochs=4).fit(whole.model, loader(), loader())
    if parts == "fit and test":
        whole.test()
    verdict = verdict_of(whole)
    assert (verdict.verdict, verdict.counts.steps_compared) == ("match", 12)
    assert verdict.coverage.batches["validation"] == 12


class OnOneRank(Evaluated):
    """Gets another validation batch on rank 1, ahead of step 4."""

    is_faulty = False

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, labels = batch
        is_due = self.is_faulty and self.trainer.validating and self.global_rank == 1 and self.global_step == 4
        return inputs + 1 if is_due else inputs, labels


class FaultyOnOneRank(OnOneRank):
    is_faulty = True


@pytest.mark.ddp
@pytest.mark.slow
def test_ranks_stop_together_at_the_end_of_a_validation_and_each_has_its_own_test(tmp_path: Path) -> None:
    def run(mode: str, model: type[OnOneRank], folder: str) -> list[Ended]:
        def body(rank: int) -> None:
            pl.seed_everything(0, verbose=False)
            callback = DeterminismCallback(
                tmp_path / "run", mode=mode, current=tmp_path / folder, **(ALL if mode == "record" else {})
            )
            options = {"devices": 2, "strategy": "ddp", "default_root_dir": tmp_path, "num_sanity_val_steps": 1}
            module = model()
            data = [DataLoader(Samples(), 4) for _ in range(3)]
            quiet_trainer(callback, max_epochs=2, val_check_interval=2, **options).fit(module, *data[:2])
            quiet_trainer(callback, **options).test(module, data[2], verbose=False)

        return run_ranks(body, tmp_path / f"output-{folder}")

    ended = run("record", OnOneRank, "record")
    assert [one.exit_code for one in ended] == [0, 0], ended
    assert "8 test batches" in ended[0].output
    reference = Run.open(tmp_path / "run")
    rows = [[batch[0].value for batch in read_batches(reference, rank, 1)] for rank in (0, 1)]
    assert [len(batches) for batches in rows] == [4, 4]
    assert not {*rows[0]} & {*rows[1]}
    ended = run("verify", OnOneRank, "equal")
    assert [one.exit_code for one in ended] == [0, 0], ended
    assert "8 test batches" in ended[0].output
    ended = run("verify", FaultyOnOneRank, "current")
    assert [one.exit_code for one in ended] == [1, 1], ended
    verdict = json.loads((tmp_path / "current" / "verdict.json").read_text())
    assert verdict["counts"]["steps_compared"] == 8
    assert "alidation batch 0: batch[0] differs in the validation ahead of step 4 of rank 1" in verdict["explanation"]
    again = compare_runs(tmp_path / "run", tmp_path / "current").to_dict()
    assert (again["first_divergence"], again["cause"]) == (verdict["first_divergence"], verdict["cause"])
