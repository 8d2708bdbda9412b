"""Collectives in a trace, in a world of one process on gloo: the ops really run."""

import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from tracing import position_of, site_of, step_of, traced
from versions import TORCH

from det_callbacks import HashMode, digest_tensor
from det_callbacks.runs.program import Site
from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace import collectives
from det_callbacks.trace.collectives import Collectives, Delivery, shown_ranks

# torch 2.13 renames some of them
# torch's own functions
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def rows(trace: StepTrace, role: str) -> list[tuple[int, Site]]:
    return [(place, site) for place, site in enumerate(trace.program.sites) if site.role == role]


def summary(trace: StepTrace) -> list[tuple[str, str, str]]:
    return [
        (site.role, site.op.removesuffix(".default"), site.arguments)
        for site in trace.program.sites
        if site.role in ("sent", "delivered")
    ]


def reduce_twice(group: Any = None) -> None:
    x = torch.full((4,), 2.0)
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    (x + 1).sum()


def test_what_goes_in_and_what_comes_out_are_sites():
    trace = traced(reduce_twice)
    assert summary(trace) == [
        ("sent", "c10d.allreduce_", '{"reduce_op":"max","group":"0"}'),
        ("delivered", "c10d.allreduce_", "{}"),
    ]
    ((sent, sent_site),) = rows(trace, "sent")
    ((arrived, arrived_site),) = rows(trace, "delivered")
    read = [site.inputs for site in (sent_site, arrived_site, site_of(trace, "add.Tensor"))]
    assert read == [(position_of(trace, "full.default"),), (sent,), (arrived,)]
    assert sent_site.source[0].endswith("in reduce_twice")
    assert sent_site.source == arrived_site.source
    assert (
        int(trace.digests[sent])
        == digest_tensor(torch.full((4,), 2.0))
        == int(trace.digests[arrived])
    )
    assert trace.program.ops_seen == trace.program.ops_digested == 4
    group = dist.new_group([0])  # its name counts the groups made so far
    assert {
        traced(lambda group=group: reduce_twice(group)).program.id for group in (group, None)
    } == {trace.program.id}


CALLS: dict[str, tuple[Callable[[Tensor], Any], int, int]] = {
    "broadcast": (lambda x: dist.broadcast(x, 0), 1, 1),
    "reduce": (lambda x: dist.reduce(x, 0), 1, 1),
    "all_gather": (lambda x: _kept(out := [torch.empty(4)], dist.all_gather(out, x)), 1, 1),
    "all_gather_into": (
        lambda x: _kept(out := torch.empty(4), dist.all_gather_into_tensor(out, x)),
        1,
        1,
    ),
    "reduce_scatter": (lambda x: _kept(out := torch.empty(4), dist.reduce_scatter(out, [x])), 1, 1),
    "reduce_scatter_tensor": (
        lambda x: _kept(out := torch.empty(4), dist.reduce_scatter_tensor(out, x)),
        1,
        1,
    ),
    "gather": (lambda x: _kept(out := [torch.empty(4)], dist.gather(x, out)), 1, 1),
    "scatter": (lambda x: _kept(out := torch.empty(4), dist.scatter(out, [x])), 1, 1),
    "all_to_all_single": (
        lambda x: _kept(out := torch.empty(4), dist.all_to_all_single(out, x)),
        1,
        1,
    ),
    "barrier": (lambda _: dist.barrier(), 0, 0),
    "functional": (lambda x: functional.all_reduce(x, "sum", dist.group.WORLD), 1, 1),
    "functional_gather": (lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD), 1, 1),
    "functional_scatter": (
        lambda x: functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD),
        1,
        1,
    ),
    "functional_broadcast": (lambda x: functional.broadcast(x, 0, dist.group.WORLD), 1, 1),
    "functional_wait": (lambda x: functional.wait_tensor(_reduced(x)), 1, 1),
    "functional_coalesced": (
        lambda x: functional.all_reduce_coalesced([x, x + 1], "sum", dist.group.WORLD),
        2,
        1,
    ),
}
if TORCH >= (2, 15):
    CALLS["functional_wait_for_several"] = (lambda x: functional.wait_tensors([_reduced(x)]), 1, 1)


def _kept(out: Any, _: Any) -> Any:
    return out[0] if isinstance(out, list) else out


def _reduced(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)


def test_every_op_of_collectives_that_names_no_group_is_known():
    """A new one may be another way to wait, as wait_tensors is since torch 2.15."""
    names = {
        name.split(".")[0].replace("::", ".") for name in torch._C._dispatch_get_all_op_names()
    }
    ours = {
        name
        for name in names
        if name.startswith(("c10d.", "_c10d_functional.", "_c10d_functional_autograd."))
    }
    assert len(ours) > 30
    without_group = set()
    for name in ours:
        namespace, op = name.split(".")
        arguments = getattr(getattr(torch.ops, namespace), op).default._schema.arguments
        if not {"process_group", "group_name"} & {argument.name for argument in arguments}:
            without_group.add(name)
    assert without_group <= {*collectives._WAITS, *collectives._WITHOUT_DATA}
    assert {
        "_c10d_functional.wait_tensor",
        "_c10d_functional._wrap_tensor_autograd",
    } <= without_group


@pytest.mark.parametrize("name", CALLS)
def test_every_collective(name):
    call, num_sent, num_delivered = CALLS[name]
    seen: list[Tensor] = []
    unread: list[Tensor] = []

    def body() -> None:
        x = torch.arange(4.0)
        result = call(x)
        unread.extend(result[1:] if isinstance(result, list) else ())
        result = result[0] if isinstance(result, list | tuple) else x if result is None else result
        seen.append(result * 1.0)

    trace = traced(body)
    for tensor in unread:
        functional.wait_tensor(tensor)
    sent, delivered = rows(trace, "sent"), rows(trace, "delivered")
    assert (len(sent), len(delivered)) == (num_sent, num_delivered)
    expected = digest_tensor(torch.arange(4.0))
    assert {int(trace.digests[place]) for place, _ in (*sent[:1], *delivered)} <= {expected}
    assert seen[0].equal(torch.arange(4.0))
    if num_delivered:
        assert delivered[0][1].op.startswith(
            "_c10d_functional.wait" if name.startswith("functional") else "c10d"
        )
        # gloo copies out of a buffer of its own when it is waited for
        reader = "copy_.default" if name == "reduce_scatter_tensor" else "mul.Tensor"
        assert site_of(trace, reader).inputs == (delivered[0][0],)
        assert set(delivered[0][1].inputs) == {place for place, _ in sent}
    assert rows(trace, "input") == []


def test_what_is_under_way_when_a_step_ends_follows_from_nothing_in_the_next():
    model, works = nn.Linear(2, 2, bias=False), []
    mode = HashMode(model)
    # no Mock: it would keep the work, and gloo's threads, which a test that forks cannot have
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_is_done", lambda work: False)
        trace = step_of(
            mode, lambda: works.append(dist.all_reduce(model.weight.data, async_op=True))
        )
        (at,) = (
            at
            for at, site in enumerate(trace.program.sites)
            if (site.phase, site.name) == ("state", "weight")
        )
        assert (trace.layout.entries[at].detail, trace.digests[at]) == ("in flight", 0)
        trace = step_of(mode, lambda: model.weight * 2)
    (early, site), _ = rows(trace, "delivered")  # the op reads it, and so does the end of the step
    assert (site.inputs, int(trace.digests[early]), trace.layout.entries[early].detail) == (
        (),
        0,
        "in flight",
    )
    assert trace.program.ops_skipped["in_flight"] == 2
    works[0].wait()
    assert rows(step_of(mode, lambda: model.weight * 2), "delivered") == []


def test_collectives_outside_the_selection_are_counted_only():
    trace = traced(reduce_twice, modules=("nothing",))
    assert (summary(trace), trace.program.ops_skipped["collective"]) == ([], 1)


def test_a_collective_that_raises_leaves_no_site():
    def body() -> None:
        x = torch.ones(4)
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather([torch.empty(3)], x)
        _ = x + 1

    trace = traced(body)
    assert summary(trace) == []
    assert site_of(trace, "add.Tensor").inputs == (position_of(trace, "ones.default"),)


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [((0,), "0"), ((0, 1), "0-1"), ((1, 3), "1,3"), ((0, 1, 2, 3), "0-3"), ((1, 3, 5), "1,3,5")],
)
def test_ranks_are_shown_in_short(ranks, shown):
    assert shown_ranks(ranks) == shown


def delivery(work: Any, *, is_in_stream_order: bool = True) -> Delivery:
    known = {"site": mock.Mock(), "inputs": (0,), "tensor": mock.Mock()}
    return Delivery(work=work, is_in_stream_order=is_in_stream_order, **known)


@pytest.mark.parametrize(
    ("is_completed", "future_is_done"), [(True, None), (False, None), (False, False), (False, True)]
)
def test_what_is_done_has_arrived(is_completed, future_is_done):
    work = mock.Mock(**{"is_completed.return_value": is_completed})
    if future_is_done is None:
        work.get_future.side_effect = RuntimeError("there is none")
    work.get_future.return_value.done.return_value = future_is_done
    found = delivery(work)
    has_arrived = bool(is_completed or future_is_done)  # gloo: the future is first
    assert found.has_arrived() is has_arrived
    assert (found.work is None) is has_arrived, "it keeps the tensors of the collective alive"


def test_on_a_device_ops_wait_and_other_collectives_may_not():
    found = delivery(None, is_in_stream_order=False)
    assert found.has_arrived()
    assert not found.has_arrived(for_collective=True)
    assert delivery(None).has_arrived(for_collective=True)


def test_what_a_sparse_tensor_gets_is_no_delivery():
    """Gloo gives it other indices and values in a thread of its own,
    here before the call has returned.
    """
    deliver = Collectives._deliver

    def deliver_late(*args: Any) -> None:
        time.sleep(0.2)
        deliver(*args)

    def step() -> None:
        x = torch.eye(4).to_sparse()
        dist.all_reduce(x, async_op=True).wait()
        x.to_dense()

    with mock.patch.object(Collectives, "_deliver", deliver_late):
        trace = traced(step)
    assert len(rows(trace, "sent")) == 1
    assert not rows(trace, "delivered")
    assert len(site_of(trace, "_to_dense.default").inputs) == 2
