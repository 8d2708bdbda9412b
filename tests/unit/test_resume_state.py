"""The file of a resume state: what goes in comes out, and anything else is refused."""

import json

import pytest
import torch

from det_callbacks.errors import CheckpointFormatError
from det_callbacks.resume import DataPosition, GeneratorStates, ResumeState


def a_state() -> ResumeState:
    first = GeneratorStates.capture()
    torch.rand(3)
    return ResumeState(
        rank=0,
        world_size=1,
        step=7,
        epoch=1,
        moment="draw",
        is_epoch_over=False,
        generators=GeneratorStates.capture(),
        position=DataPosition(
            num_iterations=2,
            before_iteration=first,
            before_first=first,
            restarts=((3, first),),
            num_drawn=4,
            num_consumed=3,
            first_digest=(1 << 64) - 1,
            chain=12,
        ),
        num_gradients=2,
        problems=("one", "two"),
    )


def test_what_is_written_is_read() -> None:
    state = a_state()
    assert ResumeState.from_bytes(state.to_bytes(), "x") == state


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: b"[]",
        lambda content: b"\xff\xfe",
        lambda content: json.dumps({**json.loads(content), "position": None}).encode(),
        lambda content: json.dumps(
            {key: value for key, value in json.loads(content).items() if key != "step"}
        ).encode(),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(damage) -> None:
    with pytest.raises(CheckpointFormatError, match=r"rank-00000\.json is damaged") as caught:
        ResumeState.from_bytes(damage(a_state().to_bytes()), "x.ckpt.resume/rank-00000.json")
    assert caught.value.exit_code == 2


def test_a_file_of_another_version_is_an_error() -> None:
    content = json.dumps({**json.loads(a_state().to_bytes()), "schema": 9}).encode()
    with pytest.raises(CheckpointFormatError, match="has version 9"):
        ResumeState.from_bytes(content, "x")
