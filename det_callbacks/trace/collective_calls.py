"""What a call of a collective says: its group, its arguments, what this rank puts in, and what it gets."""

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from det_callbacks.runs.values import plain_value
from det_callbacks.trace.calls import tensors_in

_resolve_process_group = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]  # of torch 2.13
_NOT_TOLD = frozenset({"async_op", "timeout", "sparse_indices", "asyncOp"})
"""Arguments that change no bits."""

_ROOTED: dict[str, str] = {
    "c10d.broadcast_": "root_rank",
    "c10d.scatter_": "root_rank",
    "_c10d_functional.broadcast": "src",
    "_c10d_functional.broadcast_": "src",
}
"""Op -> argument with the rank in the group that alone puts something in."""


def sent_tensors(base: str, given: dict[str, Any], group: "dist.ProcessGroup | None") -> list[Tensor]:
    """Return the tensors that this rank puts in: those arguments that are not only written."""
    root = _ROOTED.get(base)
    if root is not None and group is not None and given.get(root) != group.rank():
        return []
    name = base.partition(".")[2]
    if name.startswith(("recv", "irecv")):
        return []
    if "op_list" in given:
        return [
            tensor
            for kind, tensor in zip(given["op_list"], given["tensors"], strict=True)
            if kind.startswith(("isend", "send"))
        ]
    return list(tensors_in(value for key, value in given.items() if not key.startswith("out") and key not in _NOT_TOLD))


def received_tensors(base: str, given: dict[str, Any], out: Any) -> list[Tensor]:
    """Return the tensors that a collective writes, or makes."""
    name = base.partition(".")[2]
    if name.startswith(("send", "isend")):
        return []
    if "op_list" in given:
        return [
            tensor
            for kind, tensor in zip(given["op_list"], given["tensors"], strict=True)
            if not kind.startswith(("isend", "send"))
        ]
    if not base.startswith("c10d."):
        return list(tensors_in([out]))
    outputs = list(tensors_in(value for key, value in given.items() if key.startswith("out")))
    return outputs or list(tensors_in([given.get("tensors")]))


def group_of(given: dict[str, Any]) -> "dist.ProcessGroup | None":
    """Return the group of a call, boxed in one argument or named in another; None where it is neither."""
    boxed = given.get("process_group")
    name = given.get("group_name")
    if boxed is None and name is not None and not isinstance(name, str):
        boxed = name
    if boxed is not None:
        return dist.ProcessGroup.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else boxed
    return None if name is None else _resolve_process_group(name)


def arguments_of(given: dict[str, Any], group: "dist.ProcessGroup | None") -> dict[str, Any]:
    """Return the arguments in a form that is the same in all processes of the group, and in every run."""
    arguments: dict[str, Any] = {}
    for name, value in given.items():
        if name in _NOT_TOLD or name in ("process_group", "group_name", "op_list"):
            continue
        if isinstance(value, list | tuple) and not value:
            continue
        if next(tensors_in([value]), None) is not None:
            continue
        if name == "reduce_op" and isinstance(value, torch.ScriptObject):
            # what torch's own ops in Python ask a boxed ReduceOp (torch 2.13, distributed/_local_tensor)
            value = dist.ReduceOp.RedOpType(value.op()).name.lower()  # type: ignore[attr-defined]  # undeclared
        if name == "ranks":
            arguments["group"] = shown_ranks(tuple(value))
        else:
            arguments[name] = plain_value(value)
    if group is not None:
        arguments["group"] = _shown_group(group)
    return arguments


def _shown_group(group: "dist.ProcessGroup") -> str:
    """Return the ranks of a group: its name counts the groups made before it."""
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # made past torch.distributed, so that nobody knows the ranks
        return f"{group.size()} processes"
    return shown_ranks(tuple(ranks))


@lru_cache(maxsize=256)
def shown_ranks(ranks: tuple[int, ...]) -> str:
    """Return ranks as text: "0-7", "0-6:2" for every other one, "0,1,5"."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and all(later - earlier == step for earlier, later in pairwise(ranks)):
            return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    if len(ranks) == 2 and ranks[1] == ranks[0] + 1:
        return f"{ranks[0]}-{ranks[1]}"
    return ",".join(map(str, ranks))
