"""Collectives between two real processes on gloo: DDP, FSDP2 and delays.

The processes are started once for all tests: each runs every scenario in the same
order and says what it saw.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tracing import step_of, traced, with_role

from det_callbacks import HashMode, digest_tensor
from det_callbacks.ranks.group import RankGroup
from det_callbacks.runs.steps import StepTrace

pytestmark = pytest.mark.ddp
NUM_STEPS = 3


def rows(trace: StepTrace) -> list[list[Any]]:
    return [
        [
            site.role,
            site.op,
            entry.detail if entry else "",
            int(bits),
            list(site.inputs),
            site.phase,
        ]
        for site, entry, bits in zip(
            trace.program.sites, trace.layout.entries, trace.digests, strict=True
        )
        if site.role in ("sent", "delivered")
    ]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def train(wrap: Callable[[nn.Module], nn.Module], rank: int, *, is_traced: bool) -> dict[str, Any]:
    inner = network()
    model = wrap(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mode = HashMode(inner)
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().sum().backward()
        optimizer.step()

    for _ in range(NUM_STEPS):
        with torch.no_grad():
            # what freed memory holds is another thing each time
            torch.empty(4096).fill_(rank + time.perf_counter())
        if is_traced:
            step_of(mode, step)
        else:
            step()
    found: dict[str, Any] = {
        "weights": [digest_tensor(parameter.detach()) for parameter in model.parameters()]
    }
    if is_traced:
        found |= {
            "rows": rows(mode.trace),
            "digests": [mode.trace.program.id, *mode.trace.digests.tolist()],
        }
        found["outside"] = [site.name for site in with_role(mode.trace, "input")]
    return found


def shard(model: nn.Module) -> nn.Module:
    fully_shard(model[0])
    return fully_shard(model)


STRATEGIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp_views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "fsdp": shard,
}


def train_all(rank: int) -> Any:
    ways = (True, True, False)
    return {
        name: [train(wrap, rank, is_traced=way) for way in ways]
        for name, wrap in STRATEGIES.items()
    }


def collectives(rank: int) -> Any:
    found = {}
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce_async": lambda x: _first(x, dist.all_reduce(x, async_op=True).wait()),
        "broadcast": lambda x: _first(x, dist.broadcast(x, 1)),
        "all_gather": lambda x: _first(out := torch.empty(8), dist.all_gather_into_tensor(out, x)),
        "message": lambda x: _first(x, dist.send(x, 1) if rank == 0 else dist.recv(x, 0)),
    }
    for name, call in calls.items():
        seen: list[Tensor] = []

        def body(call: Callable[[Tensor], Tensor] = call, seen: list[Tensor] = seen) -> None:
            x = torch.arange(4.0) + 10 * rank
            seen.extend([x.clone(), call(x) * 1.0])

        trace = traced(body)
        found[name] = {
            "rows": rows(trace),
            "sent": digest_tensor(seen[0]),
            "delivered": digest_tensor(seen[1]),
        }
    return found


def _first(value: Tensor, _: Any) -> Tensor:
    return value


def delayed(rank: int) -> Any:
    """Rank 1 comes late: rank 0 reads before, and after the wait."""

    def body() -> None:
        x = torch.ones(4)
        time.sleep(0.6 * rank)
        work = dist.all_reduce(x, async_op=True)
        _ = x + 1
        work.wait()
        _ = x + 2

    return rows(traced(body))


def scenarios(_: RankGroup, rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {"train": train_all(rank), "collectives": collectives(rank), "delayed": delayed(rank)}


@pytest.fixture(scope="module")
def said(tmp_path_factory: Any) -> Callable[[str], list[Any]]:
    ranks = run(scenarios, tmp_path_factory.mktemp("ranks"))
    return lambda name: [rank[name] for rank in ranks]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_is_followed_and_not_disturbed(said, strategy):
    for rank in said("train"):
        first, second, plain = rank[strategy]
        assert first["weights"] == second["weights"] == plain["weights"]
        assert first["digests"] == second["digests"]
        # what comes out is read from what went in
        seen = first["rows"]
        assert {row[2] for row in seen} == {""}, "nothing was in flight when it was read"
        reduce = (
            "c10d._reduce_scatter_base_.default"
            if strategy == "fsdp"
            else "c10d.allreduce_.default"
        )
        assert {row[5] for row in seen if row[:2] == ["sent", reduce]} == {"backward"}
        assert [row for row in seen if row[:2] == ["delivered", reduce]]
        assert all(row[4] for row in seen if row[0] == "delivered")
        # buffers of collectives are no inputs, but for the memory without
        # digests that FSDP2 gathers into
        assert {*first["outside"]} > dict(network().named_parameters()).keys()
        assert None not in first["outside"] or strategy == "fsdp"


def test_digests_are_those_of_what_went_in_and_came_out(said):
    for rank, found in enumerate(said("collectives")):
        for name, seen in found.items():
            sent = [row for row in seen["rows"] if row[0] == "sent"]
            delivered = [row for row in seen["rows"] if row[0] == "delivered"]
            puts_in = not (name == "broadcast" and rank == 0) and not (
                name == "message" and rank == 1
            )
            assert [row[3] for row in sent] == [seen["sent"] if puts_in else 0], (rank, name)
            gets = not (name == "message" and rank == 0)
            assert [row[2:4] for row in delivered] == [["", seen["delivered"]]] * gets, (rank, name)


def test_a_buffer_in_flight_has_no_digest(said):
    early, late = [row for row in said("delayed")[0] if row[0] == "delivered"]
    assert early[2:4] == ["in flight", 0]
    assert late[2:4] == ["", digest_tensor(torch.full((4,), 2.0))]
