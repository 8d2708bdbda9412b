"""Hooks that receive the outputs of selected ops."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from det_callbacks.trace.op.call_graph import OpScope
from det_callbacks.trace.op.deferred_sites import DeferredSites
from det_callbacks.trace.step import Step
from det_callbacks.trace.tables.overloads import OpPlan, written_by_call


class OutputHook(Protocol):
    """Called with the outputs of the ops it selects, before they are digested: replay restores tensors there."""

    needs_rows: bool  # whether to call it for digested ops only

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether the hook wants the outputs of an op at this place."""

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], position: int, deferred: DeferredSites
    ) -> Sequence[Any]:
        """Return the outputs to continue with: the same tensors, perhaps with other contents, or other numbers.

        The call's sites are the next outputs from ``position`` on.
        """


class OutputHooks:
    """The output hooks of a recording; most recordings have none."""

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
        """Call the hooks; return the op's result and outputs. ``outputs`` is None for an op without sites."""
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
