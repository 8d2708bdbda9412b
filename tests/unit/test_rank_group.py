"""The group of the processes of a run, and replicas that it compares by digest:
with real processes on gloo.
"""

import time
from collections import OrderedDict
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from forked_ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from det_callbacks.digest.components import digest_tensor
from det_callbacks.digest.host import format_digest
from det_callbacks.environment.capture import capture_environment
from det_callbacks.errors import SettingsError
from det_callbacks.ranks.group import RankGroup, require_same_start, start_facts
from det_callbacks.ranks.replicas import ReplicaReport, compare_replicas, replicated_state

pytestmark = pytest.mark.ddp


def audit(group: RankGroup, module: nn.Module, *optimizers: Any, step: int = 0) -> ReplicaReport:
    everybody = range(group.world_size)
    return compare_replicas(
        group, lambda: replicated_state(module, optimizers, everybody=everybody), step=step
    )


def hang(group: RankGroup, rank: int) -> Any:
    return time.sleep(3) if rank else group.gather(lambda: 0, task="it")


def without_storage(group: RankGroup, rank: int) -> Any:
    module = nn.Linear(2, 2)
    if rank:
        module.weight.untyped_storage().resize_(0)
    return audit(group, module)


FAILED = (
    "RankError: Rank 1 failed in the audit of the replicas after step 0, so this rank (0 of 2) "
    "stops too: Det"
)
AT = (
    "RankError: Rank {} of 2 is at the audit of the replicas after step {}, but rank {} at the "
    "audit of the replicas "
)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            hang,
            (
                (
                    "RankError: Rank 0 of 2 did not hear from all others within 2 seconds, or one "
                    "of them"
                ),
                "None",
            ),
        ),
        (
            lambda group, rank: audit(group, nn.Linear(1, 1), step=rank),
            (AT.format(0, 0, 1), AT.format(1, 1, 0)),
        ),
        (without_storage, (FAILED, "DetCallbacksError: cannot digest")),
    ],
)
def test_what_ranks_hear_of_each_other(body, said, tmp_path):
    for heard, begin in zip(run(body, tmp_path), said, strict=True):
        assert str(heard).startswith(begin)


FACTS = {"torch.version": "2.13", "weights": "00ff", "other": 0}
OLD, MANY = {**FACTS, "torch.version": "2.12"}, {f"entry {number}": number for number in range(9)}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            [FACTS, FACTS, OLD, FACTS],
            'version is "2.12" on rank 2, but "2.13" on ranks 0, 1 and 3. Nothing was',
        ),
        (
            [FACTS, {**FACTS, "weights": None}],
            'weights is null on rank 1, but "00ff" on rank 0. Nothing was',
        ),
        ([MANY, {}], "; and 4 more"),
    ],
)
def test_who_starts_otherwise_is_named(told, said):
    with pytest.raises(SettingsError) as caught:
        require_same_start(
            Mock(world_size=2, gather=lambda *_, **__: told),
            {"environment": {}, "selection": {}},
            None,
        )
    assert said in str(caught.value)


def test_facts_hold_versions_and_settings_and_no_seed():
    environment = msgspec.to_builtins(capture_environment(choices={"trainer": {"world_size": 2}}))
    environment["settings.seed"] = {"value": 5, "is_machine": False, "changes_bits": True}
    facts = start_facts({"environment": environment, "selection": {"level": "op"}})
    assert {
        "torch.version",
        "python.version",
        "code.git_commit",
        "selection.level",
        "trainer.world_size",
    } <= set(facts)
    assert "settings.deterministic_algorithms" in facts
    assert ("settings.cudnn_benchmark" in facts) is torch.cuda.is_available()
    assert not {"settings.seed", "cpu.model"} & set(facts)


def on_mesh(group: RankGroup, rank: int, planted: dict[str, int]) -> Any:
    """A 2 x 2 mesh: replicated over the first dimension and sharded over the second,
    and other placements.
    """
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
        shard = [
            at for at, one in zip((row, column), placements, strict=True) if isinstance(one, Shard)
        ]
        local = torch.full((2, 2), float(sum(10 * at + 1 for at in shard)))
        if planted.get(name) == rank:
            local.view(torch.int32)[0, 0] += 1
        module.register_parameter(
            name, nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))
        )
    module.register_buffer("plain", torch.ones(2))
    optimizer = torch.optim.SGD([module.hybrid, module.sharded], momentum=0.9)
    for parameter, name in ((module.hybrid, "hybrid"), (module.sharded, "sharded")):
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0 + (planted.get(f"step of {name}") == rank))
        }
    held = replicated_state(module, [optimizer], everybody=range(4)).tensors
    return audit(group, module, optimizer), {name: ranks for name, (_, ranks) in held.items()}


def test_only_what_a_mesh_replicates_is_compared_among_those_who_hold_it(tmp_path):
    # a step count goes with its parameter: that of the sharded one may differ
    planted = {"step of sharded": 1, "hybrid": 3, "across": 3, "everywhere": 1, "step of hybrid": 0}
    said = run(lambda group, rank: on_mesh(group, rank, planted), tmp_path, 4)
    for rank, (report, holders) in enumerate(said):
        assert report.left_out == {"sharded": 2, "partial sum": 1}
        row, column = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        by_all = dict.fromkeys(("everywhere", "plain"), (0, 1, 2, 3))
        assert holders == {"hybrid": column, "step of hybrid": column, "across": row, **by_all}
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
    module.register_buffer(
        "zero", torch.zeros(4, 1 + rank, dtype=(torch.float32, torch.float16)[rank])
    )
    if rank == 1:
        module.register_parameter("adapter", nn.Parameter(torch.ones(1)))
        module.bias = None
    return audit(group, module).differences


def test_ranks_with_other_tensors_are_named(tmp_path):
    said = run(disagree, tmp_path)
    assert said[0] == said[1]
    found = {one.name: one.values for one in said[0]}
    missing = {
        name: [value.ranks for value in values if value.digest is None]
        for name, values in found.items()
    }
    assert missing == {"bias": [(1,)], "adapter": [(0,)], "zero": []}
    assert [value.layout for value in found["zero"]] == ["float32 [4, 1]", "float16 [4, 2]"]
    assert found["zero"][0].digest == format_digest(digest_tensor(torch.zeros(4, 1)))


def test_what_is_left_out_is_counted():
    network = nn.Sequential(
        OrderedDict(body=nn.Linear(4, 8), norm=nn.BatchNorm1d(8), head=nn.Linear(8, 2))
    )
    network.register_buffer("scale", torch.ones(3))
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    options = {"ddp_ignores": {"body.bias"}, "ignore": ["head.*"]}
    state = replicated_state(network, [optimizer], everybody=range(2), **options)
    kinds = ("step", "exp_avg", "exp_avg_sq")
    compared = ["body.weight", "norm.weight", "norm.bias"]
    buffers = ["scale", "norm.num_batches_tracked"]
    assert [*state.tensors] == [
        *compared,
        *buffers,
        *(f"{kind} of {name}" for name in compared for kind in kinds),
    ]
    assert state.left_out == {"ignored by DDP": 4, "ignored": 8, "running statistic": 2}
    for other in (others := [torch.optim.Adam(network.head.parameters()) for _ in range(2)]):
        other.state[network.head.bias] = {"step": 1}
    names = [*replicated_state(network, others, everybody=range(2)).tensors]
    assert names[-2:] == ["step of head.bias", "step of head.bias (2)"]
    # divides its state
    optimizer.__class__ = type("ZeroRedundancyOptimizer", (torch.optim.AdamW,), {})
    assert replicated_state(network, [optimizer], everybody=range(2)).left_out["sharded"] == 3 * 6
    synchronised = nn.SyncBatchNorm(2)
    assert len(replicated_state(synchronised, everybody=range(2)).tensors) == 5
    assert replicated_state(synchronised, everybody=range(1)).left_out == {"sharded": 5}
    assert replicated_state(nn.Linear(2, 2, device="meta"), everybody=range(2)).left_out == {
        "no data": 2
    }
