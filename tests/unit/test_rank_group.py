"""The group of the processes of a run, with real processes on gloo."""

import time
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run

from det_callbacks.errors import RankError, RunExistsError
from det_callbacks.ranks import RankGroup


def exchange(group: RankGroup, rank: int) -> Any:
    contents = [group.gather(lambda size=size: b"x" * (size * rank), task="a size") for size in (3, 500)]
    return contents, group.agree(lambda: {"rank": rank}, task="nothing"), group.num_bytes


def fail_on_one(group: RankGroup, rank: int) -> Any:
    def action() -> None:
        if rank == 1:
            raise RunExistsError("it is there", "refs/run1")

    return group.agree(action, task="opening the run")


def leave(group: RankGroup, rank: int) -> Any:
    return "left" if rank else group.gather(lambda: b"", task="it")


def hang(group: RankGroup, rank: int) -> Any:
    if rank:
        time.sleep(9)
        return "slept"
    return group.gather(lambda: b"", task="it")


def be_elsewhere(group: RankGroup, rank: int) -> Any:
    return group.gather(lambda: b"", task=f"task {rank}")


@pytest.mark.ddp
def test_everybody_hears_everybody(tmp_path: Path) -> None:
    said = run(exchange, tmp_path)
    assert said[0] == said[1]
    large = 500 + len("+a size\n") - 248  # what the first collective has no room for
    assert said[0] == repr(
        ([[b"", b"xxx"], [b"", b"x" * 500]], [{"rank": 0}, {"rank": 1}], 3 * 256 + large),
    )


@pytest.mark.ddp
def test_an_error_of_one_is_an_error_of_all(tmp_path: Path) -> None:
    others, own = run(fail_on_one, tmp_path)
    assert own == "RunExistsError: it is there"
    assert others == (
        "RankError: Rank 1 failed in opening the run, so this rank (0 of 2) stops too: RunExistsError: it is there"
    )


@pytest.mark.ddp
@pytest.mark.parametrize("body", [leave, hang])
def test_a_rank_that_does_not_come_is_an_error(body: Any, tmp_path: Path) -> None:
    waiting, _ = run(body, tmp_path)
    assert waiting.startswith("RankError: Rank 0 of 2 did not hear from all others within 5 seconds, or one of them")


@pytest.mark.ddp
def test_ranks_that_are_at_different_tasks_are_named(tmp_path: Path) -> None:
    said = run(be_elsewhere, tmp_path)
    assert said[0].startswith("RankError: Rank 0 of 2 is at task 0, and rank 1 at task 1: they no longer do the same")
    assert said[1].startswith("RankError: Rank 1 of 2 is at task 1, and rank 0 at task 0")


def test_one_process_talks_to_itself() -> None:
    group = RankGroup().open()
    assert group.gather(lambda: b"abc", task="it") == [b"abc"]
    assert group.agree(lambda: 5, task="nothing") == [5]
    with pytest.raises(RunExistsError):
        fail_on_one(group, 1)
    assert group.num_bytes == 0
    group.close()


def test_the_error_says_which_rank() -> None:
    error = RankError("text", 3, 1)
    assert (error.rank, error.exit_code) == (3, 1)
