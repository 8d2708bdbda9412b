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
    """Called with the outputs of the ops it selects before they are digested; replay restores saved tensors there."""

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether it wants the outputs of an op at this place."""

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], deferred: DeferredSites
    ) -> Sequence[Any]:
        """Return what to go on with: the same tensors, perhaps written to, and perhaps other numbers.

        What has to be known of tensors on a device is asked for in ``deferred``, of the step under way.
        """


class TensorKeeper(Protocol):
    """Told of the calls of the ops it selects, in the order of the step; it changes nothing."""

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether it wants to know of an op at this place."""

    def keep(self, op: str, outputs: Sequence[Any], position: int, deferred: DeferredSites) -> None:
        """Take what a call wrote; its first site is the first output from this position on."""


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
    """Call the output hook; return what the op returns and what it wrote from here on."""
    hook = recorder.output_hook
    if hook is None or not hook.selects(phase, scope.module, plan.name):
        return out, outputs or ()
    outputs = written_by_call(plan, out, args, kwargs) if outputs is None else outputs
    if not outputs:
        return out, outputs
    exchanged = hook.exchange(phase, scope.module, plan.name, outputs, recorder.deferred)
    is_number = len(outputs) == 1 and outputs[0] is out and not isinstance(out, Tensor)
    return exchanged[0] if is_number else out, exchanged


def keep_outputs(recorder: "Recorder", plan: OpPlan, phase: str, scope: OpScope, outputs: Sequence[Any]) -> None:
    """Hand what a call wrote to the keeper, before the call has rows."""
    keeper = recorder.keeper
    if keeper is not None and keeper.selects(phase, scope.module, plan.name):
        keeper.keep(plan.name, outputs, recorder.num_sites, recorder.deferred)
