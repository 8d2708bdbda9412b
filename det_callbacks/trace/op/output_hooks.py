"""Hooks that are given what chosen ops wrote."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from det_callbacks.trace.op.call_graph import OpScope
from det_callbacks.trace.op.deferred_sites import DeferredSites
from det_callbacks.trace.step import Step
from det_callbacks.trace.tables.overloads import OpPlan, written_by_call


class OutputHook(Protocol):
    """Called with the outputs of the ops it selects: replay restores saved tensors there, keeping copies them."""

    needs_rows: bool  # it is called for ops that are digested only

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether it wants the outputs of an op at this place."""

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], position: int, deferred: DeferredSites
    ) -> Sequence[Any]:
        """Return what to go on with: the same tensors, perhaps written to, and perhaps other numbers.

        The first site of the call is the first output from ``position`` on, counted as they come: where several threads
        ran, ``StepTrace.place_of`` tells where it is in the end.
        """


class OutputHooks:
    """The hooks of a recording, none in most."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.every: tuple[OutputHook, ...] = ()

    def call(
        self,
        plan: OpPlan,
        phase: str,
        scope: OpScope,
        out: Any,
        outputs: Sequence[Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Sequence[Any]]:
        """Call the hooks, without outputs for an op that makes no sites; return what it returned and wrote."""
        written = outputs
        for hook in self.every:
            if (outputs is None and hook.needs_rows) or not hook.selects(phase, scope.module, plan.name):
                continue
            written = written_by_call(plan, out, args, kwargs) if written is None else written
            if not written:
                break
            is_number = len(written) == 1 and written[0] is out and not isinstance(out, Tensor)
            written = hook.exchange(phase, scope.module, plan.name, written, self._step.num_sites, self._step.deferred)
            out = written[0] if is_number else out
        return out, written or ()
