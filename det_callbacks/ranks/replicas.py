"""Replicas: finds the state that must be equal on several ranks, and compares it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from det_callbacks.digest.components import digest_state
from det_callbacks.digest.host import digest_bytes
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.errors import DetCallbacksError, NothingComparedError
from det_callbacks.ranks.group import RankGroup, by_majority
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.leaves import states_of_parameters

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaValue:
    """The value of some ranks; digest and layout are None if they have no such tensor."""

    digest: str | None
    layout: str | None
    ranks: Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDifference:
    """A tensor that differs between ranks that should have equal ones.

    Attributes:
        name: parameter, buffer or optimizer state, such as "exp_avg of net.head.weight".
        values: each value with its ``digest`` (16 hexadecimal digits), its ``layout`` ("float32
            [64, 768]") and the ``ranks`` that have it; most ranks first, then the lowest rank.

    Examples:
        >>> from det_callbacks.ranks.replicas import ReplicaValue
        >>> majority = ReplicaValue(
        ...     digest="535596f4196671ab", layout="float32 [2]", ranks=(0, 2, 3)
        ... )
        >>> other = ReplicaValue(digest="5775e421b7689c50", layout="float32 [2]", ranks=(1,))
        >>> ReplicaDifference(name="net.bias", values=(majority, other)).is_tie
        False
    """

    name: str
    values: tuple[ReplicaValue, ...]

    @property
    def is_tie(self) -> bool:
        """Whether no value has a majority, so the correct one is unknown."""
        return len(self.values[0].ranks) == len(self.values[1].ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """The outcome of one comparison of replicas; equal on all ranks, except the counts.

    Attributes:
        step: training batch after which the replicas were compared; -1 before the first.
        last_agreement: the last step at which all replicas agreed, or None.
        world_size: number of processes.
        num_compared: tensors and numbers that another rank also holds.
        left_out: reason -> number of tensors not compared.
        differences: the tensors that differ; a sharded tensor has one entry for each shard.

    Examples:
        >>> ReplicaReport(
        ...     step=99,
        ...     last_agreement=99,
        ...     world_size=2,
        ...     num_compared=12,
        ...     left_out={},
        ...     differences=(),
        ... ).equal
        True
    """

    step: int
    last_agreement: int | None
    world_size: int
    num_compared: int
    left_out: Mapping[str, int]
    differences: tuple[ReplicaDifference, ...]

    @property
    def equal(self) -> bool:
        """Whether all compared state was equal."""
        return not self.differences


class ReplicaError(DetCallbacksError):
    """Replicas differ; ``report`` has the tensors, the ranks, and the last agreement.

    Attributes:
        report: the ReplicaReport.

    Examples:
        >>> ReplicaError.exit_code
        1
    """

    exit_code = 1
    _data = ("report",)
    report: ReplicaReport | None = None


class ReplicatedState(NamedTuple):
    """The state of this rank that must be equal on several ranks."""

    # value, and the ranks that hold it
    tensors: dict[str, tuple[Tensor | bool | int | float, Ranks]]
    left_out: Counter[str]  # reason -> number of tensors not compared


def holders_of(tensor: object, everybody: Ranks) -> Ranks | str:
    """Return the ranks that hold the same part of a tensor, or why none do.

    Ranks share a part of a DTensor along the mesh dimensions that replicate it.
    """
    if not isinstance(tensor, DTensor):
        return everybody if len(everybody) > 1 else "sharded"
    if any(placement.is_partial() for placement in tensor.placements):
        return "partial sum"
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
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
    ignore: Sequence[str] = (),
) -> ReplicatedState:
    """Return the parameters, buffers and optimizer state that must be equal, without reading them.

    Each rank of ``everybody`` has a replica of unsharded tensors. Running statistics are included
    only for ``SyncBatchNorm``.
    """
    everyone = tuple(sorted(everybody))
    tensors, left_out = state = ReplicatedState({}, Counter())

    def add(name: str, value: Tensor | bool | int | float, holders: Ranks | str) -> str | None:
        if any(fnmatchcase(name, pattern) for pattern in ignore):
            holders = "ignored"
        elif not holds_data(value):
            holders = "no data"
        if isinstance(holders, str):
            left_out[holders] += 1
            return holders
        while name in tensors:  # two optimizers may have state for one parameter
            name += " (2)"
        tensors[name] = value, holders
        return None

    names: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for name, one in module.named_parameters():
        names[id(one)] = name
        holders = "ignored by DDP" if name in ddp_ignores else holders_of(one, everyone)
        reasons[id(one)] = add(name, one, holders)
    synchronised = {
        name for name, child in module.named_modules() if isinstance(child, nn.SyncBatchNorm)
    }
    for name, buffer in module.named_buffers():
        owner, _, last = name.rpartition(".")
        reason = None
        if name in ddp_ignores:
            reason = "ignored by DDP"
        elif last in ("running_mean", "running_var") and owner not in synchronised:
            reason = "running statistic"
        add(name, buffer, reason or holders_of(buffer, everyone))
    for optimizer in optimizers:
        is_divided = type(optimizer).__name__ == "ZeroRedundancyOptimizer"
        for parameter, (name, value) in states_of_parameters([optimizer], names):
            holders = holders_of(value if isinstance(value, DTensor) else parameter, everyone)
            add(name, value, reasons.get(id(parameter)) or ("sharded" if is_divided else holders))
    return state


def compare_replicas(
    group: RankGroup,
    find: Callable[[], ReplicatedState],
    *,
    step: int,
    last_agreement: int | None = None,
) -> ReplicaReport:
    """Compare the state of all ranks, which must be at the same step.

    The ranks exchange a digest per set of ranks, and, if one differs, the digests of all tensors.
    """
    held: list[tuple[str, str, str, Ranks]] = []  # name, digest, layout, holders
    left_out: Counter[str] = Counter()

    def look() -> tuple[bool, dict[Ranks, int]]:
        state = find()
        left_out.update(state.left_out)
        known = digest_state({name: value for name, (value, _) in state.tensors.items()})
        by_holders: dict[Ranks, list[object]] = {}
        for name, (_, holders) in state.tensors.items():
            held.append((name, known.tensors[name], known.layouts[name], holders))
            by_holders.setdefault(holders, []).append(held[-1])
        has_parameter = any(isinstance(value, nn.Parameter) for value, _ in state.tensors.values())
        digests = {
            holders: digest_bytes(repr(rows).encode()) for holders, rows in by_holders.items()
        }
        return has_parameter, digests

    task = f"the audit of the replicas after step {step}"
    told = group.gather(look, task=task)
    if not any(has_parameter for has_parameter, _ in told):
        raise NothingComparedError(
            f"No parameter has a replica on another of the {group.world_size} ranks, so nothing "
            "can be compared. Use a strategy with replicas (ddp, or a mesh with a replicated "
            "dimension), or compare runs with DeterminismCallback."
        )
    differences: list[ReplicaDifference] = []
    sets = {holders for _, digests in told for holders in digests}
    if any(len({told[rank][1].get(holders) for rank in holders}) > 1 for holders in sets):
        rows = group.gather(lambda: held, task=task)
        values = [{name: (digest, layout) for name, digest, layout, _ in row} for row in rows]
        for name, holders in dict.fromkeys(
            (name, holders) for row in rows for name, _, _, holders in row
        ):
            found = by_majority({rank: values[rank].get(name, (None, None)) for rank in holders})
            if len(found) > 1:
                shown = tuple(
                    ReplicaValue(digest=one[0], layout=one[1], ranks=ranks) for one, ranks in found
                )
                differences.append(ReplicaDifference(name=name, values=shown))
    return ReplicaReport(
        step=step,
        last_agreement=last_agreement if differences else step,
        world_size=group.world_size,
        num_compared=len(held),
        left_out=dict(left_out),
        differences=tuple(differences),
    )
