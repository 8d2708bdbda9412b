"""Caches the plan of each op, which is made at its first call."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from det_callbacks.trace.op.call_graph import OpScope
from det_callbacks.trace.tables.nondeterministic_ops import NondeterministicOps
from det_callbacks.trace.tables.overloads import OpPlan, make_plan


class Plans:
    def __init__(self, place: Callable[[], tuple[str, OpScope]]) -> None:
        self.nondeterministic_ops: NondeterministicOps | None = None  # set before the first step
        self.known: dict[int, OpPlan] = {}  # by id: hashing an OpOverload runs Python code; a plan keeps it alive
        self._place = place

    def of(self, func: Any) -> OpPlan:
        if (known := self.known.get(id(func))) is not None:
            return known
        plan = make_plan(func)
        if self.nondeterministic_ops is not None:
            plan = replace(plan, call=self.nondeterministic_ops.guard(plan, self._place))
        if plan.whole is not None:
            plan = replace(plan, whole=replace(plan.whole, call=plan.call))
        self.known[id(func)] = plan
        return plan
