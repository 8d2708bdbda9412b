"""Calls of ops without a deterministic implementation that were allowed by the user."""

from functools import partial
from typing import TYPE_CHECKING, Any

from det_callbacks.trace.building import source_of
from det_callbacks.trace.tree import Context, module_of

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder


def call_if_allowed(
    recorder: "Recorder",
    error: RuntimeError,
    mark: int,
    func: Any,
    phase: str,
    context: Context,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Make a call again that raised because the op has no deterministic implementation, when it is allowed.

    Args:
        recorder: whose step it is.
        error: that the call raised; raised again where it is another one, or not allowed.
        mark: number of sites before those of the call.
        func: the op.
        phase: of the call.
        context: where it belongs.
        args: of the call.
        kwargs: of the call.
    """
    alerts = recorder.alerts
    try:
        if alerts is None or not alerts.is_alert(error):
            raise error
        call = partial(func, *args, **kwargs)
        source = source_of(context)
        return alerts.handle(error, call, op=str(func), phase=phase, module=module_of(context), source=source)
    except BaseException:  # Ctrl-C too: a user may catch it and go on with the step
        recorder.reads.roll_back(mark)
        raise
