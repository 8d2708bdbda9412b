import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from late_device import doubles_are_late, late_device, overwrite_unseen
from torch import library
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from tracing import position_of, site_of, step_of, traced, verified

from det_callbacks.compare.ranks import compare_steps
from det_callbacks.runs.program import UNWRITTEN
from det_callbacks.runs.steps import MAX_INPUT_CHECKS, Expectation
from det_callbacks.trace.hash_mode import HashMode


@pytest.fixture(params=["on the host", "on a device"])
def _everywhere(request: pytest.FixtureRequest) -> Iterator[None]:
    with late_device() if request.param == "on a device" else nullcontext():
        yield


OUTSIDE = torch.ones(4)
HELD: list[torch.Tensor] = []
FACTOR = {"now": 2.0}


def written_whole(is_written: bool) -> str:
    x = torch.ones(4)
    if is_written:
        x.numpy()[2] = 7
    x.sum()
    return "sum.default"


def written_in_part(is_written: bool) -> str:
    x = torch.empty(2, 4)
    x[0].copy_(torch.ones(4))
    x[1].copy_(torch.ones(4))
    if is_written:
        x.numpy()[1, 2] = 7
    x.sum()
    return "sum.default"


def rewritten_in_place(is_written: bool) -> str:
    OUTSIDE.exp()
    if is_written:
        OUTSIDE.numpy()[0] = 3
    OUTSIDE.mul_(2)
    OUTSIDE.fill_(1)
    return "mul_.Tensor"


# on a device it is told only when it comes after the launch that reads what was there
# before (docs, what it sees)
def written_in_another_thread(is_written: bool) -> str:
    x = torch.ones(4)
    if is_written:
        worker = threading.Thread(target=lambda: x.mul_(3))
        worker.start()
        worker.join()
    torch.exp(x)
    return "exp.default"


def written_after_it_was_launched(is_written: bool) -> str:
    x = torch.ones(3).exp()
    x.resize_(3)  # launches what waits
    if is_written:
        overwrite_unseen(x)
    x.sum()
    HELD.append(x)  # only what is alive at the step's end can be looked at again
    return "sum.default"


def written_before_a_device_reads_it(is_written: bool) -> str:
    torch.ones(1, dtype=torch.float64)
    x = torch.ones(3)
    if is_written:
        x.numpy()[0] = 5
    x.to(torch.float64)
    return "_to_copy.default"


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (written_whole, nullcontext),
        (written_in_part, nullcontext),
        (rewritten_in_place, nullcontext),
        (written_in_another_thread, nullcontext),
        (written_after_it_was_launched, late_device),
        (written_before_a_device_reads_it, doubles_are_late),
    ],
)
def test_what_no_op_wrote_is_an_unseen_write(body, place):
    with place():
        trace = verified(body)
    assert trace.unseen_writes == {position_of(trace, body(False))}


@library.custom_op("det_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, look: str) -> torch.Tensor:
    seen = torch.from_numpy(x.numpy().copy()) if look == "numpy" else x.to(torch.float64)
    return seen * FACTOR["now"]


@pytest.mark.parametrize(("look", "place"), [("numpy", late_device), ("to", doubles_are_late)])
def test_an_op_that_looks_at_its_arguments_itself_can_be_the_origin(look, place):
    def body(is_changed: bool):
        torch.ones(1, dtype=torch.float64)
        FACTOR["now"] = 3.0 if is_changed else 2.0
        scaled(torch.ones(3).exp(), look)

    with place():
        assert verified(body).unseen_writes == frozenset()


@pytest.mark.usefixtures("_everywhere")
def test_an_op_that_reads_what_a_raw_kernel_made_in_fresh_memory_is_no_origin():
    def body(byte: int):
        x = torch.empty(4)
        ctypes.memset(x.data_ptr(), byte, x.nbytes)
        torch.cat([x, torch.empty(0)])

    found = compare_steps(*(traced(lambda byte=byte: body(byte)).view() for byte in (0, 1)))
    assert [(item.op, item.is_origin) for item in found.divergences] == [("aten.cat.default", None)]


@pytest.mark.usefixtures("_everywhere")
def test_an_op_that_computes_something_else_is_no_unseen_write():
    def body(is_changed: bool):
        x = torch.full((4,), 2.0)
        y = torch.exp(x)
        if is_changed:
            y.copy_(y * 2)
        y[:2].mul_(2)
        y.sum()
        x.t().exp()

    assert verified(body).unseen_writes == frozenset()
    # nor is what was written unseen in both
    assert verified(lambda _: written_whole(True)).unseen_writes == frozenset()


@pytest.mark.parametrize("beta", [0, 1])
def test_memory_that_an_op_is_told_to_ignore_is_not_read(beta):
    x = torch.ones(1, 2, 2)
    trace = traced(lambda: torch.baddbmm(torch.empty(1, 2, 2), x, x, beta=beta))
    read = [trace.layout.entries[position] for position in site_of(trace, "baddbmm.default").inputs]
    assert (
        [entry.detail for entry in read if entry is not None] == [""]
        if not beta
        else ["", UNWRITTEN]
    )


@pytest.mark.parametrize("is_sorted", [True, False])
def test_lengths_that_no_recorded_op_writes_make_no_origin(is_sorted):
    """What ``pad_packed_sequence`` returns as lengths is written by C++,
    into memory that an op allocated.
    """

    def body(*lengths: int):
        packed = pack_padded_sequence(torch.ones(3, 5, 2), torch.tensor(lengths), True, is_sorted)
        padded, found = pad_packed_sequence(packed, batch_first=True)
        return padded.sum(1) / (found - 1)[:, None]

    found = compare_steps(
        *(traced(lambda given=given: body(*given)).view() for given in ((5, 3, 2), (5, 4, 2)))
    )
    assert "aten.div.Tensor" in {item.op for item in found.divergences}
    assert found.origins == ()


def origins(
    body: Callable[[bool], Any], checks_left: int = MAX_INPUT_CHECKS
) -> list[tuple[str, bool | None]]:
    reference = traced(lambda: body(False))
    expected = Expectation.of(reference.digests, reference.program.id)
    expected.checks_left = checks_left
    trace = step_of(HashMode(), lambda: body(True), expected=expected)
    found = compare_steps(reference.view(), trace.view()).divergences
    return [
        (item.op.split(".")[1], item.is_origin) for item in found if item.is_origin is not False
    ]


@pytest.mark.usefixtures("_everywhere")
@pytest.mark.parametrize("num_extra", [0, 1], ids=["the same program", "an extra op first"])
def test_an_unseen_write_after_many_ops_that_pass_a_difference_on_makes_no_origin(num_extra):
    """Ops that read a difference use up no check."""

    def body(is_changed: bool):
        for _ in range(num_extra if is_changed else 0):
            torch.arange(5)
        for number in range(3):
            x = torch.full((4,), number + 2.0)
            x.resize_(4)  # launches what waits
            if is_changed:
                overwrite_unseen(x)
            y = x.exp()
            for _ in range(MAX_INPUT_CHECKS // 2):
                y = y.sin()
            HELD.append(x)

    assert origins(body) == [("arange", True)] * num_extra + [("exp", None)] * 3


@pytest.mark.usefixtures("_everywhere")
@pytest.mark.parametrize("num_extra", [0, 1], ids=["the same program", "an extra op first"])
def test_only_an_op_that_was_checked_is_an_origin(num_extra):
    def body(is_changed: bool):
        FACTOR["now"] = 3.1 if is_changed else 2.0
        for _ in range(num_extra if is_changed else 0):
            torch.arange(5)
        for number in range(5):
            scaled(torch.full((3,), number + 2.0), "numpy")

    told = [("arange", True)] * num_extra
    assert origins(body) == [*told, *[("scaled", True)] * 5]
    assert origins(body, 2 + num_extra) == [*told, *[("scaled", True)] * 2, *[("scaled", None)] * 3]


@pytest.mark.usefixtures("_everywhere")
def test_the_number_of_inputs_digested_again_is_bounded():
    expected = Expectation.of(np.zeros(0, dtype=np.uint64))
    step_of(HashMode(), lambda: [torch.ones(2).exp() for _ in range(100)], expected=expected)
    assert expected.checks_left == 0
