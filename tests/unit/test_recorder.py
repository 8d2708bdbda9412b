import gc
import struct
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from tracing import (
    digests_by_name,
    position_of,
    reads_of,
    step_of,
    traced,
    with_role,
)

from det_callbacks.digest import digest_output, digest_tensor
from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.hash_mode import HashMode


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.dropout(self.norm(self.first(x)), 0.5, self.training))


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


# What a digest is of


def test_a_digest_is_that_of_the_output():
    kept: list[Tensor] = []

    def body():
        kept.append(torch.arange(6.0).reshape(2, 3) + 0.5)
        kept.append(torch.ones(1, 3, 2, 2).to(memory_format=torch.channels_last))
        kept.append(torch.zeros(3).add_(1))

    trace = traced(body)
    assert trace.digests[position_of(trace, "add.Tensor")] == digest_tensor(kept[0])
    assert trace.digests[position_of(trace, "_to_copy.default")] == digest_output(kept[1])
    assert trace.digests[position_of(trace, "add_.Tensor")] == digest_tensor(kept[2])
    assert trace.digests[position_of(trace, "zeros.default")] != digest_tensor(kept[2])
    entry = trace.layout.entries[position_of(trace, "_to_copy.default")]
    assert entry is not None
    assert (entry.dtype, entry.shape, entry.stride) == ("float32", (1, 3, 2, 2), (12, 1, 6, 3))


# What is skipped


def test_what_is_skipped_is_counted():
    def body():
        x = torch.ones(2, 3)
        x.view(3, 2).t().unsqueeze(0).detach()
        torch.empty(2).fill_(1.0)
        torch.empty_like(x)
        x.new_empty(2)
        with torch.profiler.record_function("here"):
            x.sum()
        torch.zeros(2, device="meta").add_(1)

    trace = traced(body)
    assert trace.program.ops_skipped == {"view": 4, "uninitialised": 3, "no_tensors": 2, "no_data": 2}
    assert trace.program.ops_digested == 3
    assert trace.program.ops_seen == 3 + 4 + 3 + 2 + 2
    assert [site.op for site in with_role(trace, "output")] == [
        "aten.ones.default",
        "aten.fill_.Scalar",
        "aten.sum.default",
    ]


def test_workspaces_are_not_digested_and_make_no_inputs():
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 5)
    x = torch.randn(3, 2, 4)

    def body():
        lstm(x)[0].sum().backward()
        lstm.zero_grad()

    first, second = (traced(body, lstm) for _ in range(2))
    np.testing.assert_array_equal(first.digests, second.digests)
    ops = [site.op for site in with_role(first, "output")]
    assert any("lstm" in op or "rnn" in op for op in ops), ops


def test_batch_norm_writes_its_statistics_when_it_trains():
    norm = nn.BatchNorm1d(3)
    trace = traced(lambda: norm(torch.arange(12.0).reshape(4, 3)), norm)
    assert [(site.output, site.name) for site in with_role(trace, "output") if "batch_norm" in site.op] == [
        (0, None),
        (1, None),
        (2, None),
        (3, "running_mean"),
        (4, "running_var"),
    ]
    mean = trace.digests[position_of(trace, "native_batch_norm.default", 3)]
    assert mean == digest_tensor(norm.running_mean) == digests_by_name(trace, "state")["running_mean"]
    norm.eval()
    trace = traced(lambda: norm(torch.ones(4, 3)), norm)
    assert {site.name for site in with_role(trace, "output")} == {None}


def test_ops_of_a_condition_are_an_opaque_region():
    def body():
        out = torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(3),))
        out.sum()

    trace = traced(body)
    assert trace.program.opaque_regions == ("higher_order.cond",)
    assert trace.program.ops_skipped["opaque"] == 1
    assert reads_of(trace, "sum.default") in (["input"], ["output[0]"])


# In-place, foreach and fused ops


def adamw(**options: bool) -> tuple[Small, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Small()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def third_step_of_adamw(**options: bool) -> tuple[Small, StepTrace]:
    model, optimizer = adamw(**options)
    mode = HashMode(model)
    x = torch.randn(8, 4)
    return model, [step_of(mode, lambda: training_step(model, optimizer, x)) for _ in range(3)][-1]


def test_each_tensor_that_a_fused_op_writes_is_a_site_with_its_name():
    model, trace = third_step_of_adamw(fused=True)
    names = [site.name for site in with_role(trace, "output") if site.op == "aten._fused_adamw_.default"]
    parameters = [name for name, _ in model.named_parameters()]
    assert names == parameters + [f"{key} of {name}" for key in ("exp_avg", "exp_avg_sq") for name in parameters]
    state = digests_by_name(trace, "state")
    for position, site in enumerate(trace.program.sites):
        if site.op == "aten._fused_adamw_.default" and site.role == "output":
            assert trace.digests[position] == state[str(site.name)]


def test_a_foreach_op_reads_and_writes_element_by_element():
    model, trace = third_step_of_adamw(foreach=True)
    parameters = [name for name, _ in model.named_parameters()]
    updates = [position for position, site in enumerate(trace.program.sites) if "addcdiv_" in site.op]
    assert [trace.program.sites[position].name for position in updates if trace.program.sites[position].name] == (
        parameters
    )
    averages = [site for site in with_role(trace, "output") if site.op == "aten._foreach_lerp_.Scalar"]
    assert [site.name for site in averages] == [f"exp_avg of {name}" for name in parameters]
    for site, name in zip(averages, parameters, strict=True):
        read = [trace.program.sites[position] for position in site.inputs]
        assert len(read) == 2
        assert f"exp_avg of {name}" in {part.name for part in read}


def test_lists_of_different_writers_keep_apart():
    def body():
        first, second = torch.ones(2), torch.zeros(3)
        torch._foreach_add_([first, second], 1)
        torch._foreach_mul([first, second], torch.full((), 2.0))
        torch._foreach_copy_([first, second], [torch.ones(2), torch.ones(3)])
        second.sum()

    trace = traced(body)
    assert reads_of(trace, "_foreach_add_.Scalar", 0) == ["ones.default"]
    assert reads_of(trace, "_foreach_add_.Scalar", 1) == ["zeros.default"]
    assert reads_of(trace, "_foreach_mul.Tensor", 1) == ["_foreach_add_.Scalar", "full.default"]
    assert reads_of(trace, "_foreach_copy_.default", 1) == ["ones.default"]
    assert reads_of(trace, "sum.default") == ["_foreach_copy_.default"]


# Generators and values


def test_a_draw_reads_its_generator_and_follows_the_draw_before():
    def body():
        torch.rand(3)
        torch.rand(3)

    trace = traced(body)
    rows = [position for position, site in enumerate(trace.program.sites) if site.name == "torch.cpu"]
    start, before_first, before_second = rows
    first, second = (position_of(trace, "rand.default", number) for number in range(2))
    sites = trace.program.sites
    assert sites[start].inputs == ()
    assert sites[before_first].inputs == (start,)
    assert sites[before_second].inputs == (before_first, first)
    assert sites[first].inputs == (before_first,)
    assert sites[second].inputs == (before_second,)
    assert trace.digests[start] == trace.digests[before_first] != trace.digests[before_second]
    assert {site.phase for site in with_role(trace, "generator")} == {"rng"}


def test_passed_generators_are_read_and_keep_apart():
    def body():
        first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        torch.rand(3, generator=first)
        torch.empty(3).normal_(generator=second)
        torch.rand(3, generator=first)
        torch.rand(3, generator=torch.default_generator)

    trace = traced(body)
    rows = [position for position, site in enumerate(trace.program.sites) if site.name == "generator on cpu"]
    sites = trace.program.sites
    assert [sites[position].inputs for position in rows] == [
        (),
        (),
        (rows[0], position_of(trace, "rand.generator", 0)),
    ]
    assert len({int(trace.digests[position]) for position in rows}) == 3
    assert reads_of(trace, "rand.generator", 2) == ["torch.cpu"]
    assert reads_of(trace, "normal_.default") == ["generator on cpu"]


def test_numbers_that_leave_the_device_are_values():
    def body():
        x = torch.tensor([1.5, 2.5])
        x.sum().item()
        (x > 2).sum().item()
        bool((x > 2).any())
        torch.equal(x, x)

    trace = traced(body)
    values = {
        site.op + str(number): int(trace.digests[position])
        for number, (position, site) in enumerate(
            (position, site) for position, site in enumerate(trace.program.sites) if site.role == "value"
        )
    }
    assert list(values.values()) == [struct.unpack("<Q", struct.pack("<d", 4.0))[0], 1, 1, 1]
    assert reads_of(trace, "_local_scalar_dense.default") == ["sum.default"]
    dtypes = [
        entry.dtype
        for site, entry in zip(trace.program.sites, trace.layout.entries, strict=True)
        if site.role == "value" and entry is not None
    ]
    assert dtypes == ["float", "int", "bool", "bool"]


# What the recorder holds


def test_a_step_keeps_no_tensor_alive():
    class Marked(Tensor):
        pass

    mode = HashMode()
    references = []
    with mode:
        for _ in range(5):
            x = torch.ones(1000)
            y = x.mul(2).as_subclass(Marked)
            references += [weakref.ref(x), weakref.ref(y)]
            del x, y
        gc.collect()
        assert all(reference() is None for reference in references)


def test_one_reference_of_every_storage_is_given_back():
    mode = HashMode()
    x = torch.ones(3)

    def body():
        x.mul(2)
        x.add_(1)
        x[:2].exp()

    for _ in range(3):
        step_of(mode, body)
        assert mode.recorder.ledger.pins == []
        assert mode.recorder.ledger.writers == {}
    mode.begin()
    body()
    assert mode.recorder.ledger.pins
    mode.abandon()
    assert mode.recorder.ledger.pins == []


@pytest.mark.parametrize("is_strange", [False, True])
def test_layouts_are_bounded(monkeypatch, is_strange):
    monkeypatch.setattr("det_callbacks.trace.layouts.MAX_ENTRIES", 50)
    mode = HashMode()
    x = torch.ones(130)

    def step(number: int):
        part = x[:number].exp()
        if is_strange:
            part.to_sparse().coalesce()

    first = step_of(mode, lambda: step(3))
    layout = first.layout
    for number in range(1, 120):
        step_of(mode, lambda number=number: step(number))
        assert len(mode.recorder.layouts._order) <= 60
    again = step_of(mode, lambda: step(3))
    assert again.layout_id == first.layout_id
    assert again.layout == layout


def test_an_efficient_zero_tensor_has_no_memory_to_look_at():
    zero, ones = torch._efficientzerotensor((4, 5)), torch.ones(4, 5)
    mode = HashMode()
    digests = []
    for batch in (None, {"zero": zero}):
        mode.begin(batch=batch)
        zero + ones
        torch._efficientzerotensor((4, 5))
        mode.record_values("forward", zero, "loss")
        trace = mode.finish()
        digests.append([int(digest) for digest in trace.digests])
        assert [site.op for site in with_role(trace, "output")].count("aten._efficientzerotensor.default") == 1
    assert [found.count(digest_tensor(torch.zeros(4, 5))) for found in digests] == [2, 3]
