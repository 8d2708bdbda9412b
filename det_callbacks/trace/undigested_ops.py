"""Runs and notes ops whose outputs are not digested."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from det_callbacks.digest.unobserved import unobserved
from det_callbacks.internals.torch import storage_address
from det_callbacks.trace.call_graph import Call, CallNode, OpScope
from det_callbacks.trace.collectives import Collectives
from det_callbacks.trace.components import STRIDED, has_parts, parts_with_memory
from det_callbacks.trace.dispatch import TAKE_APART
from det_callbacks.trace.modules import source_of
from det_callbacks.trace.nondeterministic_ops import Plans
from det_callbacks.trace.overloads import (
    REDUCING,
    OpKind,
    OpPlan,
    comes_apart,
    tensors_in,
    written_arguments,
)
from det_callbacks.trace.places import Places
from det_callbacks.trace.sites import source_of_call
from det_callbacks.trace.step import OutputHooks, Step

_is_grad_enabled = torch.is_grad_enabled


class UndigestedOps:
    """Runs ops whose outputs have no sites: views, allocations, collectives,
    ops outside the selection.
    """

    def __init__(
        self,
        step: Step,
        places: Places,
        plans: Plans,
        collectives: Collectives,
        output_hooks: OutputHooks,
    ) -> None:
        self._step, self._places, self._plans = step, places, plans
        self._collectives, self._output_hooks = collectives, output_hooks
        self._copying: set[torch.device] = set()
        self.teach: Callable[[OpPlan, Any], bool] | None = None  # the native recorder, an op
        # fill allocated memory with this byte; None leaves it unchanged
        self.fill: int | None = None

    def begin(self) -> None:
        self._copying.clear()

    def run(self, plan: OpPlan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = self._step
        if plan.kind is OpKind.VIEW:
            step.counts.num_views += 1
            if _is_grad_enabled() or self._places.backward.is_unclaimed():
                self._touch(func, plan)
            if self.teach is not None:
                self.teach(plan, func)
            return plan.call(*args, **kwargs)
        if plan.kind is not OpKind.UNINITIALISED:
            # the op, or another stream, may write memory that the recorder does not see
            step.deferred.flush()
        if plan.kind is OpKind.COLLECTIVE:
            return self._collectives.run(plan, args, kwargs)
        step.counts.skipped[plan.kind.value] += 1
        # bytes that stay in place keep their writers
        if plan.kind is OpKind.RELAYOUT and not has_parts(args[0]):
            return plan.call(*args, **kwargs)
        out = plan.call(*args, **kwargs)
        if plan.kind is OpKind.UNINITIALISED:
            if out.__class__ is Tensor and out.layout is STRIDED:
                if self.fill is not None and not out.is_meta:
                    self._fill(out, self.fill)
                step.ledger.mark_uninitialised(out, is_empty=True)
        elif plan.kind is OpKind.OPAQUE:
            step.counts.opaque.add(plan.name)
            self._places.backward.note_unseen()
        elif plan.kind is OpKind.IGNORED:
            if self.teach is not None:
                self.teach(plan, func)
        else:
            self._forget(tensors_in((*args, *kwargs.values())))
        return out

    def unrecorded(
        self,
        reason: str,
        plan: OpPlan,
        func: Any,
        phase: str,
        scope: OpScope,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an op that is left out, such as one outside the selection,
        and forget the writers of what it writes.
        """
        step = self._step
        step.counts.skipped[reason] += 1
        if phase != "optimizer" and (_is_grad_enabled() or self._places.backward.is_unclaimed()):
            self._touch(func, plan)
        if step.deferred.is_used and not plan.is_functional:
            step.deferred.before_writes(written_arguments(plan, args, kwargs))
        out = plan.call(*args, **kwargs)
        out = self._output_hooks.call(plan, phase, scope, out, None, args, kwargs)[0]
        self._forget(written_arguments(plan, args, kwargs))
        return out

    def in_reducer(
        self, plan: OpPlan, scope: OpScope, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an op of DDP's reducer on an unused parameter; return ``NotImplemented``, without a
        call, for other ops.

        The reducer visits unused parameters in the order of their addresses
        (``gradAccToVariableMap_`` in ``torch/csrc/distributed/c10d/reducer.cpp``, 2.13), which
        differs between processes, so these ops have no sites. The bucket keeps the writer of the
        gradient that the reducer copies into it.
        """
        # the reducer's ops have the scope of an accumulated gradient
        if scope.name is None or not (dist.is_available() and dist.is_initialized()):
            return NotImplemented
        step, gradient = self._step, None
        if (argument := REDUCING[plan.name]) is not None:
            gradient = plan.argument(argument, args, kwargs)
            name = None if has_parts(gradient) else self._places.names.of_written(gradient)
            # a used parameter, in the order of the backward pass
            if name is None or name == f"grad of {scope.name}":
                return NotImplemented
        step.counts.skipped["reducer"] += 1
        step.deferred.flush()
        out = plan.call(*args, **kwargs)
        if gradient is not None and out is not gradient:
            writer = step.ledger.writers.get(storage_address(gradient.untyped_storage()))
            if isinstance(writer, int):
                step.ledger.write(out, writer)
            else:
                step.ledger.forget(out)
        return out

    def mark_in_flight(self, tensors: Iterable[Tensor], devices: Iterable[torch.device]) -> None:
        step = self._step
        step.counts.skipped["in_flight"] += 1
        self._copying.update(devices)
        for tensor in tensors:
            for part in parts_with_memory(tensor):
                step.ledger.mark_in_flight(part)

    def wait_for_copies(self) -> None:
        """Wait for the devices that copy to the host, at a step's end,
        before the host tensors are read.
        """
        copying, self._copying = self._copying, set()
        accelerator = torch.accelerator.current_accelerator() if copying else None
        for device in copying:
            if accelerator is not None and accelerator.type == device.type:
                torch.accelerator.synchronize(device)

    def captured(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op during the capture of a CUDA graph: it computes nothing yet,
        and digests would join the graph.
        """
        step = self._step
        plan = self._plans.of(func)
        if comes_apart(plan, args, kwargs):
            return TAKE_APART
        step.counts.skipped["captured"] += 1
        self._places.backward.note_unseen()
        return (plan.whole or plan).call(*args, **kwargs)

    def _touch(self, func: Any, plan: OpPlan) -> None:
        """Register an op that is not digested, so that its autograd node, if any,
        can be traced to its module.
        """
        graph = self._step.graph
        phase, scope = self._places.now()
        node = graph.at.likely
        if (
            node is None
            or node.func is not func
            or node.scope is not scope
            or node.phase is not phase
            or node.shared.labels
            or node.shared.last_step == graph.step_number
        ):
            call = Call(func, phase, scope, consts=[], read_labels=[], names=[], num_outputs=0)
            node = graph.go_to(call, [], partial(self._build, plan), partial(source_of, scope))
        else:
            node.previous = graph.at
            node.shared.last_step = graph.step_number
            graph.at = node
        self._places.backward.register(node)

    def _build(self, plan: OpPlan, node: CallNode) -> None:
        node.op_base, node.is_in_place, node.source = (
            plan.base,
            bool(plan.writes),
            source_of_call(node),
        )
        self._places.backward.note_stack(node)

    def _fill(self, tensor: Tensor, byte: int) -> None:
        storage = tensor.untyped_storage()
        with unobserved():
            memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
            memory.set_(storage, 0, (storage.nbytes(),), (1,)).fill_(byte)

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._step.forget(tensor)
