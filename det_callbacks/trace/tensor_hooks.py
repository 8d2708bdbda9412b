"""Who may look at what an op wrote before it is digested: to put other bits there, or to keep them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from det_callbacks.trace.deferred_sites import DeferredSites
from det_callbacks.trace.overloads import OpPlan, written_by_call
from det_callbacks.trace.program_trie import OpScope

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder


class OutputHook(Protocol):
    """Called with the outputs of the ops it selects: replay restores saved tensors there, keeping copies them."""

    needs_rows: bool  # it is called for ops that are digested only

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether it wants the outputs of an op at this place."""

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], position: int, deferred: DeferredSites
    ) -> Sequence[Any]:
        """Return what to go on with: the same tensors, perhaps written to, and perhaps other numbers.

        The first site of the call is the first output from ``position`` on.
        """


def hook_outputs(
    recorder: "Recorder",
    plan: OpPlan,
    phase: str,
    scope: OpScope,
    out: Any,
    outputs: Sequence[Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Sequence[Any]]:
    """Call the output hooks, without outputs for an op that is not digested; return what it returns and wrote now."""
    written = outputs
    for hook in recorder.output_hooks:
        if (outputs is None and hook.needs_rows) or not hook.selects(phase, scope.module, plan.name):
            continue
        written = written_by_call(plan, out, args, kwargs) if written is None else written
        if not written:
            break
        is_number = len(written) == 1 and written[0] is out and not isinstance(out, Tensor)
        written = hook.exchange(phase, scope.module, plan.name, written, recorder.num_sites, recorder.deferred)
        out = written[0] if is_number else out
    return out, written or ()
