"""Calls of validate, test and predict whose batches are recorded as steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Classifier, Samples
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import (
    DeterminismCallback,
    DivergenceError,
    NothingComparedError,
    SelectionError,
    TrainingRun,
)
from det_callbacks.training.recording import take_unfinished

pytestmark = LIGHTNING_ADVICE
ALL = ("fit", "validate", "test", "predict")


class Evaluated(Classifier):
    """Adds a little to the hidden values in one call and batch."""

    def __init__(self, plant: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.plant = plant

    def evaluate(self, call: str, batch: Any, batch_idx: int) -> Tensor:
        scores: Tensor = self(batch[0])
        if self.plant == (call, batch_idx):
            scores = scores.add(1e-3)
        return scores

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.evaluate("validate", batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.evaluate("test", batch, batch_idx).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.evaluate("predict", batch, batch_idx)


def loader(num_samples: int) -> DataLoader[Any]:
    return DataLoader(Subset(Samples(), range(num_samples)), 4)


def run(
    folder: Path,
    *,
    mode: str = "verify",
    plant: tuple[str, int] | None = None,
    calls: tuple[str, ...] = ALL,
    **options: Any,
) -> DeterminismCallback:
    torch.manual_seed(0)
    callback = DeterminismCallback(folder, mode=mode, **{"stages": ALL, **options})
    model = Evaluated(plant)
    for call, num_samples in zip(ALL, (8, 12, 16, 20), strict=True):
        if call in calls:
            trainer = quiet_trainer(callback, default_root_dir=folder.parent)
            getattr(trainer, call)(model, loader(num_samples))
    return callback


@pytest.fixture(scope="module")
def reference(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("stages") / "run"
    run(folder, mode="record")
    return folder


def test_every_batch_of_every_call_is_a_step(reference, capsys):
    callback = run(reference)
    verdict = callback.verdict
    assert verdict is not None
    assert (verdict.verdict, verdict.counts.steps_compared) == ("match", 2 + 3 + 4 + 5)
    assert verdict.coverage.metrics == 1
    assert "part 3 (test) of 4 matches" in capsys.readouterr().out


@pytest.mark.parametrize(("call", "segment"), [("validate", 1), ("test", 2), ("predict", 3)])
def test_a_fault_in_a_call_is_its_op_and_line(call, segment, reference):
    with pytest.raises(DivergenceError) as caught:
        run(reference, plant=(call, 2))
    first = caught.value.verdict.first_divergence
    assert first is not None
    assert (first.segment, first.step, first.phase) == (segment, 2, "forward")
    assert (first.op, first.is_origin) == ("aten.add.Tensor", True)
    assert "in evaluate" in first.source[0]


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_a_call_without_a_fit_is_a_run(call, tmp_path):
    run(tmp_path / "run", mode="record", calls=(call,), stages=(call,))
    assert run(tmp_path / "run", calls=(call,), stages=(call,)).verdict.verdict == "match"
    with pytest.raises(DivergenceError, match=r"aten\.add\.Tensor"):
        run(tmp_path / "run", calls=(call,), stages=(call,), plant=(call, 0))


def test_other_weights_are_the_cause(tmp_path):
    run(tmp_path / "run", mode="record", calls=("test",))

    class OtherWeights(Evaluated):
        def setup(self, stage: str) -> None:
            torch.nn.init.ones_(self.last.weight)

    callback = DeterminismCallback(tmp_path / "run", stages=ALL)
    torch.manual_seed(0)
    with pytest.raises(DivergenceError) as caught:
        quiet_trainer(callback, default_root_dir=tmp_path).test(OtherWeights(), loader(16))
    assert caught.value.verdict.cause == "initial_weights"


def test_a_stage_that_is_left_out_is_compared_by_its_metrics(reference, tmp_path):
    run(tmp_path / "run", mode="record", stages=("fit",))
    verdict = run(tmp_path / "run", stages=("fit",), plant=("predict", 0)).verdict
    assert (verdict.verdict, verdict.counts.steps_compared) == ("match", 2)
    assert verdict.coverage.metrics == 1
    with pytest.raises(DivergenceError, match="score"):
        run(tmp_path / "run", stages=("fit",), plant=("test", 0))
    run(tmp_path / "none", mode="record", stages=("predict",))
    verdict = run(tmp_path / "none", stages=("predict",), plant=("validate", 0)).verdict
    assert verdict.counts.steps_compared == 5


def test_a_call_that_fails_leaves_an_incomplete_run(tmp_path, capsys):
    class Failing(Evaluated):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                raise RuntimeError("no more memory")
            return super().predict_step(batch, batch_idx)

    callback = DeterminismCallback(tmp_path / "run", mode="record", stages=["predict"])
    with pytest.raises(RuntimeError, match="no more memory"):
        quiet_trainer(callback).predict(Failing(), loader(8))
    assert "recording stopped by RuntimeError after 1 step" in capsys.readouterr().out


def test_a_call_without_a_batch_is_an_error(tmp_path):
    callback = DeterminismCallback(tmp_path / "run", mode="record", stages=["test"])
    with pytest.raises(NothingComparedError, match=r"trainer\.test ran no batch"):
        quiet_trainer(callback, limit_test_batches=0).test(Evaluated(), loader(8), verbose=False)


def test_other_stages_than_those_of_the_reference_are_refused(reference):
    with pytest.raises(SelectionError, match=r"Part 2 .* is a validate, and here it is a test"):
        run(reference, calls=("fit", "test"))
    take_unfinished()  # of the part that matched


def test_a_program_that_calls_no_stage_that_is_asked_for_has_compared_nothing(tmp_path):
    run(tmp_path / "run", calls=("validate", "predict"), stages=("test",))
    error = take_unfinished()
    assert isinstance(error, NothingComparedError)
    assert "did not call trainer.test" in str(error)
    run(tmp_path / "run", mode="record", calls=("validate", "test"), stages=("test",))
    assert take_unfinished() is None


def test_stages_are_checked(tmp_path):
    for stages, text in (
        ("test", "must be a list"),
        ((), "must be a list"),
        (["fit", "fit"], "must be a list of different words"),
        (["train"], "must be one of"),
    ):
        with pytest.raises(SelectionError, match=f"stages {text}"):
            DeterminismCallback(tmp_path, stages=stages)
    with pytest.raises(SelectionError, match="omit stages"):
        DeterminismCallback(None, mode="audit", stages=["test"])
    with pytest.raises(SelectionError, match="no argument stages"):
        TrainingRun(tmp_path, model=torch.nn.Linear(1, 1), stages=["test"])
