import numpy as np
import pytest
import torch
from tracing import position_of, reads_of, site_of, traced, with_role


def test_a_sum_over_two_partial_writes_reads_both():
    def body():
        buffer = torch.empty(2, 3)
        buffer[0].copy_(torch.ones(3))
        buffer[1].copy_(torch.zeros(3))
        buffer.sum()

    trace = traced(body)
    assert reads_of(trace, "sum.default") == ["copy_.default", "copy_.default"]
    assert with_role(trace, "input") == []


def test_a_full_overwrite_cuts_what_came_before():
    def body():
        buffer = torch.ones(4)
        buffer[:2].mul_(2)
        buffer.sum()
        buffer.copy_(torch.zeros(4))
        buffer.sum()

    trace = traced(body)
    assert reads_of(trace, "sum.default", 0) == ["ones.default", "mul_.Tensor"]
    assert reads_of(trace, "sum.default", 1) == ["copy_.default"]


def test_a_chunk_written_in_place_leaves_its_neighbours_alone():
    def body():
        query, key, value = torch.ones(4, 6).chunk(3, dim=-1)
        query.mul_(2)
        key.sum()
        (query @ key.t()).sum()
        value.exp()

    trace = traced(body)
    assert reads_of(trace, "sum.default", 0) == ["ones.default"]
    assert reads_of(trace, "mm.default") == ["ones.default", "mul_.Tensor"]
    assert reads_of(trace, "exp.default") == ["ones.default"]


def test_views_of_views_lead_to_the_writer():
    def body():
        base = torch.arange(24.0).reshape(2, 3, 4)
        base.permute(2, 0, 1).unsqueeze(0).expand(5, 4, 2, 3).sum()
        base.detach().view(torch.int32).sum()
        base[1:, ::2].squeeze(0).t().contiguous()
        torch.ops.aten._unsafe_view(base, [24]).sum()
        base.transpose(0, 1).mul_(2)
        base.flatten().sum()
        torch.view_as_complex(base.reshape(12, 2)).sum()

    trace = traced(body)
    assert reads_of(trace, "sum.default", 0) == ["arange.default"]
    assert reads_of(trace, "sum.default", 1) == ["arange.default"]
    assert reads_of(trace, "clone.default") == ["arange.default"]
    assert reads_of(trace, "sum.default", 2) == ["arange.default"]
    assert reads_of(trace, "mul_.Tensor") == ["arange.default"]
    assert reads_of(trace, "sum.default", 3) == ["mul_.Tensor"]
    assert reads_of(trace, "sum.default", 4) == ["mul_.Tensor"]


def test_reads_of_part_of_an_unknown_tensor_become_inputs_once():
    outside = torch.arange(12.0).reshape(3, 4)

    def body():
        outside[0].sum()
        outside[0].exp()
        outside[:, 1].sum()
        outside[:, 1].exp()
        outside.sum()
        outside[2].sum()

    trace = traced(body)
    inputs = with_role(trace, "input")
    assert len(inputs) == 3
    assert inputs[0].inputs == ()
    assert {site.name for site in inputs} == {None}
    assert site_of(trace, "sum.default", 0).inputs == site_of(trace, "exp.default", 0).inputs
    column = position_of(trace, "sum.default", 1) - 1
    assert column in site_of(trace, "exp.default", 1).inputs
    assert site_of(trace, "sum.default", 3).inputs == (position_of(trace, "sum.default", 2) - 1,)


def test_out_variants_are_written_and_not_read():
    target = torch.ones(3)

    def body():
        torch.add(torch.ones(3), 1, out=target)
        target.sum()
        grown = torch.empty(0)
        torch.mul(target, 2, out=grown)
        grown.sum()

    trace = traced(body)
    assert with_role(trace, "input") == []
    assert reads_of(trace, "add.out") == ["ones.default"]
    assert reads_of(trace, "sum.default", 0) == ["add.out"]
    assert reads_of(trace, "mul.out") == ["add.out"]
    assert reads_of(trace, "sum.default", 1) == ["mul.out"]


def test_another_extent_or_storage_keeps_the_writers():
    def body():
        first, second = torch.zeros(2), torch.ones(3)
        first.set_(second)
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


def test_swapped_data_is_read_where_it_is():
    parameter = torch.nn.Parameter(torch.ones(3))

    def body():
        parameter.sum()
        parameter.data = torch.zeros(3)
        parameter.sum()

    trace = traced(body)
    assert reads_of(trace, "sum.default", 0) == ["input"]
    assert reads_of(trace, "sum.default", 1) == ["zeros.default"]


def test_freed_memory_that_is_used_again_makes_no_edge():
    sums = []

    def body():
        addresses = set()
        for value in range(20):
            part = torch.from_numpy(np.full(64, float(value)))
            addresses.add(part.data_ptr())
            sums.append(part.sum())
            torch.full((64,), value, dtype=torch.float64)
            del part
        assert len(addresses) < 20  # memory was reused, or this test shows nothing

    trace = traced(body)
    inputs = [position for position, site in enumerate(trace.program.sites) if site.role == "input"]
    assert len(inputs) == 20
    assert len({int(trace.digests[position]) for position in inputs}) == 20
    for number, position in enumerate(inputs):
        assert site_of(trace, "sum.default", number).inputs == (position,)


def test_ops_that_write_parts():
    def body():
        base = torch.zeros(4, 4)
        base.index_put_((torch.tensor([1]),), torch.ones(4))
        base.scatter_(0, torch.zeros(1, 4, dtype=torch.int64), 2.0)
        base.masked_fill_(base > 1, 3.0)
        base.sum()
        torch.cat([base, torch.ones(1, 4)]).sum()
        torch.stack([base, base])

    trace = traced(body)
    assert "zeros.default" in reads_of(trace, "index_put_.default")
    assert "index_put_.default" in reads_of(trace, "scatter_.value")
    assert reads_of(trace, "masked_fill_.Scalar") == ["scatter_.value", "gt.Scalar"]
    assert reads_of(trace, "sum.default", 0) == ["masked_fill_.Scalar"]
    assert reads_of(trace, "cat.default") == ["masked_fill_.Scalar", "ones.default"]
    assert reads_of(trace, "stack.default") == ["masked_fill_.Scalar"]


def test_an_op_that_raises_leaves_no_trace():
    outside = torch.ones(3)

    def body():
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(outside.reshape(1, 3), torch.ones(2, 2))
        outside.sum()

    trace = traced(body)
    assert [site.op for site in with_role(trace, "output")] == ["aten.ones.default", "aten.sum.default"]
    assert len(with_role(trace, "input")) == 1
    assert reads_of(trace, "sum.default") == ["input"]
