"""Caches the plan of each op, which is made at its first call."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from det_callbacks.internals.torch import OpOverload, kernel_of
from det_callbacks.trace.dispatch import ProgramCode
from det_callbacks.trace.op.call_graph import OpScope
from det_callbacks.trace.tables.nondeterministic_ops import NondeterministicOps
from det_callbacks.trace.tables.overloads import OpPlan, make_plan


class Plans:
    """``known`` has the plans of the running op: of those whose call may run Python code of the program, or others."""

    def __init__(self, place: Callable[[], tuple[str, OpScope]]) -> None:
        self.nondeterministic_ops: NondeterministicOps | None = None  # set before the first step
        self.around: Callable[[OpPlan], Callable[..., Any]] | None = None  # likewise: what runs an op instead
        self.program = ProgramCode()
        # by id: hashing an OpOverload runs Python code; a plan keeps it alive
        self.of_native: dict[int, OpPlan] = {}
        self.of_python: dict[int, OpPlan] = {}
        self.known = self.of_native
        self._place = place

    def runs_kernel(self, func: Any) -> bool:
        """Return whether a call of an op does nothing but run torch's own kernel."""
        plan = make_plan(func)
        return (
            self.known is self.of_native
            and type(func) is OpOverload
            and func.namespace == "aten"
            and plan.call is kernel_of(func)
            and self.around is None
            and (self.nondeterministic_ops is None or not self.nondeterministic_ops.may_alert(plan))
        )

    def of(self, func: Any) -> OpPlan:
        if (known := self.known.get(id(func))) is not None:
            return known
        plan = make_plan(func)
        if self.known is self.of_python or type(func) is not OpOverload or func.namespace != "aten":
            # not its kernel, with which a dispatch mode below would be skipped as well
            call = func if plan.call is kernel_of(func) else plan.call
            plan = replace(plan, call=partial(self.program.run, call))
        if self.nondeterministic_ops is not None:
            plan = replace(plan, call=self.nondeterministic_ops.guard(plan, self._place))
        if self.around is not None:
            plan = replace(plan, call=self.around(plan))
        if plan.whole is not None:
            plan = replace(plan, whole=replace(plan.whole, call=plan.call))
        self.known[id(func)] = plan
        return plan
