"""Several processes record and verify one run together."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from html_page import assert_no_receiver_is_an_origin
from lightning.pytorch.strategies import DDPStrategy
from processes import Ended, run_ranks, train
from styles import Classifier
from torch import Tensor

from det_callbacks import DeterminismCallback
from det_callbacks.compare import compare_runs
from det_callbacks.trace.store import Run

pytestmark = pytest.mark.ddp


class Faulty(Classifier):
    """Does something else on rank 1, in step 2."""

    fault = "none"

    def is_due(self, fault: str, *, step: int = 2) -> bool:
        now = self.trainer.fit_loop.epoch_loop.total_batch_idx
        return self.fault == fault and self.global_rank == 1 and now == step

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, labels = batch
        # the batch is drawn before its step is counted
        return inputs + 1 if self.is_due("data", step=1) else inputs, labels

    def change_gradient(self, gradient: Tensor) -> Tensor:
        # one op more in any case, before the gradients are synchronised
        factor = self.factors[int(self.is_due("gradient"))]
        return gradient * factor

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        if self.is_due("weights"):
            bits = self.last.bias.detach().numpy().view(np.int32)  # past torch, so that no op is to blame
            bits[0] += 1


def faulty(fault: str) -> Classifier:
    model = Faulty()
    model.fault = fault
    model.factors = torch.tensor([1.0, 1.0 + 2**-23])
    model.last.bias.register_hook(model.change_gradient)
    return model


def record(folder: Path, fault: str = "none") -> list[Ended]:
    path, model = folder / "run", partial(faulty, fault)
    return run_ranks(lambda rank: train(DeterminismCallback(path, mode="record"), model=model), folder / "record")


def verify(
    folder: Path, fault: str = "none", *, world_size: int = 2, batches: int = 4, **arguments: Any
) -> list[Ended]:
    def body(rank: int) -> None:
        callback = DeterminismCallback(folder / "run", current=folder / "current", **arguments)
        train(callback, model=partial(faulty, fault), world_size=world_size, batches=batches)

    return run_ranks(body, folder / "verify", world_size=world_size)


def verdict_in(folder: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads((folder / "current" / "verdict.json").read_text())
    return verdict


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    ended = record(folder)
    assert [one.exit_code for one in ended] == [0, 0], ended
    return folder


def linked(recorded: Path, folder: Path) -> Path:
    """Return a folder in which the recorded run is the reference."""
    (folder / "run").symlink_to(recorded / "run")
    return folder


def test_each_rank_records_its_own_steps(recorded: Path) -> None:
    run = Run.open(recorded / "run")
    assert run.is_complete
    assert run.ranks == [0, 1]
    assert "ranks" not in run.manifest
    assert [run.rank(rank).steps(0).tolist() for rank in run.ranks] == [[0, 1, 2, 3]] * 2
    views = [run.view(rank, 0, 2) for rank in run.ranks]
    # the root of a broadcast (of batch norm's buffers) puts something in, and the other does not
    programs = [[run.view(rank, 0, step).program for step in (1, 2, 3)] for rank in run.ranks]
    assert len(programs[0][1]) == len(programs[1][1]) + 1
    batches = [view.record.digests[0] for view in views]
    assert batches[0] != batches[1]
    assert sorted(path.name for path in (recorded / "run").iterdir()) == [
        "layouts",
        "programs",
        "rank-00000",
        "rank-00001",
        "run.json",
    ]


def test_the_same_training_matches_and_rank_0_says_so(recorded: Path, tmp_path: Path) -> None:
    ended = verify(linked(recorded, tmp_path))
    assert [one.exit_code for one in ended] == [0, 0], ended
    assert "match: verified 8 steps of 2 ranks" in ended[0].output
    assert "det_callbacks:" not in ended[1].output
    verdict = verdict_in(tmp_path)
    assert verdict["verdict"] == "match"
    assert verdict["coverage"]["ranks"] == 2
    assert verdict["counts"]["steps_compared"] == 8


@pytest.mark.parametrize(
    ("fault", "place", "others"),
    [
        ("data", {"phase": "data", "step": 2}, "Rank 0 differs from step 2 on: it received the difference."),
        (
            "gradient",
            {"phase": "input", "module": "last", "step": 2},
            "Rank 0 differs from step 2 on: it received the difference.",
        ),
        ("weights", {"phase": "state", "step": 2, "name": "last.bias"}, "Rank 0 differs from step 3 on: it received"),
    ],
)
def test_what_rank_1_does_otherwise_is_found_there(
    fault: str, place: dict[str, Any], others: str, recorded: Path, tmp_path: Path
) -> None:
    ended = verify(linked(recorded, tmp_path), fault)
    assert [one.exit_code for one in ended] == [1, 1], ended
    verdict = verdict_in(tmp_path)
    first = verdict["first_divergence"]
    assert (first["rank"], *(first[name] for name in place)) == (1, *place.values())
    assert others in verdict["explanation"]
    assert verdict["explanation"].startswith("Rank 1 of 2: Step 2")
    assert not [origin for origin in verdict["origins"] if origin["rank"] == 0]
    assert all(verdict["explanation"] in one.output for one in ended)
    assert [one.output.count("report.html)") for one in ended] == [1, 0]
    assert_no_receiver_is_an_origin(tmp_path / "current", verdict)


def test_the_training_is_bitwise_the_one_without(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        for name, callback in (("with", DeterminismCallback(tmp_path / "run", mode="record")), ("without", None)):
            _, module = train(callback)
            torch.save(module.state_dict(), tmp_path / f"{name}-{rank}.pt")

    ended = run_ranks(body, tmp_path)
    assert [one.exit_code for one in ended] == [0, 0], ended
    for rank in range(2):
        left, right = (torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True) for name in ("with", "without"))
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_another_number_of_processes_is_not_comparable(recorded: Path, tmp_path: Path) -> None:
    ended = verify(linked(recorded, tmp_path), world_size=1, batches=8)
    assert [one.exit_code for one in ended] == [3], ended
    assert "ran on 2 processes and this run has 1" in ended[0].output
    verdict = verdict_in(tmp_path)
    assert verdict["verdict"] == "not_comparable"
    assert verdict["counts"]["steps_compared"] == 0


class OwnWeights(Classifier):
    """Begins with other weights on rank 1, which nobody broadcasts."""

    def setup(self, stage: str) -> None:
        if self.global_rank:
            torch.nn.init.ones_(self.last.bias)


class OwnSetting(Classifier):
    def __init__(self) -> None:
        super().__init__()
        torch.backends.cudnn.benchmark = os.environ["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    ("model", "named"), [(OwnWeights, "weights of last.bias is"), (OwnSetting, "settings.cudnn_benchmark is true")]
)
def test_ranks_that_do_not_start_alike_do_not_train(model: Any, named: str, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        strategy = DDPStrategy(init_sync=False)
        train(DeterminismCallback(tmp_path / "run", mode="record"), model=model, strategy=strategy)

    ended = run_ranks(body, tmp_path)
    assert [one.exit_code for one in ended] == [2, 2], ended
    assert all(f"SettingsError: The 2 processes of this run do not start alike: {named}" in one.output for one in ended)
    assert all("on rank 1, and" in one.output for one in ended)
    assert not (tmp_path / "run").exists()


def test_two_recordings_are_compared_from_the_command_line(recorded: Path, tmp_path: Path) -> None:
    ended = record(tmp_path, "data")
    assert [one.exit_code for one in ended] == [0, 0], ended
    verdict = compare_runs(recorded / "run", tmp_path / "run")
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.rank, verdict.first_divergence.step) == (1, 2)
