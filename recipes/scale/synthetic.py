"""Synthetic runs: as many ranks, steps and sites as one likes,
in the format of a recorded run, without a training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from det_callbacks.runs.manifest import read_manifest
from det_callbacks.runs.peers import Peers
from det_callbacks.runs.program import Layout, Program, Site, TensorLayout
from det_callbacks.runs.writer import RunWriter

MANIFEST = {
    "selection": {
        "level": "op",
        "modules": ["*"],
        "phases": ["forward", "backward", "optimizer"],
        "every_n_steps": 1,
    },
    "environment": {},
    "settings": {},
}
NUM_LEADING = 2
"""Sites that a step begins with: its batch, and the state of a generator."""
STEPS_AN_EPOCH = 50

_FORWARD = (
    "aten.mm.default",
    "aten.add.Tensor",
    "aten.gelu.default",
    "aten.native_layer_norm.default",
)
_BACKWARD = (
    "aten.native_layer_norm_backward.default",
    "aten.gelu_backward.default",
    "aten.mm.default",
    "aten.sum.dim_IntList",
)
_OPTIMIZER = ("aten._foreach_mul_.Scalar", "aten._foreach_addcdiv_.ScalarList")
# phase, its ops, and its share of a step
_PHASES = (("forward", _FORWARD, 0.4), ("backward", _BACKWARD, 0.5), ("optimizer", _OPTIMIZER, 0.1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference that is planted.

    Attributes:
        rank: in which it starts.
        step: likewise.
        site: position in the step.
        spreads: whether it goes on as in a training: to all later sites of that step, and to all
            later steps of all ranks, which got its gradients. Otherwise it is one digest.
    """

    rank: int
    step: int
    site: int
    spreads: bool = False


def make_program(num_sites: int) -> Program:
    """Return the program of a step: a chain of ops in which each reads
    what the one before it wrote.
    """
    if num_sites <= NUM_LEADING:
        raise ValueError(f"a step has at least {NUM_LEADING + 1} sites; got {num_sites}")
    sites = [
        Site(
            phase="data",
            module="",
            op="",
            occurrence=0,
            output=0,
            role="named",
            subject="tensor",
            of="batch[0]",
        ),
        Site(
            phase="rng",
            module="",
            op="",
            occurrence=0,
            output=0,
            role="generator",
            subject="generator",
            of="torch.cpu",
        ),
    ]
    counts: dict[tuple[str, str, str], int] = {}
    for position in range(NUM_LEADING, num_sites):
        phase, ops, place = _phase_at((position - NUM_LEADING) / (num_sites - NUM_LEADING))
        layer = int(place * 24) if phase != "backward" else 23 - int(place * 24)
        key = (phase, f"model.layers.{layer}", ops[position % len(ops)])
        occurrence = counts[key] = counts.get(key, -1) + 1
        sites.append(
            Site(
                phase=key[0],
                module=key[1],
                op=key[2],
                occurrence=occurrence,
                output=0,
                role="output",
                inputs=(0,) if position == NUM_LEADING else (position - 1,),
                source=(f"model.py:{100 + position % 40} in forward",),
            )
        )
    return Program.of(
        sites, ops_seen=2 * num_sites, ops_digested=num_sites, ops_skipped={"view": num_sites}
    )


def make_layout(num_sites: int) -> Layout:
    """Return the layouts that go with it."""
    batch = TensorLayout(dtype="int64", shape=(8, 1024), stride=(1024, 1))
    output = TensorLayout(dtype="bfloat16", shape=(8, 1024, 4096), stride=(4194304, 4096, 1))
    return Layout(entries=(batch, None, *[output] * (num_sites - NUM_LEADING)))


class OneOf(Peers):
    """One process after the other, where a real run has all at once:
    whom it asks says what it says itself.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def gather(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        return [action()] * self.world_size


def write_run(
    path: Path,
    *,
    num_ranks: int,
    num_steps: int,
    num_sites: int,
    differences: Sequence[Difference] = (),
    seed: int = 0,
) -> int:
    """Write a run; return its bytes of digests.

    A run of the same seed and sizes is equal but for its differences.

    Takes about a second for 1 GB of digests on top of writing them, and the memory of one step.

    Raises:
        RunExistsError: there is one.
        ValueError: a difference lies outside the run.
    """
    for difference in differences:
        inside = (
            difference.rank < num_ranks,
            difference.step < num_steps,
            difference.site < num_sites,
        )
        if not all(inside):
            raise ValueError(
                f"{difference} lies outside {num_ranks} ranks x {num_steps} steps x {num_sites} "
                "sites"
            )
    program, layout = make_program(num_sites), make_layout(num_sites)
    for rank in range(num_ranks):
        if rank:
            manifest = read_manifest(path)
            writer = RunWriter(path, OneOf(rank, num_ranks), manifest, attempt=0, segment=0)
        else:
            writer = RunWriter.create(path, peers=OneOf(0, num_ranks), manifest=MANIFEST)
        writer.put_program(program)
        writer.put_layout(layout)
        for step in range(num_steps):
            digests = _digests(seed, rank, step, num_sites)
            for difference in differences:
                _plant(difference, rank, step, digests)
            writer.append(step, step // STEPS_AN_EPOCH, program.id, layout.id, digests)
        writer.close(complete=True)
    return 8 * num_ranks * num_steps * num_sites


def _phase_at(place: float) -> tuple[str, tuple[str, ...], float]:
    """Return phase, its ops, and how far in it a place in the step lies, each from 0 to 1."""
    start = 0.0
    for phase, ops, share in _PHASES[:-1]:
        if place < start + share:
            return phase, ops, (place - start) / share
        start += share
    phase, ops, share = _PHASES[-1]
    return phase, ops, min((place - start) / share, 0.999)


def _digests(seed: int, rank: int, step: int, num_sites: int) -> np.ndarray:
    """Return the digests of a step: each product is another number, since the factor
    is odd, and looks random.
    """
    start = np.uint64(((seed * 1_000_003 + rank) * 1_000_003 + step) * num_sites % 2**64)
    with np.errstate(over="ignore"):
        return (np.arange(num_sites, dtype=np.uint64) + start) * np.uint64(0x9E3779B97F4A7C15)


def _plant(difference: Difference, rank: int, step: int, digests: np.ndarray) -> None:
    if (rank, step) == (difference.rank, difference.step):
        stop = len(digests) if difference.spreads else difference.site + 1
        digests[difference.site : stop] ^= np.uint64(1)
    elif difference.spreads and step > difference.step:
        digests[NUM_LEADING:] ^= np.uint64(1)
