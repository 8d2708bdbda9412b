"""A checkpoint of several ranks that cannot be resumed: all of them refuse it, with the same reason, or none does."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy
from processes import run_ranks
from random_trainings import Augmented, SaveAfter
from ranks_resumes import record, resume
from torch.utils.data import DataLoader

from det_callbacks import check_checkpoint
from det_callbacks.checkpoint.parts import Part
from det_callbacks.errors import DetCallbacksError
from det_callbacks.runs.store import Run

pytestmark = pytest.mark.ddp

PLAIN = 'resume="plain"'
NAMES = ("whole", "missing", "foreign", "damaged", "first", "apart", "step")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two epochs, and copies of the checkpoint after its third step with one thing wrong."""
    folder = tmp_path_factory.mktemp("saved")

    def body(rank: int) -> None:
        record(folder, SaveAfter(folder, 2, 3), level="state")

    assert [one.exit_code for one in run_ranks(body, folder / "output")] == [0, 0]
    for name in NAMES:
        for suffix in ("", ".digests.json"):
            shutil.copy(folder / f"3.ckpt{suffix}", folder / f"{name}.ckpt{suffix}")
        shutil.copytree(folder / "3.ckpt.resume", folder / f"{name}.ckpt.resume")
    part = {name: folder / f"{name}.ckpt.resume" / "rank-00001.state" for name in NAMES}
    part["missing"].unlink()
    shutil.copy(folder / "2.ckpt.resume" / "rank-00001.state", part["foreign"])
    part["damaged"].write_bytes(b"{}")
    (folder / "first.ckpt.resume" / "rank-00000.state").unlink()
    change(part["apart"], "common", {"state of scheduler 0": "0"})
    change(part["step"], "step", 4)
    return folder


def change(path: Path, key: str, value: Any) -> None:
    """Write another value into a rank's state, as if it had been saved so."""
    part = Part.from_bytes(path.read_bytes(), "")
    path.write_bytes(replace(part, state={**part.state, key: value}).to_bytes())


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


def test_what_does_not_belong_together_is_refused_on_all_ranks(saved: Path) -> None:
    attempts = {name: (lambda name=name: resume(saved, saved / f"{name}.ckpt")) for name in NAMES if name != "whole"}
    attempts["data"] = lambda: resume(saved, saved / "whole.ckpt", LoadAlone())
    attempts["whole"] = lambda: resume(saved, saved / "whole.ckpt")
    told = outcomes(saved, attempts)
    for name, rank in (("missing", 1), ("foreign", 1), ("first", 0)):
        text = f"the state of rank {rank} of 2, which was saved beside it, is missing"
        assert all(kind == "NotResumableError" and status == 2 and text in said for kind, status, said in told[name])
        assert all(PLAIN in said for _, _, said in told[name])
    assert [kind for kind, _, _ in told["damaged"]] == ["RankError", "CheckpointFormatError"]
    assert all(status == 2 and "rank-00001.state is damaged" in said for _, status, said in told["damaged"])
    text = "state of scheduler 0 was not the same on rank 1 as on rank 0"
    assert all(status == 2 and text in said for _, status, said in told["apart"])
    text = "the ranks did not save it at the same moment, by rank: step is 3, 4"
    assert all(status == 2 and text in said for _, status, said in told["step"])
    assert [kind for kind, _, _ in told["data"]] == ["RankError", "NotResumableError"]
    assert all(status == 2 and "drawn again, are not those" in said for _, status, said in told["data"])
    assert told["whole"] == [["", 0, "(3, 13)"]] * 2
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
    assert PLAIN in said
    assert told["plain"][0][1] == 0
    assert Run.open(saved / "plain" / "run").is_complete


class Restoring(DataLoader[Any]):
    """A loader that restores itself."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def made(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of one Trainer; a strategy serves one only."""
    return {**options, "strategy": DDPStrategy(static_graph="strategy" in options)}


def test_what_lightning_saves_of_rank_0_alone_is_refused_on_all_ranks(tmp_path: Path) -> None:
    trainings: dict[str, dict[str, Any]] = {
        "static": {"strategy": "static"},
        "loading": {"data": lambda: Restoring(Augmented(num_samples=28), batch_size=2, shuffle=True)},
    }
    attempts: dict[str, Callable[[], Any]] = {}
    for name, options in trainings.items():
        folder = tmp_path / name
        attempts[f"record {name}"] = lambda folder=folder, options=options: record(
            folder, SaveAfter(folder, 2), level="state", **made(options)
        )
        attempts[name] = lambda folder=folder, options=options: resume(folder, folder / "2.ckpt", **made(options))
    told = outcomes(tmp_path, attempts)
    for name, text in (("static", "DDP(static_graph=True) adds"), ("loading", "its loaders restore themselves")):
        assert all(kind == "NotResumableError" and text in said for kind, _, said in told[name]), told[name]
