"""Replicas: what several ranks have to hold alike, and whether they do.

Under DDP that is all of the state; of DTensors on a mesh what is replicated along a dimension, among the ranks of one
shard. The digests of each rank's tensors are gathered and compared.
"""

import json
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from det_callbacks.digest import digest_bytes, digest_tensors, format_digest, unobserved
from det_callbacks.errors import NothingComparedError, RankError, SettingsError
from det_callbacks.ranks.group import RankGroup
from det_callbacks.runs.program import scalar_bits
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.named_tensors import StateWalker, states_of_parameters

TASK = "the audit of the replicas"

Ranks = tuple[int, ...]
LeftOut = Literal["sharded", "partial sum", "running statistic", "own buffer", "ignored by DDP", "ignored", "no data"]
"""Why a tensor is not compared: no other rank holds its shard; it is a summand of what all ranks hold; each rank has
its own by design; a name that DDP, or the user, leaves out; it has no data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaValue:
    """What some of the ranks that should agree hold.

    Attributes:
        digest: 16 hexadecimal digits; None where these ranks have no tensor of that name.
        layout: dtype and shape; None likewise.
        ranks: ascending.
    """

    digest: str | None
    layout: str | None
    ranks: Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDifference:
    """A tensor that is not the same on all ranks that should hold the same.

    Attributes:
        name: "net.head.weight", "exp_avg of net.head.weight".
        values: what there is instead of one value: the one that most ranks hold first, then by lowest rank.
    """

    name: str
    values: tuple[ReplicaValue, ...]

    @property
    def is_tie(self) -> bool:
        """Whether no value is held by more ranks than any other, so that nobody can tell which is right."""
        return len(self.values[0].ranks) == len(self.values[1].ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """The outcome of comparing replicas once; the same on all ranks, but for the counts.

    Attributes:
        step: after which they were compared; -1 before the first.
        last_agreement: the last step after which everything compared was equal; None where there is none.
        world_size: number of ranks.
        num_compared: tensors and numbers of this rank that another rank has to hold too.
        left_out: reason -> number of tensors of this rank that were not compared.
        differences: parameters first, then buffers, then optimizer state; of sharded tensors one for each shard.
    """

    step: int
    last_agreement: int | None
    world_size: int
    num_compared: int
    left_out: Mapping[str, int]
    differences: tuple[ReplicaDifference, ...]

    @property
    def equal(self) -> bool:
        """Whether everything compared was equal."""
        return not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedState:
    """What of a training's state is to be equal on several ranks.

    Attributes:
        tensors: name -> this rank's tensor (of a DTensor its shard) or number, and the ranks that have to hold the same
            bits, ascending: this one and at least one other.
        left_out: reason -> number of tensors that are not compared.
    """

    tensors: Mapping[str, tuple[Tensor | bool | int | float, Ranks]]
    left_out: Mapping[str, int]


def holders_of(tensor: object, everybody: Ranks) -> Ranks | LeftOut:
    """Return the ranks that have to hold what this rank holds of a tensor, or why there are none.

    A DTensor is replicated along the dimensions of its mesh that its placements say; ranks at one place of the other
    dimensions hold the same shard. Any other tensor is everybody's.
    """
    if not isinstance(tensor, DTensor):
        return everybody if len(everybody) > 1 else "sharded"
    if any(placement.is_partial() for placement in tensor.placements):
        return "partial sum"
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not part of the mesh
        return "no data"
    places = zip(tensor.placements, coordinate, strict=True)
    index = tuple(slice(None) if placement.is_replicate() else place for placement, place in places)
    with unobserved():
        ranks = tensor.device_mesh.mesh[index].reshape(-1).tolist()
    return tuple(sorted(ranks)) if len(ranks) > 1 else "sharded"


def replicated_state(
    module: nn.Module,
    optimizers: Iterable[Optimizer] = (),
    *,
    everybody: Sequence[int],
    ddp_ignores: Collection[str] = (),
    has_own_buffers: bool = False,
    ignore: Sequence[str] = (),
) -> ReplicatedState:
    """Return the parameters, buffers and optimizer state that are to be equal on several ranks.

    The state of a parameter goes where the parameter goes: a step count of a sharded parameter is compared among the
    ranks of its shard. Running statistics (``running_mean``, ``running_var``) are of each rank's own batches and left
    out, but for those of ``SyncBatchNorm``. Costs some microseconds a tensor; reads none.

    Args:
        module: whose parameters and buffers.
        optimizers: whose state.
        everybody: the ranks that have a replica each of what is not sharded.
        ddp_ignores: names that DDP does not synchronise.
        has_own_buffers: buffers are each rank's own (DDP with ``broadcast_buffers=False``).
        ignore: fnmatch patterns over names; the state of a parameter goes with it.

    Raises:
        SettingsError: an optimizer divides its state among the ranks.
    """
    everyone = tuple(sorted(everybody))
    tensors: dict[str, tuple[Tensor | bool | int | float, Ranks]] = {}
    left_out: Counter[str] = Counter()

    def add(name: str, value: Tensor | bool | int | float, holders: Ranks | LeftOut) -> LeftOut | None:
        """Compare a tensor, unless there is a reason not to, which is returned."""
        if any(fnmatchcase(name, pattern) for pattern in ignore):
            holders = "ignored"
        elif not holds_data(value):
            holders = "no data"
        if isinstance(holders, str):
            left_out[holders] += 1
            return holders
        unique, number = name, 2
        while unique in tensors:  # two optimizers may keep state of one parameter
            unique, number = f"{name} ({number})", number + 1
        tensors[unique] = value, holders
        return None

    walker = StateWalker(module)
    parameters = walker.parameters()
    reasons: dict[int, LeftOut | None] = {}
    for name, parameter in parameters:
        holders = "ignored by DDP" if name in ddp_ignores else holders_of(parameter, everyone)
        reasons[id(parameter)] = add(name, parameter, holders)
    synchronised = {name for name, child in module.named_modules() if isinstance(child, nn.SyncBatchNorm)}
    for name, buffer in walker.state()[len(parameters) :]:
        owner, _, last = name.rpartition(".")
        holders = holders_of(buffer, everyone)
        if name in ddp_ignores:
            holders = "ignored by DDP"
        elif last in ("running_mean", "running_var") and owner not in synchronised:
            holders = "running statistic"
        elif has_own_buffers:
            holders = "own buffer"
        add(name, buffer, holders)
    names = {id(parameter): name for name, parameter in parameters}
    for optimizer in optimizers:
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise SettingsError(
                "ZeroRedundancyOptimizer divides its state among the ranks, so it has no replicas. Audit a training "
                "with another optimizer, or leave the audit out."
            )
        for parameter, (name, value) in states_of_parameters([optimizer], names):
            like = value if isinstance(value, DTensor) else parameter
            add(name, value, reasons.get(id(parameter)) or holders_of(like, everyone))
    return ReplicatedState(tensors=tensors, left_out=dict(left_out))


class ReplicaAudit:
    """Compares what is to be equal across ranks, as often as asked.

    All ranks make one at the same place, and call its methods at the same steps. Each tells the digests of all its
    tensors, 8 bytes a tensor, and only where that changed also their names, layouts and holders.

    Args:
        group: of all ranks.

    Cost: one pass over the compared state at the speed of digests, and an exchange of 8 bytes a tensor.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._agreed: int | None = None
        self._listed: list[int] = []
        self._listings: list[list[tuple[str, str, Ranks]]] = []  # by rank: name, layout and holders of each tensor

    def compare(self, state: ReplicatedState, *, step: int) -> ReplicaReport:
        """Compare a state with the other ranks'.

        Args:
            state: what this rank has now.
            step: the last one that is done; -1 before the first.

        Raises:
            NothingComparedError: no parameter of any rank has a replica on another one.
            RankError: a rank does not come, is at another step, or failed.
            DetCallbacksError, TypeError: a tensor of this rank cannot be digested.
        """
        group = self._group
        listing = json.dumps([(name, _layout(value), ranks) for name, (value, ranks) in state.tensors.items()]).encode()

        def digests() -> bytes:
            values = [value for value, _ in state.tensors.values()]
            known = iter(digest_tensors([value for value in values if isinstance(value, Tensor)]))
            found = [next(known) if isinstance(value, Tensor) else scalar_bits(value)[0] for value in values]
            num_parameters = sum(isinstance(value, nn.Parameter) for value in values)
            return struct.pack(f"<{len(found) + 3}Q", step + 1, num_parameters, digest_bytes(listing), *found)

        rows = [struct.unpack(f"<{len(row) // 8}Q", row) for row in group.gather_bytes(digests, task=TASK)]
        if len({row[0] for row in rows}) > 1:
            steps = ", ".join(str(row[0] - 1) for row in rows)
            raise RankError(
                f"The replicas cannot be compared: the ranks are no longer at the same step ({steps}, by rank). Give "
                "all ranks equally many steps."
            )
        if not any(row[1] for row in rows):
            raise NothingComparedError(
                f"Nothing can be compared: no parameter has a replica on another of the {group.world_size} ranks: "
                "all are sharded, or left out. Audit a strategy with replicas (ddp, or a mesh with a replicated "
                "dimension), or compare runs with DeterminismCallback."
            )
        if (listed := [row[2] for row in rows]) != self._listed:
            told = group.gather_bytes(lambda: listing, task=TASK)
            self._listings = [[(name, layout, tuple(held)) for name, layout, held in json.loads(row)] for row in told]
            self._listed = listed
        differences = tuple(self._differences([row[3:] for row in rows]))
        if not differences:
            self._agreed = step
        return ReplicaReport(
            step=step,
            last_agreement=self._agreed,
            world_size=group.world_size,
            num_compared=len(state.tensors),
            left_out=dict(state.left_out),
            differences=differences,
        )

    def _differences(self, rows: Sequence[Sequence[int]]) -> Iterator[ReplicaDifference]:
        """Yield how the holders of each tensor differ, the same on every rank."""
        if len(set(self._listed)) == len(set(rows)) == 1:
            return  # as most often, and without sharding
        held = [
            {name: (format_digest(digest), layout) for (name, layout, _), digest in zip(listing, row, strict=True)}
            for listing, row in zip(self._listings, rows, strict=True)
        ]
        for name, holders in dict.fromkeys((name, ranks) for listing in self._listings for name, _, ranks in listing):
            by_value: dict[tuple[str | None, str | None], list[int]] = {}
            for rank in holders:
                by_value.setdefault(held[rank].get(name, (None, None)), []).append(rank)
            if len(by_value) > 1:
                values = [ReplicaValue(digest=one[0], layout=one[1], ranks=tuple(by_value[one])) for one in by_value]
                values.sort(key=lambda value: (-len(value.ranks), value.ranks))
                yield ReplicaDifference(name=name, values=tuple(values))


def _layout(value: object) -> str:
    """Return dtype and shape, "float32 [64, 768]" (of a DTensor the whole tensor's); the type of what is no tensor."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
