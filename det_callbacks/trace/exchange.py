"""What may look at an op's outputs before they are digested, and put other bits into them."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from det_callbacks.trace.overloads import OpPlan
from det_callbacks.trace.tree import Context, module_of


class OutputExchange(Protocol):
    """Told of the outputs of the ops it selects, in the order of the step."""

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether it wants the outputs of an op at this place."""

    def exchange(self, phase: str, module: str, op: str, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return what to go on with: the same tensors, perhaps written to, and perhaps other numbers."""


def exchange_outputs(
    exchange: OutputExchange, plan: OpPlan, phase: str, context: Context, out: Any, outputs: Sequence[Any]
) -> tuple[Any, Sequence[Any]]:
    """Let an op's outputs be exchanged; return what the op returns and what it wrote from here on."""
    module = module_of(context)
    if not outputs or not exchange.selects(phase, module, plan.name):
        return out, outputs
    exchanged = exchange.exchange(phase, module, plan.name, outputs)
    is_number = len(outputs) == 1 and outputs[0] is out and not isinstance(out, Tensor)
    return exchanged[0] if is_number else out, exchanged
