"""Who wrote the bytes that an op reads: programs of writes and reads against a map of bytes,
and one of each kind.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from tracing import position_of, reads_of, site_of, traced, with_role

from det_callbacks.runs.program import UNWRITTEN, Program
from det_callbacks.runs.steps import StepTrace

ROWS = st.tuples(st.just("rows"), st.integers(0, 5), st.integers(1, 6))
COLUMNS = st.tuples(st.just("columns"), st.integers(0, 3), st.integers(1, 4))
TURNED = st.tuples(st.just("turned"), st.integers(0, 3), st.integers(1, 3))
EVERY_OTHER = st.tuples(st.just("every other"), st.integers(0, 1), st.integers(1, 2))
PICKED = st.tuples(st.just("picked"), st.integers(0, 5), st.integers(0, 3))


def view_of(buffer: Tensor, view: tuple[str, int, int]) -> Tensor:
    kind, first, second = view
    if kind == "rows":
        return buffer[first : first + second]
    if kind == "columns":
        return buffer[:, first : first + second]
    if kind == "turned":
        return buffer.t()[first : first + second]
    if kind == "every other":
        return buffer[first::2, ::second]
    return buffer[first, second]


def programs(
    view: st.SearchStrategy[tuple[str, int, int]],
) -> st.SearchStrategy[list[tuple[str, int, tuple]]]:
    action = st.sampled_from(["copy_", "add_", "sum"])
    return st.lists(st.tuples(action, st.integers(0, 2), view), min_size=1, max_size=12)


OPS = {"copy_": "copy_.default", "add_": "add_.Tensor", "sum": "sum.default"}


NOTHING = -2


def run(
    program: list[tuple[str, int, tuple]], dtype: torch.dtype
) -> tuple[StepTrace, Iterator[tuple[int, set[int]]]]:
    outside = torch.ones(6, 4, dtype=dtype)
    source = torch.ones(6, 4, dtype=dtype)

    def body() -> None:
        buffers = [torch.zeros(6, 4, dtype=dtype), torch.empty(6, 4, dtype=dtype), outside]
        for action, buffer, view in program:
            target = view_of(buffers[buffer], view)
            if action == "copy_":
                target.copy_(view_of(source, view))
            elif action == "add_":
                target.add_(1)
            else:
                target.sum()

    trace = traced(body)

    def reads() -> Iterator[tuple[int, set[int]]]:
        writers = [
            torch.full((6, 4), by) for by in (position_of(trace, "zeros.default"), NOTHING, -1)
        ]
        counts = dict.fromkeys(OPS, 0)
        for action, buffer, view in program:
            position = position_of(trace, OPS[action], counts[action])
            counts[action] += 1
            there = view_of(writers[buffer], view)
            if action != "copy_":
                yield position, set(there.flatten().tolist())
            if action != "sum":
                there.fill_(position)

    return trace, reads()


def through_inputs(program: Program, position: int) -> tuple[set[int], set[int]]:
    ops: set[int] = set()
    rows: set[int] = set()
    waiting = list(program.sites[position].inputs)
    while waiting:
        at = waiting.pop()
        if program.sites[at].role == "input":
            rows.add(at)
            waiting.extend(program.sites[at].inputs)
        else:
            ops.add(at)
    return ops, rows


@settings(max_examples=80, deadline=None)
@given(
    programs(ROWS) | programs(ROWS | COLUMNS | TURNED | EVERY_OTHER | PICKED),
    st.sampled_from([torch.uint8, torch.float32, torch.complex128]),
)
@example(
    [("copy_", 1, ("columns", 0, 2)), ("copy_", 1, ("columns", 2, 2)), ("sum", 1, ("rows", 1, 3))],
    torch.float32,
)
def test_no_writer_is_missed_and_of_rows_no_stranger_is_taken_for_one(program, dtype):
    trace, reads = run(program, dtype)
    has_read_nothing = False
    for position, found in reads:
        writers, is_all_known = found - {-1, NOTHING}, -1 not in found
        ops, rows = through_inputs(trace.program, position)
        assert writers <= ops
        assert is_all_known or rows
        # what was read then counts as written; what is about to be written may be anything
        if not has_read_nothing:
            has_read_nothing = (
                NOTHING in found and trace.program.sites[position].op == "aten.sum.default"
            )
            assert (
                UNWRITTEN in {trace.layout.entries[row].detail for row in rows}
            ) == has_read_nothing
        direct = site_of_kind(trace, position, "output")
        if all(view[0] == "rows" for *_, view in program):
            assert direct <= writers
            assert direct == writers or not is_all_known or site_of_kind(trace, position, "input")


def site_of_kind(trace: StepTrace, position: int, role: str) -> set[int]:
    sites = trace.program.sites
    return {at for at in sites[position].inputs if sites[at].role == role}


# one of each kind


def test_reads_of_part_of_an_unknown_tensor_become_inputs_once():
    outside = torch.arange(12.0).reshape(3, 4)
    trace = traced(
        lambda: [
            part.sum() for part in (outside[0], outside[0], outside[:, 1], outside, outside[2])
        ]
    )
    inputs = with_role(trace, "input")
    assert [(site.name, bool(site.inputs)) for site in inputs] == [
        (None, False),
        (None, True),
        (None, True),
    ]
    assert site_of(trace, "sum.default", 0).inputs == site_of(trace, "sum.default", 1).inputs
    assert site_of(trace, "sum.default", 4).inputs == (position_of(trace, "sum.default", 3) - 1,)


def test_out_variants_are_written_and_not_read():
    target = torch.ones(3)

    def body():
        torch.add(torch.ones(3), 1, out=target)
        torch.mul(target, 2, out=torch.empty(0)).sum()

    trace = traced(body)
    assert with_role(trace, "input") == []
    assert reads_of(trace, "add.out") == ["ones.default"]
    assert reads_of(trace, "mul.out") == ["add.out"]
    assert reads_of(trace, "sum.default") == ["mul.out"]


# what compiled code calls for "x.data = y" since torch 2.14
SHALLOW_COPY = getattr(torch.ops.aten, "shallow_copy_data_", None)


@pytest.mark.parametrize("exchange", [Tensor.set_, *filter(None, [SHALLOW_COPY])], ids=str)
def test_another_extent_or_storage_keeps_the_writers(exchange):
    def body():
        first, second = torch.zeros(2), torch.ones(3)
        exchange(first, second)
        first.sum()
        second.resize_(2)
        second.sum()
        second.resize_(8)
        second[3:].copy_(torch.ones(5))
        second.sum()

    trace = traced(body)
    assert with_role(trace, "input") == []
    assert reads_of(trace, "sum.default", 0) == ["ones.default"]
    assert reads_of(trace, "sum.default", 1) == ["ones.default"]
    assert reads_of(trace, "sum.default", 2) == ["ones.default", "copy_.default"]
    assert trace.program.ops_skipped["relayout"] == 3
