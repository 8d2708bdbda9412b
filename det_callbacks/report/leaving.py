"""The end of a process that may not look as if all were well."""

import atexit
import logging
import os
import sys
from typing import NoReturn

from det_callbacks.errors import DetCallbacksError

_STATUS = "det_callbacks_exit_status"
"""Attribute of an exception: the status to end with where nobody catches it."""
_registered_in: int | None = None  # a process; a forked child has its own exit


def print_error(error: DetCallbacksError) -> None:
    """Print an error to standard error in one line or a few, without a traceback."""
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.stderr.flush()


def print_line(text: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def end_process(status: int) -> NoReturn:
    """End the process with this status, from one of its exit handlers or from another thread than the main one.

    Nothing raised by an exit handler changes the status, so the process ends here: what was written is flushed first;
    exit handlers registered earlier do not run.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def set_status_of(error: BaseException, status: int) -> None:
    """Let the process end with this status where an exception is not caught, which Python makes 1 whatever it is.

    One that is caught changes nothing: whoever catches it decides.
    """
    global _registered_in
    setattr(error, _STATUS, status)
    if _registered_in != os.getpid():
        atexit.register(_end_uncaught)
        _registered_in = os.getpid()


def status_of(error: object) -> int | None:
    """Return the status that ``set_status_of`` gave an exception; None where it did not."""
    status = getattr(error, _STATUS, None)
    return status if isinstance(status, int) else None


def _end_uncaught() -> None:
    # what the interpreter printed last because nobody caught it
    status = status_of(getattr(sys, "last_value", None))
    if status is not None and _registered_in == os.getpid():
        end_process(status)
