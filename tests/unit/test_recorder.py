import gc
import struct
import weakref

import pytest
import torch
from torch import Tensor, nn
from tracing import (
    assert_same,
    digests_by_name,
    position_of,
    reads_of,
    site_of,
    step_of,
    traced,
    with_role,
)

from det_callbacks.digest.components import digest_output, digest_tensor
from det_callbacks.errors import SelectionError
from det_callbacks.trace.hash_mode import HashMode


def test_a_digest_is_that_of_the_output():
    kept: list[Tensor] = []

    def body():
        kept.append(torch.ones(1, 3, 2, 2).to(memory_format=torch.channels_last))
        kept.append(torch.zeros(3).add_(1))

    trace = traced(body)
    assert trace.digests[position_of(trace, "_to_copy.default")] == digest_output(kept[0])
    assert trace.digests[position_of(trace, "add_.Tensor")] == digest_tensor(kept[1])
    assert trace.digests[position_of(trace, "zeros.default")] != digest_tensor(kept[1])
    entry = trace.layout.entries[position_of(trace, "_to_copy.default")]
    assert (entry.dtype, entry.shape, entry.stride) == ("float32", (1, 3, 2, 2), (12, 1, 6, 3))


def test_what_runs_between_pause_and_go_on_is_left_out():
    mode = HashMode()
    mode.pause()  # outside a step both change nothing
    mode.unpause()
    with mode:
        ones = torch.ones(2)
        mode.pause()
        total = ones.sin()
        mode.unpause()
        total.cos()
    sites = mode.trace.program.sites
    assert [site.op for site in sites if site.role == "output"] == [
        "aten.ones.default",
        "aten.cos.default",
    ]
    with mode:
        mode.pause()
    with mode:
        torch.ones(2)
    assert [site.op for site in mode.trace.program.sites if site.role == "output"] == [
        "aten.ones.default"
    ]


def test_what_is_skipped_is_counted():
    def body():
        x = torch.ones(2, 3)
        x.view(3, 2).t()
        torch.empty(2).fill_(1.0)
        with torch.profiler.record_function("here"):
            x.sum()
        torch.zeros(2, device="meta").add_(1)

    trace = traced(body)
    assert trace.program.ops_skipped == {
        "view": 2,
        "uninitialised": 1,
        "no_tensors": 2,
        "no_data": 2,
    }
    assert (trace.program.ops_digested, trace.program.ops_seen) == (3, 3 + 2 + 1 + 2 + 2)
    ops = [site.op.removeprefix("aten.") for site in with_role(trace, "output")]
    assert ops == ["ones.default", "fill_.Scalar", "sum.default"]


def test_ops_of_a_condition_are_an_opaque_region():
    def body():
        out = torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(3),))
        out.sum()

    trace = traced(body)
    assert trace.program.opaque_regions == ("higher_order.cond",)
    assert trace.program.ops_skipped["opaque"] == 1
    assert reads_of(trace, "sum.default") in (["input"], ["output[0]"])


def test_each_tensor_that_a_fused_op_writes_is_a_site_with_its_name():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    mode = HashMode(model)

    def body():
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()

    _, trace = (step_of(mode, body) for _ in range(2))  # the first makes the optimizer's state
    digests = zip(trace.program.sites, trace.digests.tolist(), strict=True)
    written = {
        site.name: digest for site, digest in digests if site.op == "aten._fused_adamw_.default"
    }
    state = digests_by_name(trace, "state")
    for of in ("", "exp_avg of ", "exp_avg_sq of "):
        for name in (f"{of}weight", f"{of}bias"):
            assert written[name] == state[name]


def test_lists_are_read_and_written_element_by_element():
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
    assert (
        position_of(trace, "_foreach_add_.Scalar", 1)
        in site_of(trace, "_foreach_mul.Tensor", 1).inputs
    )
    assert reads_of(trace, "_foreach_copy_.default", 1) == ["ones.default"]
    assert site_of(trace, "sum.default").inputs == (
        position_of(trace, "_foreach_copy_.default", 1),
    )


def test_passed_generators_are_read_and_keep_apart():
    def body():
        first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        torch.rand(3, generator=first)
        torch.empty(3).normal_(generator=second)
        torch.rand(3, generator=first)
        torch.rand(3, generator=torch.default_generator)

    trace = traced(body)
    assert {site.phase for site in with_role(trace, "generator")} == {"rng"}
    rows = [
        position
        for position, site in enumerate(trace.program.sites)
        if site.name == "generator on cpu"
    ]
    first_draw = position_of(trace, "rand.generator", 0)
    assert [trace.program.sites[row].inputs for row in rows] == [(), (), (rows[0], first_draw)]
    assert len({int(trace.digests[row]) for row in rows}) == 3
    assert [site_of(trace, "rand.generator", number).occurrence for number in range(3)] == [0, 1, 2]
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
    known = zip(trace.program.sites, trace.layout.entries, trace.digests, strict=True)
    rows = [(entry.dtype, int(digest)) for site, entry, digest in known if site.role == "value"]
    of_four = struct.unpack("<Q", struct.pack("<d", 4.0))[0]
    assert rows == [("float", of_four), ("int", 1), ("bool", 1), ("bool", 1)]
    assert reads_of(trace, "_local_scalar_dense.default") == ["sum.default"]


def test_a_step_keeps_no_tensor_alive_and_gives_addresses_back():
    class Marked(Tensor):
        pass

    mode = HashMode()
    for leave in (mode.finish, mode.abandon):
        mode.begin()
        x = torch.ones(1000)
        y = x.mul(2).as_subclass(Marked)
        references = [weakref.ref(x), weakref.ref(y)]
        address = x.untyped_storage()._cdata
        del x, y
        assert address not in {
            one.untyped_storage()._cdata for one in [torch.zeros(1000) for _ in range(40)]
        }
        gc.collect()
        assert [reference() for reference in references] == [None, None]
        assert mode.recorder.step.ledger.pins
        leave()
        assert mode.recorder.step.ledger.pins == []
        assert mode.recorder.step.ledger.writers == {}


@pytest.mark.parametrize("is_strange", [False, True])
def test_what_is_kept_from_step_to_step_is_bounded(monkeypatch, is_strange):
    monkeypatch.setattr("det_callbacks.trace.components.MAX_ENTRIES", 50)
    monkeypatch.setattr("det_callbacks.trace.call_graph.MAX_BYTES", 400_000)
    mode = HashMode()
    x = torch.ones(130)

    def step(number: int):
        part = x[:number].exp()
        for _ in range(number % 37):
            x.sin()
        if is_strange:
            part.to_sparse().coalesce()

    first = step_of(mode, lambda: step(3))
    for number in range(1, 120):
        step_of(mode, lambda number=number: step(number))
        assert len(mode.recorder.step.layouts.order) <= 60
        assert mode.recorder.step.graph.num_nodes <= 200 + 40
        assert mode.recorder.step.graph.num_bytes <= 400_000 + 40 * 3000
    assert_same(step_of(mode, lambda: step(3)), first)


def test_an_efficient_zero_tensor_has_no_memory_to_look_at():
    zero, ones = torch._efficientzerotensor((4, 5)), torch.ones(4, 5)
    mode = HashMode()
    for batch, num_zeros in ((None, 2), ({"zero": zero}, 3)):
        mode.begin(batch=batch)
        zero + ones
        torch._efficientzerotensor((4, 5))
        mode.record_values("forward", zero, "loss")
        assert mode.finish().digests.tolist().count(digest_tensor(torch.zeros(4, 5))) == num_zeros


@pytest.mark.parametrize("argument", ["modules", "phases"])
def test_a_lone_name_is_no_list_of_them(argument):
    with pytest.raises(
        SelectionError, match=rf"{argument} must be a list of strings; got the string 'forward'"
    ):
        HashMode(nn.Linear(2, 2), **{argument: "forward"})  # type: ignore[arg-type]


def test_a_draw_that_raises_leaves_no_read_of_its_generator():
    def body(fails):
        torch.rand(2)
        state = torch.get_rng_state()
        if fails:
            with pytest.raises(RuntimeError, match="p_in"):
                torch.bernoulli(torch.full((2,), 2.0))
            torch.set_rng_state(state)
        else:
            torch.full((2,), 2.0)
        torch.rand(2)

    torch.manual_seed(0)
    failed = traced(lambda: body(True))
    torch.manual_seed(0)
    assert_same(failed, traced(lambda: body(False)))


def test_an_exception_after_an_op_leaves_nothing_in_the_next_step():
    class Fails:
        needs_rows = True

        def selects(self, phase, module, op):
            return op == "aten.sin.default"

        def exchange(self, *_):
            raise MemoryError("planted")

    held = torch.ones(4)

    def body():
        held[:2].fill_(2.0)
        held.sin()  # a row for the whole tensor reads the row of its first half

    mode = HashMode()
    mode.recorder.output_hooks.every = (Fails(),)
    with pytest.raises(MemoryError, match="planted"):
        step_of(mode, body)
    mode.recorder.output_hooks.every = ()
    assert_same(step_of(mode, held.cos), traced(held.cos))


@pytest.mark.parametrize("level", ["module", "op"])
def test_gradients_of_module_outputs_are_recorded_where_only_the_backward_pass_is(level):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    trace = traced(
        lambda: model(torch.ones(3, 2)).sum().backward(), model, level=level, phases=("backward",)
    )
    names = {(site.phase, site.module, site.name) for site in trace.program.sites}
    assert {("backward", "0", "grad of output"), ("backward", "1", "grad of output")} <= names
    assert not any(phase == "forward" and name == "output" for phase, _, name in names)


def test_a_step_without_a_batch_has_no_sketch_of_the_one_before():
    mode = HashMode()
    step_of(mode, lambda: None, batch=torch.arange(40.0).view(4, 10))
    assert mode.sketch
    step_of(mode, lambda: None)
    assert mode.sketch == ()


@pytest.mark.parametrize("level", ["state", "module", "op"])
def test_a_step_does_not_depend_on_the_order_of_the_dicts_in_its_batches_and_outputs(level):
    inputs, masks, labels = (torch.rand(4, size) for size in (10, 3, 1))

    class Model(nn.Module):
        def forward(self, keys):
            found = {"logits": inputs * 2, "loss": inputs.sum()}
            return {key: found[key] for key in keys}

    def trained(sign):
        pairs = [("labels", labels), ("inputs", inputs), ("nested", {"b": masks, "a": labels})]
        model = Model()
        mode = HashMode(model, level=level)

        def body():
            model(["logits", "loss"][::sign])
            mode.add_batch({**dict(pairs[::sign])})

        return step_of(mode, body, batch=[inputs, dict(pairs[::sign])])

    assert_same(trained(1), trained(-1))
