"""Counts the fits of this process, and knows which runs wait for another fit, or for the end of the process."""

import json
import os
import sys
from collections.abc import Callable
from copy import copy
from multiprocessing.util import Finalize
from pathlib import Path

from det_callbacks.environment.variables import launch_request
from det_callbacks.errors import DetCallbacksError, NothingComparedError
from det_callbacks.report.console import end_process, print_closing_line, print_error
from det_callbacks.runs.files import REPLACEMENT
from det_callbacks.runs.replacement import forget_replacement, settle, waiting_folders

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


def replace_at_end() -> None:
    """At the end of the process, let the complete recordings take the places of the runs that they replace."""
    Finalize(None, _end_waiting, exitpriority=0)


def finish(*, has_failed: bool) -> DetCallbacksError | None:
    """Return the error that the process, or a job, ends with; without one, complete recordings take their places."""
    error = take_unfinished()
    for folder in waiting_folders():
        if error is not None or has_failed:
            forget_replacement(folder)
            text = f"the program failed, so {folder} is unchanged; the new run is in {folder / REPLACEMENT}"
            print_closing_line(f"det_callbacks: {text}")
        elif folder != _folder_of_command():
            try:
                settle(folder)
            except DetCallbacksError as caught:
                error = caught
    return error


def _folder_of_command() -> Path | None:
    """Return the folder that ``det-callbacks record`` settles itself, since it knows the status of the script."""
    asked = launch_request()
    return None if asked is None else Path(os.path.realpath(json.loads(asked)["arguments"]["reference"]))


def _end_waiting() -> None:
    if (error := finish(has_failed=_has_failed())) is not None:
        print_error(error)
        end_process(error.exit_code)


def _has_failed() -> bool:
    """Return whether an exception ends this process; Python tells nobody of ``sys.exit`` in the main one."""
    ending = sys.exc_info()[1]  # in a process of multiprocessing, which ends while it handles the exception
    if isinstance(ending, SystemExit):
        return ending.code not in (None, 0)
    is_interactive = hasattr(sys, "ps1")  # a notebook goes on after an exception
    return ending is not None or (not is_interactive and getattr(sys, "last_value", None) is not None)
