"""The fits of this process: that they ended, and what still waits for one.

A reference may hold several fits of one process. After the first of them nobody knows whether the next one comes, so a
verification waits; when the process, or the Hydra job, ends first, it ends as diverged.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize

from det_callbacks.errors import DetCallbacksError, DivergenceWarning
from det_callbacks.report.console import end_process, print_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What needs fits that have not run yet: a verification whose reference has them, or a Hydra job.

    Attributes:
        error: what is wrong if they never run.
        is_fatal: whether that is an error; else it is a warning.
        is_settled: asked at the end; returns whether they ran after all.
        write: keeps the verdict that this leads to.
    """

    error: DetCallbacksError
    is_fatal: bool
    is_settled: Callable[[], bool] = lambda: False
    write: Callable[[], object] = lambda: None


_waiting: dict[int, tuple[object, Waiting]] = {}  # with its owner, so that no id is used twice
_registered_in: int | None = None  # a process
_num_ended = 0


def note_ended() -> None:
    """Count a fit that ended in this process, with or without success."""
    global _num_ended
    _num_ended += 1


def num_ended() -> int:
    """Return how many fits have ended in this process."""
    return _num_ended


def wait(owner: object, waiting: Waiting) -> None:
    """Let the process end with an error unless the owner goes on."""
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        # not atexit, which processes that multiprocessing forks do not run (ddp_fork, ddp_notebook)
        Finalize(None, _end_waiting, exitpriority=0)
    _waiting[id(owner)] = (owner, waiting)


def go_on(owner: object) -> None:
    """Wait no longer: the owner's next fit begins, or it has an outcome."""
    _waiting.pop(id(owner), None)


def take_unfinished() -> DetCallbacksError | None:
    """Return the error of the first one that still waits, and forget all of them; those that may only warn do.

    None when there is nothing to raise.
    """
    waiting = [one for _, one in _waiting.values() if not one.is_settled()]
    _waiting.clear()
    for one in waiting:
        one.write()
        if not one.is_fatal:
            warnings.warn(str(one.error), DivergenceWarning, stacklevel=2)
    return next((one.error for one in waiting if one.is_fatal), None)


def _end_waiting() -> None:
    """Run at the end of the process that registered it, and of none that it forked."""
    if (error := take_unfinished()) is not None:
        print_error(error)
        end_process(error.exit_code)
