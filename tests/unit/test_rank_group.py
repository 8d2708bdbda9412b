"""The group of the processes of a run, with real processes on gloo, and what they compare before they train."""

import time
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run

from det_callbacks.callback.together import require_same, start_facts
from det_callbacks.environment import capture_environment
from det_callbacks.errors import RankError, RunExistsError, SettingsError
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
        time.sleep(5)
        return "slept"
    return group.gather(lambda: b"", task="it")


def be_elsewhere(group: RankGroup, rank: int) -> Any:
    return group.gather(lambda: b"", task=f"task {rank}")


LARGE = 500 + len("+a size\n") - 248  # what the first collective has no room for
SAID = repr(([[b"", b"xxx"], [b"", b"x" * 500]], [{"rank": 0}, {"rank": 1}], 3 * 256 + LARGE))
NOT_HEARD = "RankError: Rank 0 of 2 did not hear from all others within 3 seconds, or one of them"


@pytest.mark.ddp
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (exchange, (SAID, SAID)),
        (
            fail_on_one,
            (
                "RankError: Rank 1 failed in opening the run, so this rank (0 of 2) stops too: RunExistsError: it is",
                "RunExistsError: it is there",
            ),
        ),
        (leave, (NOT_HEARD, "'left'")),
        (hang, (NOT_HEARD, "'slept'")),
        (
            be_elsewhere,
            (
                "RankError: Rank 0 of 2 is at task 0, and rank 1 at task 1: they no longer do the same",
                "RankError: Rank 1 of 2 is at task 1, and rank 0 at task 0",
            ),
        ),
    ],
)
def test_what_ranks_hear_of_each_other(body: Any, said: tuple[str, str], tmp_path: Path) -> None:
    for heard, begin in zip(run(body, tmp_path), said, strict=True):
        assert heard.startswith(begin)


def test_one_process_talks_to_itself() -> None:
    group = RankGroup().open()
    assert group.gather(lambda: b"abc", task="it") == [b"abc"]
    assert group.agree(lambda: 5, task="nothing") == [5]
    with pytest.raises(RunExistsError):
        fail_on_one(group, 1)
    assert group.num_bytes == 0
    group.close()
    assert (RankError("text", 3, 1).rank, RankError("text", 3, 1).exit_code) == (3, 1)


FACTS = {"settings.cudnn_benchmark": False, "torch.version": "2.13", "weights": "00ff"}
MANY = [{f"entry {number}": rank for number in range(9)} for rank in range(2)]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            [FACTS, FACTS, {**FACTS, "torch.version": "2.12"}, FACTS],
            'torch.version is "2.12" on rank 2, and "2.13" on ranks 0, 1, 3. Nothing was trained; 2 other entries',
        ),
        (  # of two, rank 0 is taken for right
            [FACTS, {name: value for name, value in FACTS.items() if name != "weights"}],
            'weights is null on rank 1, and "00ff" on rank 0',
        ),
        (MANY, "; and 4 more"),
    ],
)
def test_who_starts_otherwise_is_named(told: list[dict[str, Any]], said: str) -> None:
    require_same([FACTS] * 3)
    with pytest.raises(SettingsError) as caught:
        require_same(told)
    assert said in str(caught.value)


def test_facts_hold_versions_and_settings_and_no_seed() -> None:
    environment = capture_environment(choices={"trainer": {"world_size": 2}}).to_dict()
    environment["settings.seed"] = {"value": 5, "is_machine": False, "changes_bits": True}
    facts = start_facts({"environment": environment, "selection": {"level": "op"}}, weights=None)
    assert {"torch.version", "python.version", "code.git_commit", "selection.level", "trainer.world_size"} <= set(facts)
    assert "settings.cudnn_benchmark" in facts
    assert not {"settings.seed", "weights", "cpu.model"} & set(facts)
