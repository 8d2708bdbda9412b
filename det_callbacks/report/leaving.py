"""The end of a process that may not look as if all were well."""

import logging
import os
import sys
from typing import NoReturn

from det_callbacks.errors import DetCallbacksError


def print_error(error: DetCallbacksError) -> None:
    """Print an error to standard error in one line or a few, without a traceback."""
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
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
