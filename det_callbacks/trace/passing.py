"""Ops whose outputs are not digested: what they change is noted all the same."""

from collections import Counter
from collections.abc import Iterable
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from det_callbacks.trace.allowed import call_if_allowed
from det_callbacks.trace.building import light_event
from det_callbacks.trace.calls import comes_apart, written_arguments, written_by_call
from det_callbacks.trace.collectives import Collectives
from det_callbacks.trace.components import has_parts, parts_of
from det_callbacks.trace.cuda_graphs import CudaGraphs
from det_callbacks.trace.dispatch import TAKE_APART
from det_callbacks.trace.exchange import exchange_outputs
from det_callbacks.trace.overloads import OpKind, OpPlan
from det_callbacks.trace.tree import Attribution, Context

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder

_graph_task_id = torch._C._current_graph_task_id  # torch 2.13: -1 outside a backward pass
_is_grad_enabled = torch.is_grad_enabled
_STRIDED = torch.strided


class Passing:
    """Runs ops that make no sites of what they return.

    Args:
        recorder: whose ledger and autograd map are kept true.

    Attributes:
        collectives: records the ops whose outputs come later.
        graphs: knows which ops are captured, and counts the replays.
        num_views: views in this step.
        skipped: reason -> number of other ops in this step.
        opaque: ops of this step that run other ops inside where no mode sees them.
        lock: held while an op, or a gradient, is recorded: autograd runs each device's part of a backward pass in a
            thread of its own, and an op lets the others go on while it runs.
    """

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self.lock = RLock()
        self.collectives = Collectives(recorder)
        self.graphs = CudaGraphs(recorder)
        self.num_views = 0
        self.skipped: Counter[str] = Counter()
        self.opaque: set[str] = set()
        self._copying: set[torch.device] = set()

    def clear(self) -> None:
        """Start a step."""
        self.num_views = 0
        self.skipped.clear()
        self.opaque.clear()
        self._copying.clear()
        self.collectives.begin()
        self.graphs.begin()

    def end(self) -> None:
        """End a step; may be called more than once."""
        self.collectives.end()
        self.graphs.end()

    def pass_through(self, plan: OpPlan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that has no digest by its kind: a view, uninitialised memory, a collective."""
        if plan.kind is OpKind.VIEW:
            self.num_views += 1
            if _is_grad_enabled() or self._recorder.backward.is_unclaimed():
                self._touch(func, plan)
            return plan.call(*args, **kwargs)
        if plan.kind is not OpKind.UNINITIALISED:
            self._recorder.late.flush()  # it may write what nobody is told of, or let another stream do so
        if plan.kind is OpKind.COLLECTIVE:
            return self.collectives.run(plan, func, args, kwargs)
        self.skipped[plan.kind.value] += 1
        if plan.kind is OpKind.RELAYOUT:
            return self._relayout(func, args, kwargs)
        out = func(*args, **kwargs)
        if plan.kind is OpKind.UNINITIALISED:
            if out.__class__ is Tensor and out.layout is _STRIDED:
                self._recorder.ledger.born(out, is_empty=True)
        elif plan.kind is OpKind.OPAQUE:
            self.opaque.add(plan.name)
            self._recorder.backward.note_unseen()
        elif plan.kind is not OpKind.IGNORED:
            self._forget(args, kwargs)
        return out

    @staticmethod
    def is_in_reducer(context: Context) -> bool:
        """Return whether an op runs where a gradient was accumulated and DDP's reducer takes it over."""
        is_accumulated = isinstance(context, Attribution) and context.name is not None
        return is_accumulated and dist.is_available() and dist.is_initialized()

    def reducing(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op by which DDP's reducer looks up and clears the gradient of an unused parameter.

        It goes through these parameters in the order of their addresses (``gradAccToVariableMap_`` in
        ``torch/csrc/distributed/c10d/reducer.cpp``, 2.13), another one in each process; what it writes are zeros.
        """
        self.skipped["reducer"] += 1
        self._recorder.late.flush()
        return plan.call(*args, **kwargs)

    def fly(self, tensors: Iterable[Tensor], devices: Iterable[torch.device]) -> None:
        """Note that devices copy into tensors of the host, and that nobody has waited for it."""
        self.skipped["in_flight"] += 1
        self._copying.update(devices)
        for tensor in tensors:
            for part in parts_of(tensor) if has_parts(tensor) else (tensor,):
                self._recorder.ledger.fly(part)

    def wait_for_copies(self) -> None:
        """Wait for the devices that copy to the host, at a step's end: what lies there is about to be read."""
        copying, self._copying = self._copying, set()
        accelerator = torch.accelerator.current_accelerator() if copying else None
        for device in copying:
            if accelerator is not None and accelerator.type == device.type:
                torch.accelerator.synchronize(device)

    def is_captured(self) -> bool:
        """Return whether what is about to be recorded does not exist: a CUDA graph is being captured. Counts it."""
        if not self.graphs.is_capturing():
            return False
        self.skipped["captured"] += 1
        return True

    def captured(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass on an op that a CUDA graph is made of: it gives nothing yet, and nothing may be done beside it."""
        recorder = self._recorder
        plan = recorder.plan_of(func)
        if comes_apart(plan, args, kwargs):
            return TAKE_APART
        self.skipped["captured"] += 1
        recorder.backward.note_unseen()
        try:
            return (plan.whole or plan).call(*args, **kwargs)
        except RuntimeError as error:
            phase, context = self._place()
            return call_if_allowed(recorder, error, recorder.num_sites, func, phase, context, args, kwargs)

    def unselected(
        self,
        plan: OpPlan,
        func: Any,
        phase: str,
        context: Context,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an op outside the selection: what it writes is unknown from here on."""
        self.skipped["unselected"] += 1
        if phase != "optimizer" and (_is_grad_enabled() or self._recorder.backward.is_unclaimed()):
            self._touch(func, plan)
        if self._recorder.late.is_used and not plan.is_functional:
            self._recorder.late.before_write(written_arguments(plan, args, kwargs))
        try:
            out = plan.call(*args, **kwargs)
        except RuntimeError as error:
            out = call_if_allowed(self._recorder, error, self._recorder.num_sites, func, phase, context, args, kwargs)
        if (exchange := self._recorder.exchange) is not None:
            outputs = written_by_call(plan, out, args, kwargs)
            out, _ = exchange_outputs(exchange, plan, phase, context, out, outputs, self._recorder.late)
        for tensor in written_arguments(plan, args, kwargs):
            self._forget((tensor,), {})
        return out

    def _relayout(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that gives a tensor another storage or extent; bytes that stay have the writers they had."""
        target = args[0]
        if has_parts(target):
            self._forget(args, kwargs)
            return func(*args, **kwargs)
        before = target.untyped_storage()
        address, num_bytes = before._cdata, before.nbytes()
        out = func(*args, **kwargs)
        after = target.untyped_storage()
        if after._cdata == address and after.nbytes() > num_bytes:
            self._recorder.ledger.grown(target, num_bytes)
        return out

    def _touch(self, func: Any, plan: OpPlan) -> None:
        """Note an op that is not digested: the autograd node it may own leads back to its module."""
        recorder = self._recorder
        phase, context = self._place()
        event = recorder.at.likely
        if event is None or not event.fits(func, phase, context, [], [], [], 0):
            event = next(
                (child for child in recorder.at.children if child.fits(func, phase, context, [], [], [], 0)), None
            )
            if event is None:
                event = light_event(recorder.at, func, plan, phase, context)
                recorder.backward.note_functions(event)
                recorder.tree.add(event)
            recorder.at.likely = event
        recorder.at = event
        recorder.backward.register(event)

    def _place(self) -> tuple[str, Context]:
        recorder = self._recorder
        if _graph_task_id() == -1:
            return recorder.phase, recorder.modules.current
        return "backward", recorder.backward.context()

    def _forget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                for part in parts_of(value) if has_parts(value) else (value,):
                    self._recorder.ledger.forget(part)
            elif isinstance(value, list | tuple):
                self._forget(tuple(value), {})
