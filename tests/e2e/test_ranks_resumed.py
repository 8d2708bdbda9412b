"""A checkpoint of several ranks that cannot be resumed: all of them refuse it, with the same reason, or none does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy
from processes import run_ranks
from ranks_resumes import record, resume
from resumes import Augmented, SaveAfter
from torch.utils.data import DataLoader

from det_callbacks import check_checkpoint
from det_callbacks.errors import DetCallbacksError
from det_callbacks.runs.store import Run

pytestmark = pytest.mark.ddp

NAMES = ("whole", "missing", "foreign", "damaged")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two epochs, and copies of the checkpoint after its third step with one thing wrong."""
    folder = tmp_path_factory.mktemp("saved")
    ended = run_ranks(lambda rank: record(folder, SaveAfter(folder, 2, 3), level="state"), folder / "output")
    assert [one.exit_code for one in ended] == [0, 0]
    for name in NAMES:
        for suffix in ("", ".digests.json"):
            shutil.copy(folder / f"3.ckpt{suffix}", folder / f"{name}.ckpt{suffix}")
        shutil.copytree(folder / "3.ckpt.resume", folder / f"{name}.ckpt.resume")
    part = {name: folder / f"{name}.ckpt.resume" / "rank-00001.state" for name in NAMES}
    part["missing"].unlink()
    shutil.copy(folder / "2.ckpt.resume" / "rank-00001.state", part["foreign"])
    part["damaged"].write_bytes(b"{}")
    return folder


def outcomes(folder: Path, attempts: dict[str, Callable[[], Any]], *, world_size: int = 2) -> dict[str, list[Any]]:
    """Make attempts in the processes of one launch; return by name what each rank raised: kind, status and text."""

    def body(rank: int) -> None:
        told = {}
        for name, attempt in attempts.items():
            try:
                told[name] = ["", 0, str(attempt())]
            except DetCallbacksError as error:
                told[name] = [type(error).__name__, error.exit_code, str(error)]
        (folder / f"told-{rank}.json").write_text(json.dumps(told))

    ended = run_ranks(body, folder / "output", world_size=world_size)
    assert [one.exit_code for one in ended] == [0] * world_size, ended
    by_rank = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(world_size)]
    return {name: [told[name] for told in by_rank] for name in attempts}


class LoadAlone(pl.Callback):
    """Gives rank 1 other data."""

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            trainer.fit_loop._data_source.instance.dataset.rows[:] += 1


class Restoring(DataLoader[Any]):
    """A loader that restores itself."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


ALL = ["NotResumableError", "NotResumableError"]
MISSING = "the state of rank 1 of 2, which was saved beside it, is missing"
REFUSED = {
    "missing": (ALL, MISSING),
    "foreign": (ALL, MISSING),
    "damaged": (["RankError", "CheckpointFormatError"], "rank-00001.state is damaged"),
    "data": (["RankError", "NotResumableError"], "drawn again, are not those"),
    "seed": (ALL, "the seed of the sampler of loader 0 is not what it was then"),
    "first_step": (ALL, "DDP was about to put the gradients in other buckets"),
    "static": (ALL, "DDP(static_graph=True) adds"),
    "loading": (ALL, "its loader goes to its own place"),
}


def test_what_cannot_be_resumed_is_refused_on_all_ranks(saved: Path) -> None:
    attempts = {name: (lambda name=name: resume(saved, saved / f"{name}.ckpt")) for name in NAMES}
    attempts["data"] = lambda: resume(saved, saved / "whole.ckpt", LoadAlone())
    attempts["seed"] = lambda: resume(saved, saved / "whole.ckpt", seed=50)
    others: dict[str, Callable[[], dict[str, Any]]] = {  # a strategy serves one Trainer
        "first_step": dict,
        "static": lambda: {"strategy": DDPStrategy(static_graph=True)},
        "loading": lambda: {"data": lambda: Restoring(Augmented(num_samples=28), batch_size=2, shuffle=True)},
    }
    for name, options in others.items():
        folder, after = saved / name, 1 if name == "first_step" else 2

        def attempt(folder: Path = folder, after: int = after, options: Any = options) -> Any:
            record(folder, SaveAfter(folder, after), level="state", max_epochs=1, **options())
            return resume(folder, folder / f"{after}.ckpt", max_epochs=1, **options())

        attempts[name] = attempt
    told = outcomes(saved, attempts)
    assert told.pop("whole") == [["", 0, "(3, 13)"]] * 2
    for name, (kinds, text) in REFUSED.items():
        assert [kind for kind, _, _ in told[name]] == kinds, (name, told[name])
        assert all(status == 2 and text in said for _, status, said in told[name]), (name, told[name])
    report = check_checkpoint(saved / "missing.ckpt")
    assert (report.equal, report.missing_files) == (False, ("the part of rank 1",))
    assert check_checkpoint(saved / "whole.ckpt").equal


def test_another_number_of_processes_is_refused_and_lightning_goes_on_alone(saved: Path) -> None:
    def record_on(how: Any) -> Any:
        options = {"ckpt_path": saved / "whole.ckpt", "num_ranks": 1, "strategy": "auto", "max_epochs": 1}
        return record(saved / how, level="state", how=how, **options).global_step

    told = outcomes(saved, {"exact": lambda: record_on("exact"), "plain": lambda: record_on("plain")}, world_size=1)
    ((kind, status, said),) = told["exact"]
    assert (kind, status) == ("NotResumableError", 2)
    assert "it was saved by 2 processes, and there are 1 now" in said
    assert told["plain"][0][1] == 0
    assert Run.open(saved / "plain" / "run").is_complete
