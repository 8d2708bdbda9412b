"""Whether the states that ranks read belong together, and what is said where they do not."""

from dataclasses import replace
from typing import Any

import pytest

from det_callbacks.resume import GeneratorStates, Reduction, ResumeState
from det_callbacks.resume.ranks import belong_together, problems_of, row_of


def state(rank: int, world_size: int = 2, **changes: Any) -> ResumeState:
    reduction = Reduction(stage="settled", buckets=(("a", "b"), ("c",)), syncs_buffers=False)
    first = ResumeState(
        rank=rank,
        world_size=world_size,
        step=7,
        epoch=1,
        moment="draw",
        is_epoch_over=False,
        generators=GeneratorStates({}),
        common={"state of scheduler 0": "a"},
        sampler_seeds=(3, None),
        reduction=reduction,
    )
    return replace(first, **changes)


def test_what_several_ranks_save_is_read() -> None:
    for one in (state(1), state(1, reduction=None), state(0, reduction=Reduction(stage="first"))):
        assert ResumeState.from_bytes(one.to_bytes(), "x") == one
    alone = state(0, 1, common={}, sampler_seeds=(), reduction=None)
    assert ResumeState.from_bytes(alone.to_bytes(), "x") == alone
    assert not any(name in alone.to_bytes() for name in (b"common", b"sampler_seeds", b"reduction"))


def test_states_of_one_moment_belong_together() -> None:
    rows = [row_of(state(0)), row_of(state(1, moment="save"))]
    assert belong_together(rows) == []
    assert problems_of(rows) == []


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([row_of(state(0)), row_of(None)], "the state of rank 1 of 2 was not saved beside it"),
        ([row_of(None), row_of(state(1, 3)), row_of(None)], "the state of rank 0, 2 of 3 was not saved beside it"),
        ([row_of(None, why="it is gone"), row_of(state(1))], "it is gone"),
        ([row_of(state(0))], "it was saved by 2 processes, and there are 1 now"),
        ([row_of(state(0)), row_of(state(1)), row_of(None)], "it was saved by 2 processes, and there are 3 now"),
        ([row_of(state(0, 1)), row_of(None)], "it was saved by 1 process, and there are 2 now"),
        ([row_of(state(0)), row_of(state(1, 3))], "it was saved by 2 or 3 processes, and there are 2 now"),
        ([row_of(state(0)), row_of(state(1, step=8))], "by rank: step is 7, 8"),
        ([row_of(state(0)), row_of(state(1, is_mid_batch=True))], "by rank: is_mid_batch is False, True"),
        (
            [row_of(state(0)), row_of(state(1, reduction=Reduction(stage="first")))],
            "by rank: buckets is settled, first",
        ),
    ],
)
def test_others_do_not(rows: list[Any], text: str) -> None:
    (problem,) = belong_together(rows)
    assert problem.endswith(text)


def test_a_reason_names_the_ranks_that_have_it() -> None:
    first, second, third = state(0, 3, problems=("all", "some")), state(1, 3, problems=("all",)), state(2, 3)
    third = replace(third, problems=("all", "some"), common={"state of scheduler 0": "b", "state of X": "c"})
    assert problems_of([row_of(one) for one in (first, second, third)]) == [
        "all",
        "rank 0, 2: some",
        "state of scheduler 0 was not the same on rank 2 as on rank 0, and Lightning saves that of rank 0",
        "state of X was not the same on rank 2 as on rank 0, and Lightning saves that of rank 0",
    ]
