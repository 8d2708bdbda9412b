"""Which ranks have to hold the same bits of a tensor: replicas of DDP, and the replicated dimensions of a mesh."""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from det_callbacks.digest import unobserved
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.named_tensors import Entry, StateWalker, states_of_parameters

LeftOut = Literal[
    "sharded", "partial sum", "running statistic", "own buffer", "ignored by DDP", "ignored", "sharded state", "no data"
]
"""Why a tensor is not compared: no other rank holds its shard; it is a summand of what all ranks hold; each rank has
its own by design; a name that DDP, or the user, leaves out; a state that ZeroRedundancyOptimizer divides; no data."""

_RUNNING = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTensor:
    """A tensor or number of this rank, and who has to have the same.

    Attributes:
        name: qualified: "net.head.weight", "exp_avg of net.head.weight".
        value: of which a DTensor means this rank's shard.
        holders: the ranks that have to hold the same bits, ascending; this one is among them, and one other at least.
    """

    name: str
    value: Tensor | bool | int | float
    holders: tuple[int, ...]

    @property
    def layout(self) -> str:
        """Dtype and shape, "float32 [64, 768]" (of a DTensor the whole tensor's); the type of what is no tensor."""
        if not isinstance(self.value, Tensor):
            return type(self.value).__name__
        return f"{str(self.value.dtype).removeprefix('torch.')} {list(self.value.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedState:
    """What of a training's state is to be equal on several ranks.

    Attributes:
        tensors: parameters, buffers and optimizer state with their holders, each name once.
        left_out: reason -> number of tensors that are not compared.
        num_parameters: of the module's parameters that are compared.
    """

    tensors: tuple[ReplicaTensor, ...]
    left_out: Mapping[str, int]
    num_parameters: int


def holders_of(tensor: object, everybody: tuple[int, ...]) -> tuple[int, ...] | LeftOut:
    """Return the ranks that have to hold what this rank holds of a tensor, or why there are none.

    A DTensor is replicated along the dimensions of its mesh that its placements say; ranks at one place of the other
    dimensions hold the same shard. Any other tensor is everybody's. The mesh is one of global ranks.

    Args:
        tensor: of this rank.
        everybody: all ranks.
    """
    if not isinstance(tensor, DTensor):
        return everybody if len(everybody) > 1 else "sharded"
    if any(placement.is_partial() for placement in tensor.placements):
        return "partial sum"
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not part of the mesh
        return "no data"
    index = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )
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
    ignore: Iterable[str] = (),
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
    """
    everyone = tuple(sorted(everybody))
    patterns = tuple(ignore)
    tensors: dict[str, ReplicaTensor] = {}
    left_out: Counter[str] = Counter()
    reasons: dict[int, LeftOut] = {}

    def add(entry: Entry, holders: tuple[int, ...] | LeftOut) -> LeftOut | None:
        name, value = entry
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            holders = "ignored"
        elif not holds_data(value):
            holders = "no data"
        if isinstance(holders, str):
            left_out[holders] += 1
            return holders
        unique, number = name, 2
        while unique in tensors:  # two optimizers may keep state of one parameter
            unique, number = f"{name} ({number})", number + 1
        tensors[unique] = ReplicaTensor(name=unique, value=value, holders=holders)
        return None

    own = _own_buffers(module, has_own_buffers)
    names: dict[int, str] = {}
    walker = StateWalker(module)
    parameters = walker.parameters()
    for name, parameter in parameters:
        names[id(parameter)] = name
        reason = add((name, parameter), "ignored by DDP" if name in ddp_ignores else holders_of(parameter, everyone))
        if reason is not None:
            reasons[id(parameter)] = reason
    num_parameters = len(tensors)
    for name, buffer in walker.state()[len(parameters) :]:
        add((name, buffer), "ignored by DDP" if name in ddp_ignores else own(name) or holders_of(buffer, everyone))
    for optimizer in optimizers:
        divided = _divided(optimizer)
        for parameter, entry in states_of_parameters([divided or optimizer], names):
            holder: tuple[int, ...] | LeftOut | None = "sharded state" if divided else reasons.get(id(parameter))
            like = entry[1] if isinstance(entry[1], DTensor) else parameter
            add(entry, holder or holders_of(like, everyone))
    return ReplicatedState(tensors=tuple(tensors.values()), left_out=dict(left_out), num_parameters=num_parameters)


def _own_buffers(module: nn.Module, has_own_buffers: bool) -> Callable[[str], LeftOut | None]:
    """Return what says of a buffer by name why each rank has its own; None where it has to be the same."""
    synchronised = {name for name, child in module.named_modules() if isinstance(child, nn.SyncBatchNorm)}

    def reason(name: str) -> LeftOut | None:
        owner, _, last = name.rpartition(".")
        if last in _RUNNING and owner not in synchronised:
            return "running statistic"
        return "own buffer" if has_own_buffers else None

    return reason


def _divided(optimizer: Optimizer) -> Optimizer | None:
    """Return what holds this rank's part of a state that is divided among the ranks; None where it is whole.

    Importing the class would warn of what torch 2.13 deprecates; without it there is no such optimizer.
    """
    optim = sys.modules.get("torch.distributed.optim")
    if optim is None or not isinstance(optimizer, optim.ZeroRedundancyOptimizer):
        return None
    part: Optimizer = optimizer.optim
    return part
