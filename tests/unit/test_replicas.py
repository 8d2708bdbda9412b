"""Replicas compared by digest, with real processes on gloo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from det_callbacks.digest import digest_tensor, format_digest
from det_callbacks.ranks import (
    RankGroup,
    ReplicaAudit,
    ReplicaDifference,
    ReplicaReport,
    ReplicaValue,
    replicated_state,
)
from det_callbacks.report.replicas import replicas_line, replicas_text

pytestmark = pytest.mark.ddp


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(3))
        self.optimizer = torch.optim.AdamW(self.parameters())
        self(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(inputs)))


def add_one_ulp(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        first = tensor.view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))


PLANT: dict[str, Callable[[Network], torch.Tensor]] = {
    "head.weight": lambda network: network.head.weight,
    "scale": lambda network: network.scale,
    "exp_avg of body.bias": lambda network: network.optimizer.state[network.body.bias]["exp_avg"],
}


def seeded() -> Network:
    torch.manual_seed(0)
    return Network()


def plant(group: RankGroup, rank: int, place: str) -> Any:
    network, audit = seeded(), ReplicaAudit(group)
    network.norm.running_mean += rank  # by design
    state = replicated_state(network, [network.optimizer], everybody=range(group.world_size))
    reports = [audit.compare(state, step=4)]
    if rank == group.world_size - 1:
        add_one_ulp(PLANT[place](network))
    state = replicated_state(network, [network.optimizer], everybody=range(group.world_size))
    reports += [audit.compare(state, step=5), audit.compare(state, step=6)]
    return reports, format_digest(digest_tensor(PLANT[place](seeded())))


@pytest.mark.parametrize(
    ("place", "world_size"),
    [("head.weight", 2), ("exp_avg of body.bias", 2), pytest.param("scale", 4, marks=pytest.mark.slow)],
)
def test_one_ulp_on_one_rank_is_named(place: str, world_size: int, tmp_path: Path) -> None:
    said = run(lambda group, rank: plant(group, rank, place), tmp_path, world_size)
    assert len(set(said)) == 1
    (first, second, third), digest = eval(said[0])
    assert (first.equal, first.last_agreement) == (True, 4)
    assert first.num_compared == 6 + 2 + 18
    assert first.left_out == {"running statistic": 2}
    (found,) = second.differences
    assert (found.name, found.step, found.last_agreement) == (place, 5, 4)
    assert found.is_tie == (world_size == 2)
    assert found.values[0].digest == digest != found.values[1].digest
    assert [value.ranks for value in found.values] == [tuple(range(world_size - 1)), (world_size - 1,)]
    assert second.last_agreement == third.last_agreement == 4
    assert third.differences[0].last_agreement == 4
    assert third.num_bytes < 300 + 8 * third.num_compared < first.num_bytes  # names go once


def on_mesh(group: RankGroup, rank: int, planted: dict[str, int]) -> Any:
    """A 2 x 2 mesh: replicated over the first dimension and sharded over the second, and other placements."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    row, column = mesh.get_coordinate()
    places: dict[str, tuple[Placement, Placement]] = {
        "hybrid": (Replicate(), Shard(0)),
        "across": (Shard(0), Replicate()),
        "everywhere": (Replicate(), Replicate()),
        "sharded": (Shard(0), Shard(1)),
        "summand": (Replicate(), Partial()),
    }
    module = nn.Module()
    for name, placements in places.items():
        shard = [at for at, one in zip((row, column), placements, strict=True) if isinstance(one, Shard)]
        local = torch.full((2, 2), float(sum(10 * at + 1 for at in shard)))
        if planted.get(name) == rank:
            add_one_ulp(local)
        module.register_parameter(name, nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False)))
    module.register_buffer("plain", torch.ones(2))
    optimizer = torch.optim.SGD([module.hybrid, module.sharded], momentum=0.9)
    for parameter, name in ((module.hybrid, "hybrid"), (module.sharded, "sharded")):
        optimizer.state[parameter] = {"step": torch.tensor(1.0 + (planted.get(f"step of {name}") == rank))}
    state = replicated_state(module, [optimizer], everybody=range(4))
    return ReplicaAudit(group).compare(state, step=0), {name: ranks for name, (_, ranks) in state.tensors.items()}


def test_only_what_a_mesh_replicates_is_compared_among_those_who_hold_it(tmp_path: Path) -> None:
    # a step count goes with its parameter: that of the sharded one may differ
    planted = {"step of sharded": 1, "hybrid": 3, "across": 3, "everywhere": 1, "step of hybrid": 0}
    said = [eval(one) for one in run(lambda group, rank: on_mesh(group, rank, planted), tmp_path, 4)]
    for rank, (report, holders) in enumerate(said):
        assert report.left_out == {"sharded": 2, "partial sum": 1}
        assert holders == {
            "hybrid": ((0, 2), (1, 3))[rank % 2],
            "across": ((0, 1), (2, 3))[rank // 2],
            "everywhere": (0, 1, 2, 3),
            "plain": (0, 1, 2, 3),
            "step of hybrid": ((0, 2), (1, 3))[rank % 2],
        }
        assert {one.name: [value.ranks for value in one.values] for one in report.differences} == {
            "hybrid": [(1,), (3,)],
            "across": [(2,), (3,)],
            "everywhere": [(0, 2, 3), (1,)],
            "step of hybrid": [(0,), (2,)],
        }


def disagree(group: RankGroup, rank: int) -> Any:
    """Other tensors, and the same bits of another type."""
    module = nn.Linear(2, 2)
    nn.init.ones_(module.weight), nn.init.ones_(module.bias)
    module.register_buffer("zero", torch.zeros(4, 1 + rank, dtype=(torch.float32, torch.float16)[rank]))
    if rank == 1:
        module.register_parameter("adapter", nn.Parameter(torch.ones(1)))
        module.bias = None
    return ReplicaAudit(group).compare(replicated_state(module, everybody=range(2)), step=0).differences


def test_ranks_with_other_tensors_are_named(tmp_path: Path) -> None:
    said = [eval(one) for one in run(disagree, tmp_path)]
    assert said[0] == said[1]
    found = {one.name: one.values for one in said[0]}
    missing = {name: [value.ranks for value in values if value.digest is None] for name, values in found.items()}
    assert missing == {"bias": [(1,)], "adapter": [(0,)], "zero": []}
    assert [value.layout for value in found["zero"]] == ["float32 [4, 1]", "float16 [4, 2]"]
    assert len({value.digest for value in found["zero"]}) == 1


def fully_sharded(group: RankGroup, rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Module()
    module.weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
    return ReplicaAudit(group).compare(replicated_state(module, everybody=range(2)), step=0)


def at_other_steps(group: RankGroup, rank: int) -> Any:
    return ReplicaAudit(group).compare(replicated_state(nn.Linear(1, 1), everybody=range(2)), step=rank)


def without_storage(group: RankGroup, rank: int) -> Any:
    module = nn.Linear(2, 2)
    if rank:
        module.weight.untyped_storage().resize_(0)
    return ReplicaAudit(group).compare(replicated_state(module, everybody=range(2)), step=0)


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        (fully_sharded, ["NothingComparedError: Nothing can be compared: no parameter has a replica on another"] * 2),
        (at_other_steps, ["RankError: The replicas cannot be compared: the ranks are no longer at the same step"] * 2),
        (
            without_storage,
            ["RankError: Rank 1 failed in the audit of the replicas", "DetCallbacksError: cannot digest"],
        ),
    ],
)
def test_what_cannot_be_compared_is_an_error_of_all(body: Any, texts: list[str], tmp_path: Path) -> None:
    for said, text in zip(run(body, tmp_path), texts, strict=True):
        assert said.startswith(text)


def test_what_is_left_out_is_counted() -> None:
    network = seeded()
    state = replicated_state(
        network,
        [network.optimizer],
        everybody=range(2),
        ddp_ignores={"body.bias"},
        has_own_buffers=True,
        ignore=["head.*"],
    )
    kinds = ("step", "exp_avg", "exp_avg_sq")
    compared = ["body.weight", "norm.weight", "norm.bias"]
    assert [*state.tensors] == [*compared, *(f"{kind} of {name}" for name in compared for kind in kinds)]
    assert state.num_parameters == 3
    assert state.left_out == {"ignored by DDP": 4, "ignored": 8, "running statistic": 2, "own buffer": 2}
    synchronised = nn.SyncBatchNorm(2)
    assert len(replicated_state(synchronised, everybody=range(2)).tensors) == 5
    assert replicated_state(synchronised, everybody=range(1)).left_out == {"sharded": 5}
    assert replicated_state(nn.Linear(2, 2, device="meta"), everybody=range(2)).left_out == {"no data": 2}


def test_state_of_two_optimizers_has_two_names() -> None:
    module = nn.Linear(1, 1, bias=False)
    optimizers = [torch.optim.Adam(module.parameters()) for _ in range(2)]
    for optimizer in optimizers:
        optimizer.state[module.weight] = {"step": 1}
    state = replicated_state(module, optimizers, everybody=range(2))
    assert [*state.tensors] == ["weight", "step of weight", "step of weight (2)"]


def difference(*ranks: tuple[int, ...], step: int = 7) -> ReplicaDifference:
    values = [ReplicaValue(digest=f"{i + 1:016x}", layout="float32 [2]", ranks=one) for i, one in enumerate(ranks)]
    return ReplicaDifference(name="net.w", step=step, last_agreement=3, values=tuple(values))


def report(*differences: ReplicaDifference) -> ReplicaReport:
    return ReplicaReport(
        step=7,
        last_agreement=3,
        world_size=4,
        num_compared=5,
        left_out={"sharded": 2, "running statistic": 1},
        differences=differences,
        num_bytes=16,
    )


def test_the_text_says_who_and_since_when() -> None:
    text = replicas_text(report(difference((0, 2, 3), (1,)), difference((0,), (1,), step=4)))
    assert text.startswith(
        "The replicas of this training differ after step 7: 1 tensor on 4 ranks. They last agreed after step 3."
    )
    one, other = "0000000000000001", "0000000000000002"
    assert f"  net.w: {other} on rank 1, and {one} on ranks 0, 2, 3\n" in text
    assert f"  net.w, after step 4: {one} on rank 0, {other} on rank 1; neither is a majority\n" in text
    left_out = "not compared: running statistics of each rank's own batches (1); shards that no other rank holds (2)"
    assert left_out in text
    line = replicas_line(report(), num_audits=3, num_bytes=48, has_differed=False)
    assert line.startswith("det_callbacks: replicas agree: 3 audits of 5 tensors on 4 ranks, the last after step 7; 48")
    assert left_out in line
    assert "  and 2 more differences\n" in replicas_text(report(*[difference((0,), (1,))] * 12))
