"""Several processes: a resumed training is the one that was interrupted on every rank,
or all ranks refuse it.
"""

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import resumes
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from processes import run_ranks
from resumes import BATCHES, RESUMING, Augmented, Noisy, SaveAfter
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from det_callbacks import CheckpointNotFoundError, NotResumableError, check_checkpoint
from det_callbacks.errors import DetCallbacksError
from det_callbacks.runs.store import Run
from det_callbacks.verify.judge import compare_runs

pytestmark = [pytest.mark.ddp, *RESUMING]


class Wide(Noisy):
    """Large enough for several of DDP's buckets, whose layers are registered in another
    order than they are used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(600, 2)
        self.middle = nn.Linear(600, 600)
        self.first = nn.Linear(4, 600)
        self.norm = nn.BatchNorm1d(600)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.first(rows)).relu())
        return self.last(self.middle(hidden).relu())


def data(num_ranks: int = 2, **options: Any) -> DataLoader[Any]:
    rows = Augmented(num_samples=2 * BATCHES * num_ranks)
    return DataLoader(rows, **{"batch_size": 2, "shuffle": True, **options})


def on_ranks(options: dict[str, Any], num_ranks: int = 2) -> dict[str, Any]:
    options = {"strategy": lambda: "ddp", "model": Wide, "data": lambda: data(num_ranks), **options}
    return {**options, "devices": num_ranks, "strategy": options["strategy"]()}


def record(
    folder: Path, *others: pl.Callback, num_ranks: int = 2, level: Any = "op", **options: Any
) -> pl.Trainer:
    return resumes.record(folder, *others, level=level, **on_ranks(options, num_ranks))


def resume(
    folder: Path, name: str, *others: pl.Callback, num_ranks: int = 2, **options: Any
) -> Any:
    return resumes.resume(folder, name, *others, **on_ranks(options, num_ranks))


def round_trip(folder: Path, after: Sequence[int], *, level: Any = "op", **options: Any) -> None:
    at = options.pop("at", "train_batch_end")
    record(folder, SaveAfter(folder, *after, at=at), level=level, **options)
    for number in after:
        assert resume(folder, f"{number}.ckpt", **options) == (number, 2 * BATCHES - 1)


class Sharded(Noisy):
    """FSDP2; with dropout and a gradient that is kept over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for layer in (self.first, self.last, self):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self(batch).pow(2).mean()


def kill_at_6(trainer: pl.Trainer, *_: Any) -> None:
    """End each process without a word, in the middle of a step."""
    if trainer.fit_loop.epoch_loop.total_batch_idx == 6:
        trainer.strategy.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_recording_that_was_killed_goes_on_and_is_the_uninterrupted_one(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = {"accumulate_grad_batches": 2, "validates": True, "val_check_interval": 3}
    run_ranks(lambda rank: record(whole, **options), whole, status=0)
    others = SaveAfter(killed, 3, 5), LambdaCallback(on_before_backward=kill_at_6)
    ended = run_ranks(lambda rank: record(killed, *others, **options), killed)
    assert [one.exit_code for one in ended] == [-9, -9]

    def go_on(rank: int) -> None:
        # the first of the two lies before a validation; both within a
        # window of accumulated gradients
        assert resume(whole, "../killed/3.ckpt", **options) == (3, 13)
        record(killed, ckpt_path=killed / "5.ckpt", **options)

    run_ranks(go_on, killed, status=0)
    run = Run.open(killed / "run")
    assert (run.is_complete, len(run.manifest.attempts)) == (True, 2)
    verdict = compare_runs(whole / "run", killed / "run")
    assert (verdict.verdict, verdict.coverage.ranks, verdict.counts.steps_compared) == (
        "match",
        2,
        28,
    )


SHARDED = {"after": (3, 7), "model": Sharded, "accumulate_grad_batches": 2}
SHARDING = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
TRAININGS: dict[str, dict[str, Any]] = {
    "batches": {"after": (3, 7, 10)},
    "validation": {"after": (4, 6), "validates": True, "val_check_interval": 2},
    "workers": {"after": (8,), "data": lambda: data(num_workers=2)},
    "end_of_epoch": {"after": (7,), "at": "train_epoch_end", "validates": True},
    "unused": {"after": (3,), "strategy": lambda: "ddp_find_unused_parameters_true"},
    # of two ranks a sum has the same bits in any order; of three it has not
    "three_ranks": {"after": (4, 8), "num_ranks": 3, "level": "state"},
    "sharded_folder": {**SHARDED, "strategy": partial(SHARDING, save_distributed_checkpoint=True)},
    "sharded_file": {**SHARDED, "strategy": partial(SHARDING, save_distributed_checkpoint=False)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_from_wherever_it_was_saved(name, tmp_path):
    options = TRAININGS[name]
    world = options.get("num_ranks", 2)
    run_ranks(
        lambda rank: round_trip(tmp_path, **options),
        tmp_path / "output",
        world_size=world,
        status=0,
    )
    for number in options["after"]:
        assert check_checkpoint(tmp_path / f"{number}.ckpt").equal
        assert (tmp_path / f"{number}.ckpt").is_dir() == (name == "sharded_folder")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_kill_between_two_ranks_leaves_a_checkpoint_without_digests(
    killed, tmp_path, monkeypatch
):
    def save_twice(trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        if step == 4 and trainer.global_rank == killed:  # which has not written its part yet
            monkeypatch.setattr(
                "det_callbacks.integrations.lightning.checkpoint.resume.write_part",
                lambda *_, **__: os._exit(9),
            )
        if step in (2, 4):
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    saving = partial(LambdaCallback, on_train_batch_end=save_twice)
    ended = run_ranks(
        lambda rank: record(tmp_path / "killed", saving(), level="state"), tmp_path / "output"
    )
    assert (ended[killed].exit_code, ended[1 - killed].exit_code > 0) == (9, True)
    path = tmp_path / "last.ckpt"
    with pytest.raises(CheckpointNotFoundError, match="nothing to compare"):
        check_checkpoint(path)
    # the checkpoint before, since the save waits for all ranks: a preempted job goes on from it
    on = partial(record, tmp_path / "on", level="state", ckpt_path=path)
    ended = run_ranks(lambda rank: on(), tmp_path / "output", status=0)
    assert all("last.ckpt is resumed by Lightning alone" in one.output for one in ended)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    """A folder with a run of two epochs, and the checkpoints after its third step
    and, damaged, its fourth.
    """
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(
        lambda rank: record(folder, SaveAfter(folder, 3, 4), level="state"),
        folder / "output",
        status=0,
    )
    (folder / "4.ckpt.resume" / "rank-00001.state").write_bytes(b"{}")
    return folder


def add_on_rank_1(trainer: pl.Trainer, *_: Any) -> None:
    trainer.fit_loop._data_source.instance.dataset.rows[:] += trainer.global_rank


def test_what_cannot_be_resumed_is_refused_on_all_ranks(saved):
    def trip(name: str, after: int, **options: Any) -> Any:
        round_trip(saved / name, [after], level="state", max_epochs=1, **options)

    static, other_data = (
        partial(DDPStrategy, static_graph=True),
        LambdaCallback(on_fit_start=add_on_rank_1),
    )
    attempts: list[tuple[Callable[[], Any], str, str, str]] = [  # what each rank raises, and why
        (
            lambda: resume(saved, "4.ckpt"),
            "RankError",
            "CheckpointFormatError",
            "rank-00001.state is damaged",
        ),
        (
            lambda: resume(saved, "3.ckpt", other_data),
            "RankError",
            "NotResumableError",
            "differ when they are loaded again",
        ),
        (
            lambda: trip("first", 1),
            "NotResumableError",
            "NotResumableError",
            "about to rebuild its buckets",
        ),
        (
            lambda: trip("static", 2, strategy=static),
            "NotResumableError",
            "NotResumableError",
            "communication hooks",
        ),
    ]

    def body(rank: int) -> None:
        for attempt, *kinds, text in attempts:
            with pytest.raises(DetCallbacksError, match=text) as caught:
                attempt()
            assert (type(caught.value).__name__, caught.value.exit_code) == (kinds[rank], 2)

    run_ranks(body, saved / "output", status=0)


def test_another_number_of_processes_is_refused_and_lightning_goes_on_alone(saved):
    options = {"model": Wide, "data": data, "max_epochs": 1, "ckpt_path": saved / "3.ckpt"}
    with pytest.raises(NotResumableError, match="it was saved by 2 processes, but this run has 1"):
        resumes.record(saved / "exact", **options)
    resumes.record(saved / "plain", how="plain", **options)
    assert Run.open(saved / "plain" / "run").is_complete
