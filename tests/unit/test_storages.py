import warnings
from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tracing import position_of, traced

from det_callbacks.runs.program import Program
from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.storages import UNKNOWN, PartialWrites, Region, StorageLedger, region_of

NUM_ELEMENTS = 24


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A strided view of 24 bytes, with holes, overlaps or repetitions."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    stride = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    extent = sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) + 1
    while extent > NUM_ELEMENTS:
        stride = [step // 2 for step in stride]
        extent = sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) + 1
    offset = draw(st.integers(0, NUM_ELEMENTS - extent))
    return torch.zeros(NUM_ELEMENTS, dtype=torch.uint8).as_strided(shape, stride, offset)


def bytes_in(view: Tensor) -> frozenset[int]:
    places = torch.arange(NUM_ELEMENTS).as_strided(view.shape, view.stride(), view.storage_offset())
    return frozenset(places.flatten().tolist())


@settings(max_examples=100, deadline=None)
@given(views(), views())
def test_regions_are_the_bytes_of_views(first, second):
    one, other = region_of(first), region_of(second)
    assert (one.low, one.high) == (min(bytes_in(first)), max(bytes_in(first)) + 1)
    shared = bytes_in(first) & bytes_in(second)
    assert one.overlaps(other) == other.overlaps(one)
    if shared:
        assert one.overlaps(other)
    if one.contains(other):
        assert bytes_in(first) >= bytes_in(second)
    if not one.steps:
        assert bytes_in(first) == frozenset(range(one.low, one.high))
        assert one.contains(other) == (bytes_in(first) >= bytes_in(second))
        if not other.steps:
            assert one.overlaps(other) == bool(shared)


@settings(max_examples=100, deadline=None)
@given(st.lists(views(), min_size=1, max_size=6), views(), st.integers(0, 5))
def test_partial_writes_against_a_map_of_bytes(written, read, unknown):
    known = PartialWrites(is_uninitialised=False)
    last = [None] * NUM_ELEMENTS
    for position, view in enumerate(written):
        writer = UNKNOWN if position == unknown else position
        known.add(region_of(view), writer)
        for place in bytes_in(view):
            last[place] = writer
    there = {last[place] for place in bytes_in(read)}
    assert there - {None, UNKNOWN} <= set(known.writers(region_of(read)))
    if known.covers(region_of(read)):
        assert not there & {None, UNKNOWN}
    if not any(region_of(view).steps for view in [*written, read]):
        assert there - {None, UNKNOWN} == set(known.writers(region_of(read)))
        assert known.covers(region_of(read)) == (not there & {None, UNKNOWN})


def test_columns_keep_apart():
    rows = torch.zeros(4, 6)
    left, middle, right = (region_of(part) for part in rows.chunk(3, dim=1))
    assert not left.overlaps(middle)
    assert not left.overlaps(right)
    assert not right.overlaps(middle)
    assert left.overlaps(region_of(rows[:, 1:3]))
    assert middle.overlaps(region_of(rows[1]))
    assert not left.overlaps(region_of(rows[1, 2:]))
    heads = torch.zeros(2, 5, 3, 4, 8)  # queries, keys and values of 4 heads, as attention cuts them
    query, key, value = (region_of(part.transpose(1, 2)) for part in heads.unbind(2))
    assert not query.overlaps(key)
    assert not key.overlaps(value)
    assert query.overlaps(region_of(heads[1, 0, 0, 3]))


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


def programs(view: st.SearchStrategy[tuple[str, int, int]]) -> st.SearchStrategy[list[tuple[str, int, tuple]]]:
    action = st.sampled_from(["copy_", "add_", "sum"])
    return st.lists(st.tuples(action, st.integers(0, 2), view), min_size=1, max_size=12)


OPS = {"copy_": "copy_.default", "add_": "add_.Tensor", "sum": "sum.default"}


def run(program: list[tuple[str, int, tuple]]) -> tuple[StepTrace, Iterator[tuple[int, set[int], bool]]]:
    """Run a program of writes and reads; return for each read its site, its true writers, and whether all are known."""
    outside = torch.ones(6, 4)
    source = torch.ones(6, 4)

    def body() -> None:
        buffers = [torch.zeros(6, 4), torch.empty(6, 4), outside]
        for action, buffer, view in program:
            target = view_of(buffers[buffer], view)
            if action == "copy_":
                target.copy_(view_of(source, view))
            elif action == "add_":
                target.add_(1)
            else:
                target.sum()

    trace = traced(body)

    def reads() -> Iterator[tuple[int, set[int], bool]]:
        nothing = -2
        writers = [torch.full((6, 4), position_of(trace, "zeros.default")), torch.full((6, 4), nothing)]
        writers.append(torch.full((6, 4), -1))
        counts = dict.fromkeys(OPS, 0)
        for action, buffer, view in program:
            position = position_of(trace, OPS[action], counts[action])
            counts[action] += 1
            there = view_of(writers[buffer], view)
            if action != "copy_":
                found = set(there.flatten().tolist())
                yield position, found - {-1, nothing}, -1 not in found
            if action != "sum":
                there.fill_(position)

    return trace, reads()


def through_inputs(program: Program, position: int) -> tuple[set[int], set[int]]:
    """Return the ops that a site read, directly or through the input sites made for it, and those input sites."""
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


@settings(max_examples=40, deadline=None)
@given(programs(ROWS | COLUMNS | TURNED | EVERY_OTHER | PICKED))
def test_no_writer_is_missed(program):
    trace, reads = run(program)
    for position, writers, is_all_known in reads:
        ops, rows = through_inputs(trace.program, position)
        assert writers <= ops
        assert is_all_known or rows


@settings(max_examples=40, deadline=None)
@given(programs(ROWS))
def test_no_stranger_is_taken_for_a_writer(program):
    trace, reads = run(program)
    for position, writers, is_all_known in reads:
        direct = site_of_kind(trace, position, "output")
        assert direct <= writers
        if is_all_known and not site_of_kind(trace, position, "input"):
            assert direct == writers


def site_of_kind(trace: StepTrace, position: int, role: str) -> set[int]:
    sites = trace.program.sites
    return {at for at in sites[position].inputs if sites[at].role == role}


def test_the_ledger_forgets_what_followed_an_op_that_raised():
    ledger = StorageLedger()
    whole, part = torch.zeros(4), torch.zeros(4)
    ledger.write(whole, 5)
    ledger.write(part[:2], 3)
    ledger.write(part[2:], 6)
    ledger.drop_from(5)
    assert ledger.writers_of(whole) == []
    assert ledger.writers_of(part) == [3]
    ledger.close()
    assert ledger.writers_of(part) == []
    assert ledger.pins == []


def test_an_unseen_write_to_a_part_keeps_the_rest():
    ledger = StorageLedger()
    tensor = torch.zeros(4, 4)
    ledger.write(tensor, 1)
    ledger.forget(tensor[2])
    known = ledger.writers[tensor.untyped_storage()._cdata]
    assert isinstance(known, PartialWrites)
    assert known.covers(region_of(tensor[:2]))
    assert not known.covers(region_of(tensor[1:3]))
    ledger.write(tensor[2], 7)
    assert known.covers(region_of(tensor))
    assert ledger.writers_of(tensor) == [1, 7]
    ledger.forget(tensor)
    assert ledger.writers == {}
    ledger.close()


def test_empty_and_nested_tensors_have_regions():
    assert region_of(torch.zeros(0, 3)[:, 1:]) == Region(4, 4, 0)
    with warnings.catch_warnings(action="ignore"):  # torch says once a process that they are a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert region_of(nested) == Region(0, 20, 20)
