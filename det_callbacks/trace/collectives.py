"""Collectives in a step: records their inputs before the call,
and their outputs when they arrive and are read.

A call adds a row of role "sent" for each tensor that this rank contributes. The first read of an
output adds a row of role "delivered", which depends on the "sent" rows; it has no bits while the
collective is pending.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from det_callbacks.internals.torch import (
    AsyncCollectiveTensor,
    process_group_named,
    storage_address,
)
from det_callbacks.runs.program import IN_FLIGHT, Site
from det_callbacks.trace.call_graph import NOWHERE, CallNode, OpScope
from det_callbacks.trace.components import STRIDED, has_parts, holds_data, parts_of
from det_callbacks.trace.modules import source_of
from det_callbacks.trace.overloads import OpPlan, tensors_in
from det_callbacks.trace.places import Places
from det_callbacks.trace.reads import Reads
from det_callbacks.trace.sites import InputName, SpecialName, arguments_json
from det_callbacks.trace.source import capture_source
from det_callbacks.trace.step import Step
from det_callbacks.trace.storages import PartialWrites, region_of

_WAIT = "_c10d_functional.wait_tensor"
_WAITS = frozenset({_WAIT, "_c10d_functional.wait_tensors"})  # since torch 2.15
_WITHOUT_DATA = (
    "c10d.barrier",
    "c10d.monitored_barrier_",
    "c10d.check_for_nan",
    "_c10d_functional._wrap_tensor_autograd",
)
_UNKNOWN = ("symm_mem.", "_c10d_functional.batch_p2p_ops")  # collectives whose writes are unknown
_NOT_SHOWN = frozenset({"async_op", "timeout", "sparse_indices", "process_group", "group_name"})


@dataclass(slots=True, kw_only=True, eq=False)
class Delivery:
    """A tensor that a collective writes, now or later; its first read adds a row."""

    site: Site  # site of the row that the first read adds, without edges
    inputs: tuple[int, ...]  # positions of this rank's inputs
    work: Any  # tells whether the collective is done, or None if unknown
    is_in_stream_order: bool  # whether the training's stream waits for it
    tensor: Callable[[], Tensor | None]  # a weak reference

    def has_arrived(self, *, for_collective: bool = False) -> bool:
        """Return whether the reader can see the bits; a collective that reads
        runs in a separate stream.
        """
        if not (self.work is None or _is_done(self.work)):
            return False
        self.work = None  # the work would keep the collective's tensors alive
        return self.is_in_stream_order or not for_collective


class Collectives:
    """Runs the collectives of a step, and keeps their deliveries until something reads them."""

    def __init__(self, step: Step, places: Places, reads: Reads) -> None:
        self._step, self._places, self._reads = step, places, reads
        self._deliveries: list[Delivery] = []
        self._is_sending = False

    def begin(self) -> None:
        """Start a step; a collective pending from the last step depends on nothing in this step."""
        earlier, self._deliveries = self._deliveries, []
        for delivery in earlier:
            tensor = delivery.tensor()
            if tensor is not None and not delivery.has_arrived():
                delivery.inputs = ()
                self._add(tensor, delivery)

    def end(self) -> None:
        self._deliveries = [
            delivery
            for delivery in self._deliveries
            if delivery.tensor() is not None and not delivery.has_arrived()
        ]

    def run(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective or a wait, and return its result; one that is not recorded forgets the
        writers of its tensors.
        """
        step = self._step
        arguments = {**dict(zip(plan.argument_names, args, strict=False)), **kwargs}
        if plan.base in _WAITS:
            out = plan.call(*args, **kwargs)
            step.counts.num_digested += 1
            for tensor in tensors_in(arguments.values()):
                self.arrive(tensor)
            return out
        if "gather" in plan.base:  # FSDP frees its gathered memory without a dispatch
            step.deferred.is_freed_unseen = True
        if plan.base in _WITHOUT_DATA:
            step.counts.skipped[plan.kind.value] += 1
            return plan.call(*args, **kwargs)
        phase, scope = self._place()
        tensors = list(tensors_in(arguments.values()))
        is_known = not plan.base.startswith(_UNKNOWN) and all(map(holds_data, tensors))
        if is_known and self._places.selects(phase, scope):
            return self._run(plan, partial(plan.call, *args, **kwargs), phase, scope, arguments)
        step.counts.skipped[plan.kind.value] += 1
        out = plan.call(*args, **kwargs)
        for tensor in tensors_in((*tensors, out)):
            for part in _parts(tensor):
                step.ledger.forget(part)
        return out

    def read(
        self,
        tensor: Tensor,
        delivered: Sequence[int],
        edges: Sequence[int],
        reads: list[int],
        names: list[InputName],
    ) -> None:
        """Add the row of a tensor at its first read; ``delivered`` has the numbers of the
        deliveries into it.
        """
        step = self._step
        deliveries = [self._deliveries[number] for number in delivered]
        has_arrived = all(
            delivery.has_arrived(for_collective=self._is_sending) for delivery in deliveries
        )
        position = len(step.digests)
        site = deliveries[-1].site
        key = (site.op, delivered[-1], site.output, has_arrived, site.phase, site.module)
        names.append(SpecialName("delivered", self._places.names.of(tensor), key))
        sent = (position for delivery in deliveries for position in delivery.inputs)
        self._reads.row_edges.append(tuple(sorted({*edges, *sent})))
        reads.append(position)
        if has_arrived:
            step.append(tensor)
            step.ledger.write(tensor, position)
        else:
            step.append_bits(0, step.layouts.without_bits(tensor, IN_FLIGHT))
            step.counts.skipped["in_flight"] += 1

    def site_of(self, name: SpecialName) -> Site:
        """Return the collective's site for the input row ``name``;
        the caller sets its ``inputs``.
        """
        site: Site = self._deliveries[name.key[1]].site
        return site

    def wait(self, tensor: AsyncCollectiveTensor) -> None:
        """Wait for a functional collective without marking its wrapper,
        so the op still waits itself.
        """
        torch.ops._c10d_functional.wait_tensor(tensor.elem)

    def arrive(self, tensor: Tensor) -> bool:
        """Add the rows of collectives that delivered into a tensor, before it is recorded by name.

        Returns False if a collective is still pending.
        """
        if not self._deliveries:
            return True
        reads: list[int] = []
        names: list[InputName] = []
        delivered = [part for part in _parts(tensor) if self._unread_deliveries(part)]
        for part in delivered:
            self._reads.read(part, reads, names)
        if names:
            phase, scope = self._place()
            self._step_to("arrival", phase, scope, reads, names)
        return not any(map(self._unread_deliveries, delivered))

    def note_copy(self, plan: OpPlan, args: tuple[Any, ...]) -> None:
        """Treat a copy from unknown memory into the output of a reduce-scatter as part of it.

        On a wait, gloo copies this rank's part out of an internal buffer (torch 2.13).
        """
        if not self._deliveries or plan.base != "aten.copy_" or any(map(has_parts, args[:2])):
            return
        target, source, *_ = args
        if (
            target.nbytes != source.nbytes
            or storage_address(source.untyped_storage()) in self._step.ledger.writers
        ):
            return
        for number in self._unread_deliveries(target):
            delivery = self._deliveries[number]
            if "reduce_scatter" in delivery.site.op:
                delivery.work = None
                self._step.ledger.deliver(source, number)

    def _run(
        self,
        plan: OpPlan,
        call: Callable[[], Any],
        phase: str,
        scope: OpScope,
        arguments: dict[str, Any],
    ) -> Any:
        step = self._step
        mark = len(step.digests)
        reads: list[int] = []
        names: list[InputName] = []
        group = _group_of(arguments)
        shown = arguments_json(_shown_arguments(arguments, group))
        edges: list[tuple[int, ...]] = []
        self._is_sending = True
        try:
            sent = _sent_tensors(plan.base, arguments, group)
            for tensor in sent:
                first = len(reads)
                self._reads.read(tensor, reads, names)
                edges.append(tuple(sorted(set(reads[first:]))))
            start = len(step.digests)
            for tensor in sent:
                if any(map(self._unread_deliveries, _parts(tensor))):
                    step.append_bits(0, step.layouts.without_bits(tensor, IN_FLIGHT))
                else:
                    step.append(tensor)
            if not sent:
                edges.append(())
                step.append_bits(0, step.layouts.none)
            positions = tuple(range(start, len(step.digests)))
            step.deferred.flush()  # before another stream writes there
            out = call()
        except BaseException:  # Ctrl-C too: a user may catch it and continue the step
            self._reads.roll_back(mark)
            raise
        finally:
            self._is_sending = False

        site = Site(phase=phase, module=scope.module, op=plan.name, role="sent", arguments=shown)
        sites = [replace(site, output=index) for index in range(len(edges))]
        node = self._step_to(plan.call, phase, scope, reads, names, sites, edges, consts=[shown])
        step.counts.num_digested += 1
        self._deliver(plan, node, positions, out, arguments)
        return out

    def _step_to(
        self,
        func: object,
        phase: str,
        scope: OpScope,
        reads: Sequence[int],
        names: list[InputName],
        sites: Sequence[Site] = (),
        edges: Sequence[Sequence[int]] = (),
        consts: list[Any] | None = None,
    ) -> CallNode:
        """Advance to the call that makes these sites, after those of its first reads."""

        def build(node: CallNode) -> None:
            node.source = source_of(scope) or capture_source()
            node.sites = (
                *self._reads.sites(node),
                *(replace(site, source=node.source) for site in sites),
            )
            node.edges = [*of_reads, *edges]

        of_reads = self._reads.row_edges
        node = self._step.graph.step_to(
            func, phase, scope, reads, names, len(sites), build, consts=consts or [], edges=of_reads
        )
        of_reads.clear()
        return node

    def _deliver(
        self,
        plan: OpPlan,
        node: CallNode,
        positions: tuple[int, ...],
        out: Any,
        arguments: dict[str, Any],
    ) -> None:
        is_functional = not plan.base.startswith("c10d.")
        # a synchronous call has already waited; some works of gloo (reduce_scatter of
        # lists) never report completion
        is_synchronous = arguments.get("async_op", True) is False
        last = out[-1] if isinstance(out, list | tuple) and out else out
        has_work = isinstance(last, torch.ScriptObject) and not is_synchronous
        work = dist.Work.unbox(last) if has_work else None  # boxed, it has no methods
        for delivery in self._deliveries:
            if delivery.work is not None:
                delivery.has_arrived()  # releases tensors
        op = f"{_WAIT}.default" if is_functional else plan.name
        site = Site(
            phase=node.phase, module=node.module, op=op, role="delivered", source=node.source
        )
        for index, tensor in enumerate(_received_tensors(plan.base, arguments, out)):
            for part in _parts(tensor):
                # gloo's thread may replace indices and values at any time
                if tensor.layout is not STRIDED:
                    self._step.ledger.forget(part)
                    continue
                delivery = Delivery(
                    site=replace(site, output=index),
                    inputs=positions,
                    tensor=weakref.ref(part),
                    # on a device, the work completes long after the stream has waited for it
                    work=work if part.is_cpu else None,
                    is_in_stream_order=part.is_cpu or is_synchronous or is_functional,
                )
                self._add(part, delivery)

    def _add(self, tensor: Tensor, delivery: Delivery) -> None:
        self._step.ledger.deliver(tensor, len(self._deliveries))
        self._deliveries.append(delivery)

    def _unread_deliveries(self, tensor: Tensor) -> list[int]:
        """Return the numbers of the deliveries into a tensor that nothing has read yet."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        writer = self._step.ledger.writers.get(storage_address(tensor.untyped_storage()))
        return writer.deliveries(region_of(tensor)) if isinstance(writer, PartialWrites) else []

    def _place(self) -> tuple[str, OpScope]:
        """Return the phase and scope of a collective.

        A collective in a hook of accumulated gradients (DDP's reducer) belongs to many parameters.
        """
        phase, scope = self._places.now()
        return phase, scope if scope.name is None else NOWHERE


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if isinstance(tensor, AsyncCollectiveTensor) or not has_parts(tensor):
        yield tensor
        return
    for part in parts_of(tensor):
        yield from (part,) if part is tensor else _parts(part)


def _is_done(work: Any) -> bool:
    """Return whether a collective is done.

    Gloo completes the future shortly before the work (torch 2.13), and DDP waits for the future.
    """
    if work.is_completed():
        return True
    try:
        return bool(work.get_future().done())
    except RuntimeError:  # send and receive have no future
        return False


def _sent_tensors(
    base: str, arguments: dict[str, Any], group: "dist.ProcessGroup | None"
) -> list[Tensor]:
    """Return the tensors that this rank contributes to a collective."""
    op = base.partition(".")[2]
    has_root = op.startswith(("broadcast", "scatter"))  # only the root contributes
    root = arguments.get("root_rank", arguments.get("src"))
    is_receiver = has_root and group is not None and root != group.rank()
    if is_receiver or op.startswith(("recv", "irecv")):
        return []
    contributed = (
        value
        for key, value in arguments.items()
        if not key.startswith("out") and key not in _NOT_SHOWN
    )
    return list(tensors_in(contributed))


def _received_tensors(base: str, arguments: dict[str, Any], out: Any) -> list[Tensor]:
    """Return the tensors that a collective writes on this rank."""
    if base.partition(".")[2].startswith(("send", "isend")):
        return []
    if not base.startswith("c10d."):
        return list(tensors_in([out]))
    outputs = list(tensors_in(value for key, value in arguments.items() if key.startswith("out")))
    return outputs or list(tensors_in([arguments.get("tensors")]))


def _group_of(arguments: dict[str, Any]) -> "dist.ProcessGroup | None":
    """Return the group of a call, which is boxed in one argument or named in another."""
    value = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(value, torch.ScriptObject):
        return dist.ProcessGroup.unbox(value)
    return process_group_named(value) if isinstance(value, str) else value


def _shown_arguments(
    arguments: dict[str, Any], group: "dist.ProcessGroup | None"
) -> dict[str, Any]:
    """Return the arguments in a form that is equal in all processes of the group,
    and in every run.
    """
    shown: dict[str, Any] = {}
    for name, value in arguments.items():
        is_empty = isinstance(value, list | tuple) and not value
        if name in _NOT_SHOWN or is_empty or any(True for _ in tensors_in([value])):
            continue
        if name == "reduce_op" and isinstance(value, torch.ScriptObject):
            # as torch/distributed/_local_tensor does
            # undeclared
            value = dist.ReduceOp.RedOpType(value.op()).name.lower()  # type: ignore[attr-defined]
        shown[name] = value
    if group is not None:
        try:  # not by name, which counts earlier groups
            shown["group"] = shown_ranks(tuple(dist.get_process_group_ranks(group)))
        except (KeyError, ValueError):  # not created by torch.distributed
            shown["group"] = f"{group.size()} processes"
    return shown


@lru_cache(maxsize=256)
def shown_ranks(ranks: tuple[int, ...]) -> str:
    """Return ranks as text: "0-7", "0,2,5"."""
    is_run = len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if is_run else ",".join(map(str, ranks))
