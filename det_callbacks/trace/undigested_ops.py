"""Ops whose outputs are not digested: what they change is recorded all the same."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from det_callbacks.internals.torch import storage_address
from det_callbacks.runs.program import GRAPH
from det_callbacks.trace.collectives import Collectives
from det_callbacks.trace.components import STRIDED, has_parts, parts_with_memory
from det_callbacks.trace.dispatch import TAKE_APART
from det_callbacks.trace.overloads import REDUCING, OpKind, OpPlan, comes_apart, tensors_in, written_arguments
from det_callbacks.trace.program_trie import CallNode, OpScope
from det_callbacks.trace.sites import source_of_call

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder

_is_grad_enabled = torch.is_grad_enabled


class UndigestedOps:
    """Runs ops that make no sites of what they return: views, allocations, collectives, ops outside the selection."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self.collectives = Collectives(recorder)
        self.captures: set[int] = set()  # of CUDA graphs begun in this step, by ``id``; the same set for good
        self._copying: set[torch.device] = set()

    def begin(self) -> None:
        """Start a step."""
        self._copying.clear()
        self.captures.clear()
        self.collectives.begin()

    def end(self) -> None:
        """End a step; may be called more than once."""
        self.captures.clear()
        self.collectives.end()

    def run(self, plan: OpPlan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that has no digest by its kind: a view, uninitialised memory, a collective."""
        recorder = self._recorder
        if plan.kind is OpKind.VIEW:
            recorder.counts.num_views += 1
            if _is_grad_enabled() or recorder.backward.is_unclaimed():
                self._touch(func, plan)
            return plan.call(*args, **kwargs)
        if plan.kind is not OpKind.UNINITIALISED:
            recorder.deferred.flush()  # it may write what nobody is told of, or let another stream do so
        if plan.kind is OpKind.COLLECTIVE:
            return self.collectives.run(plan, func, args, kwargs)
        recorder.counts.skipped[plan.kind.value] += 1
        if plan.kind is OpKind.RELAYOUT and not has_parts(args[0]):  # bytes that stay have the writers they had
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if plan.kind is OpKind.UNINITIALISED:
            if out.__class__ is Tensor and out.layout is STRIDED:
                recorder.ledger.mark_uninitialised(out, is_empty=True)
        elif plan.kind is OpKind.OPAQUE:
            recorder.counts.opaque.add(plan.name)
            recorder.backward.note_unseen()
        elif plan.kind is not OpKind.IGNORED:
            self._forget(tensors_in((*args, *kwargs.values())))
        return out

    def unselected(
        self, plan: OpPlan, func: Any, phase: str, scope: OpScope, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an op outside the selection: what it writes is unknown from here on."""
        recorder = self._recorder
        self._recorder.counts.skipped["unselected"] += 1
        if phase != "optimizer" and (_is_grad_enabled() or recorder.backward.is_unclaimed()):
            self._touch(func, plan)
        if recorder.deferred.is_used and not plan.is_functional:
            recorder.deferred.before_writes(written_arguments(plan, args, kwargs))
        out = plan.call(*args, **kwargs)
        out = recorder.call_hooks(plan, phase, scope, out, None, args, kwargs)[0]
        self._forget(written_arguments(plan, args, kwargs))
        return out

    def in_reducer(self, plan: OpPlan, scope: OpScope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op by which DDP's reducer makes unused parameters ready: looks them up, clears or divides gradients.

        It goes through these parameters in the order of their addresses (``gradAccToVariableMap_`` in
        ``torch/csrc/distributed/c10d/reducer.cpp``, 2.13), another one in each process. What it puts into a bucket
        counts as written by whoever wrote the gradient that an earlier backward pass left.
        Returns ``NotImplemented`` for any other op, which has not run then.
        """
        # it runs where a gradient was accumulated
        if scope.name is None or not (dist.is_available() and dist.is_initialized()):
            return NotImplemented
        recorder, gradient = self._recorder, None
        if (argument := REDUCING[plan.name]) is not None:
            gradient = plan.argument(argument, args, kwargs)
            name = None if has_parts(gradient) else recorder.names.of_written(gradient)
            if name is None or name == f"grad of {scope.name}":  # a used parameter, in the order of the backward pass
                return NotImplemented
        recorder.counts.skipped["reducer"] += 1
        recorder.deferred.flush()
        out = plan.call(*args, **kwargs)
        if gradient is not None and out is not gradient:
            writer = recorder.ledger.writers.get(storage_address(gradient.untyped_storage()))
            if isinstance(writer, int):
                recorder.ledger.write(out, writer)
            else:
                recorder.ledger.forget(out)
        return out

    def mark_in_flight(self, tensors: Iterable[Tensor], devices: Iterable[torch.device]) -> None:
        """Note that devices copy into tensors of the host, and that nobody has waited for it."""
        self._recorder.counts.skipped["in_flight"] += 1
        self._copying.update(devices)
        for tensor in tensors:
            for part in parts_with_memory(tensor):
                self._recorder.ledger.mark_in_flight(part)

    def wait_for_copies(self) -> None:
        """Wait for the devices that copy to the host, at a step's end: what lies there is about to be read."""
        copying, self._copying = self._copying, set()
        accelerator = torch.accelerator.current_accelerator() if copying else None
        for device in copying:
            if accelerator is not None and accelerator.type == device.type:
                torch.accelerator.synchronize(device)

    def before_capture(self, graph: Any) -> None:
        """Note that a CUDA graph is about to be captured."""
        self._recorder.deferred.flush()  # within the capture the device could not read what waits
        self.captures.add(id(graph))

    def before_replay(self, _graph: Any) -> None:
        """Note that a CUDA graph is about to run, past every mode: what the step knew of memory counts no more.

        What is read next is digested anew, as a row of role "graph_output".
        """
        self._recorder.deferred.before_any_write()
        if not self._recorder.compiled.is_inside():  # a compiled region that replays one has rows for what it gives
            self._recorder.counts.skipped["replayed"] += 1
            self._recorder.run_unseen(GRAPH)

    def is_capturing(self) -> bool:
        """Return whether what runs here becomes part of a CUDA graph: nothing is computed, or may be done beside it."""
        return bool(self.captures) and torch.cuda.is_current_stream_capturing()

    def is_captured(self) -> bool:
        """Return whether what is about to be recorded does not exist: a CUDA graph is being captured. Counts it."""
        if not self.is_capturing():
            return False
        self._recorder.counts.skipped["captured"] += 1
        return True

    def captured(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass on an op that a CUDA graph is made of: it gives nothing yet, and nothing may be done beside it."""
        recorder = self._recorder
        plan = recorder.plan_of(func)
        if comes_apart(plan, args, kwargs):
            return TAKE_APART
        self._recorder.counts.skipped["captured"] += 1
        recorder.backward.note_unseen()
        return (plan.whole or plan).call(*args, **kwargs)

    def _touch(self, func: Any, plan: OpPlan) -> None:
        """Note an op that is not digested: the autograd node it may own leads back to its module."""
        recorder = self._recorder
        phase, scope = recorder.place()
        node = recorder.trie.at.likely
        if node is not None and node.func is func and node.scope is scope and node.phase is phase and not node.rows:
            recorder.trie.at = node
        else:
            node = recorder.trie.step_to((func, phase, scope, [], [], [], 0), partial(self._build, plan))
        recorder.backward.register(node)

    def _build(self, plan: OpPlan, node: CallNode) -> None:
        node.op_base, node.is_in_place, node.source = plan.base, bool(plan.writes), source_of_call(node)
        self._recorder.backward.note_stack(node)

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for part in parts_with_memory(tensor):
                self._recorder.ledger.forget(part)
