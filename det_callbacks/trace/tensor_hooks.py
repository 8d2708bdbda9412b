"""Who may look at what an op reads and writes before it is digested: to put other bits there, or to keep them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from det_callbacks.trace.deferred_sites import DeferredSites
from det_callbacks.trace.named_tensors import has_place
from det_callbacks.trace.overloads import OpPlan, read_by_argument, written_by_call
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

    def begin_call(self, op: str, reads: Sequence[tuple[str, str | None, Tensor]], deferred: DeferredSites) -> Any:
        """Take what a call is about to read: argument, qualified name of the tensor, and the tensor itself.

        Returns:
            What stands for the call in ``end_call``; None when it is not kept.
        """

    def end_call(self, call: Any, outputs: Sequence[Any], position: int) -> None:
        """Take what the call wrote; its first site is the first output after this position."""


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


def begin_kept_call(
    recorder: "Recorder", plan: OpPlan, phase: str, scope: OpScope, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Tell the keeper of a call that is about to be made; return what stands for it, None when it is not kept."""
    keeper = recorder.keeper
    if keeper is None or not keeper.selects(phase, scope.module, plan.name):
        return None
    reads = [
        (argument, recorder.names.of(tensor) if has_place(tensor) else None, tensor)
        for argument, tensor in read_by_argument(plan, args, kwargs)
    ]
    return keeper.begin_call(plan.name, reads, recorder.deferred)
