"""A checkpoint of several ranks: one that lacks the state of a rank is refused; Lightning alone may resume it."""

from pathlib import Path
from typing import Any

import pytest
from processes import Ended, run_ranks, train

from det_callbacks import DeterminismCallback
from det_callbacks.trace.store import Run

pytestmark = pytest.mark.ddp


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one epoch, and the checkpoint at its end."""
    folder = tmp_path_factory.mktemp("saved")

    def body(rank: int) -> None:
        trainer, _ = train(DeterminismCallback(folder / "run", mode="record"))
        trainer.save_checkpoint(folder / "epoch.ckpt")

    assert [one.exit_code for one in run_ranks(body, folder)] == [0, 0]
    return folder


def resume(saved: Path, how: Any) -> list[Ended]:
    def body(rank: int) -> None:
        callback = DeterminismCallback(saved / "run", mode="record", resume=how)
        train(callback, max_epochs=2, fit={"ckpt_path": str(saved / "epoch.ckpt")})

    return run_ranks(body, saved / how)


def test_a_state_that_was_not_saved_is_refused_on_all_ranks_and_lightning_goes_on_alone(saved: Path) -> None:
    refused = resume(saved, "exact")
    assert [one.exit_code for one in refused] == [2, 2], refused
    assert all("the state of rank 1 of 2 was not saved beside it" in one.output for one in refused)
    assert Run.open(saved / "run").is_complete
    ended = resume(saved, "plain")
    assert [one.exit_code for one in ended] == [0, 0], ended
    run = Run.open(saved / "run")
    assert run.is_complete
    assert [run.rank(rank).steps(0).tolist() for rank in run.ranks] == [[*range(8)]] * 2
    assert run.resumed_steps == {(0, 4)}
