"""Counts the fits of this process, and knows which runs still wait for another fit when the process ends."""

from collections.abc import Callable
from copy import copy
from multiprocessing.util import Finalize

from det_callbacks.errors import DetCallbacksError, NothingComparedError
from det_callbacks.report.console import end_process, print_error

# owner -> function that returns the error if no more fits follow
_waiting: dict[object, Callable[[], DetCallbacksError | None]] = {}

num_fits = 0
"""Number of fits that have begun in this process."""
last_error: DetCallbacksError | None = None
"""The error that ended the last fit, even if the program caught it; later errors do not replace ours."""


def note_fit(*, ended_by: BaseException | None = None) -> None:
    """Count a fit that begins, or keep the error that ended it without its frames, which hold tensors."""
    global num_fits, last_error
    num_fits += ended_by is None
    if last_error is not None and not isinstance(last_error, NothingComparedError):
        return
    last_error = copy(ended_by) if isinstance(ended_by, DetCallbacksError) else None
    if ended_by is not None and last_error is None:
        name = type(ended_by).__name__
        last_error = NothingComparedError(f"{name} ended the last fit, but the program caught it: let it propagate.")


def wait(owner: object, unfinished: Callable[[], DetCallbacksError | None]) -> None:
    """At the end of the process, raise the error of ``unfinished``, unless the owner continues."""
    # Not atexit, which forked processes skip (ddp_fork). Registered each time, since a fork forgets it.
    Finalize(None, _end_waiting, exitpriority=0)
    _waiting[owner] = unfinished


def stop_waiting(owner: object) -> None:
    """Stop waiting, because the owner's next fit begins."""
    _waiting.pop(owner, None)


def take_unfinished() -> DetCallbacksError | None:
    """Return the first error of the runs that still wait."""
    waiting = list(_waiting.values())
    _waiting.clear()
    errors = [unfinished() for unfinished in waiting]
    return next(filter(None, errors), None)


def _end_waiting() -> None:
    if (error := take_unfinished()) is not None:
        print_error(error)
        end_process(error.exit_code)
