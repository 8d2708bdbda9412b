"""The state that is kept beside a checkpoint: what goes in comes out, and whether what ranks read belongs together."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from det_callbacks.errors import CheckpointFormatError
from det_callbacks.resume import GeneratorStates
from det_callbacks.resume.state import DataPosition, Reduction, ResumeState, problems_of


def state(**changes: Any) -> ResumeState:
    first = GeneratorStates.capture()
    torch.rand(3)
    position = DataPosition(before_iteration=first, before_first=first, num_drawn=4, num_consumed=3, chain=2**64 - 1)
    one = ResumeState(
        step=7,
        epoch=1,
        moment="draw",
        is_epoch_over=False,
        generators=GeneratorStates.capture(),
        position=position,
        common={"state of scheduler 0": "a"},
        sampler_seeds=(3, None),
        reduction=Reduction(stage="settled", buckets=(("a", "b"), ("c",)), syncs_buffers=False),
    )
    return replace(one, **changes)


@pytest.mark.parametrize("changes", [{}, {"reduction": None, "problems": ("one", "two"), "sampler_seeds": ()}])
def test_what_is_written_is_read(changes: dict[str, Any]) -> None:
    one = state(**changes)
    content = json.loads(json.dumps(one.to_dict()))
    assert ResumeState.from_dict(content, "x") == one
    for damaged in ({**content, "position": None}, {**content, "reduction": {}}, {"step": 7}):
        with pytest.raises(CheckpointFormatError, match=r"rank-00000\.state is damaged"):
            ResumeState.from_dict(damaged, "x.ckpt.resume/rank-00000.state")


def test_states_of_one_moment_belong_together() -> None:
    assert problems_of([state().row(), state(moment="save").row()]) == []
    (apart,) = problems_of([state().row(), state(step=8, reduction=Reduction(stage="first")).row()])
    assert apart.endswith("at the same moment, by rank: buckets is settled, first; step is 7, 8")


def test_a_reason_names_the_ranks_that_have_it() -> None:
    first, second, third = state(problems=("all", "some")), state(problems=("all",)), state()
    third = replace(third, problems=("all", "some"), common={"state of scheduler 0": "b", "state of X": "c"})
    assert problems_of([one.row() for one in (first, second, third)]) == [
        "all",
        "rank 0, 2: some",
        "state of scheduler 0 was not the same on rank 2 as on rank 0, and Lightning saves that of rank 0",
        "state of X was not the same on rank 2 as on rank 0, and Lightning saves that of rank 0",
    ]
