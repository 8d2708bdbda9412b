import threading
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from late_device import late_device
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from tracing import position_of, site_of, traced

from det_callbacks.compare.step import compare_steps
from det_callbacks.runs.program import UNWRITTEN
from det_callbacks.runs.steps import Expectation
from det_callbacks.trace.hash_mode import HashMode


@pytest.fixture(params=["on the host", "on a device"])
def _everywhere(request: pytest.FixtureRequest) -> Iterator[None]:
    with late_device() if request.param == "on a device" else nullcontext():
        yield


def differing_step(body, model: nn.Module | None = None):
    """Trace a body whose argument changes its last op, expecting what it does without the change."""
    reference = traced(lambda: body(False), model)
    mode = HashMode(model)
    mode.begin(expected=Expectation.of(reference.digests))
    body(True)
    trace = mode.finish()
    assert trace is not None
    return reference, trace


def test_a_tensor_written_through_numpy_is_an_unseen_write():
    def body(is_written: bool):
        x = torch.ones(4)
        if is_written:
            x.numpy()[2] = 7
        x.sum()

    _, trace = differing_step(body)
    assert trace.unseen_writes == {position_of(trace, "sum.default")}


def test_a_part_written_through_numpy_is_an_unseen_write():
    def body(is_written: bool):
        x = torch.empty(2, 4)
        x[0].copy_(torch.ones(4))
        x[1].copy_(torch.ones(4))
        if is_written:
            x.numpy()[1, 2] = 7
        x.sum()

    _, trace = differing_step(body)
    assert trace.unseen_writes == {position_of(trace, "sum.default")}


def test_an_in_place_op_on_a_tensor_written_through_numpy_is_noticed():
    outside = torch.ones(4)

    def body(is_written: bool):
        outside.exp()
        if is_written:
            outside.numpy()[0] = 3
        outside.mul_(2)
        outside.fill_(1)

    _, trace = differing_step(body)
    assert trace.unseen_writes == {position_of(trace, "mul_.Tensor")}


# on a device it is told only when it comes after the launch that reads what was there before (docs, what it sees)
def test_a_write_in_another_thread_is_unseen():
    def body(is_written: bool):
        x = torch.ones(4)
        if is_written:
            worker = threading.Thread(target=lambda: x.mul_(3))
            worker.start()
            worker.join()
        torch.exp(x)

    _, trace = differing_step(body)
    assert trace.unseen_writes == {position_of(trace, "exp.default")}


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

    reference, trace = differing_step(body)
    assert len(reference.digests) != len(trace.digests)
    assert trace.unseen_writes == frozenset()


@pytest.mark.usefixtures("_everywhere")
def test_nothing_is_unseen_where_everything_agrees():
    def body(_: bool):
        x = torch.ones(4)
        x.numpy()[2] = 7
        x.sum()

    reference, trace = differing_step(body)
    np.testing.assert_array_equal(reference.digests, trace.digests)
    assert trace.unseen_writes == frozenset()


@pytest.mark.parametrize("beta", [0, 1])
def test_memory_that_an_op_is_told_to_ignore_is_not_read(beta: int):
    x = torch.ones(1, 2, 2)
    trace = traced(lambda: torch.baddbmm(torch.empty(1, 2, 2), x, x, beta=beta))
    read = [trace.layout.entries[position] for position in site_of(trace, "baddbmm.default").inputs]
    assert [entry.detail for entry in read if entry is not None] == [""] if not beta else ["", UNWRITTEN]


@pytest.mark.parametrize("is_sorted", [True, False])
def test_lengths_that_no_recorded_op_writes_make_no_origin(is_sorted: bool):
    """What ``pad_packed_sequence`` returns as lengths is written by C++, into memory that an op allocated."""

    def body(*lengths: int):
        packed = pack_padded_sequence(torch.ones(3, 5, 2), torch.tensor(lengths), True, is_sorted)
        padded, found = pad_packed_sequence(packed, batch_first=True)
        return padded.sum(1) / (found - 1)[:, None]

    reference, current = (traced(lambda lengths=lengths: body(*lengths)) for lengths in ((5, 3, 2), (5, 4, 2)))
    found = compare_steps(reference.view(), current.view())
    assert "aten.div.Tensor" in {item.op for item in found.divergences}
    assert found.origins == ()


@pytest.mark.usefixtures("_everywhere")
def test_the_number_of_inputs_digested_again_is_bounded():
    expected = Expectation.of(np.zeros(0, dtype=np.uint64))
    mode = HashMode()
    mode.begin(expected=expected)
    for _ in range(100):
        torch.ones(2).exp()
    mode.finish()
    assert expected.checks_left == 0
