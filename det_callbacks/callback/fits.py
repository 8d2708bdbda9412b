"""The fits of this process: that they ended, and who still waits for one.

A reference may hold several fits of one process. After the first of them nobody knows whether the next one comes, so a
verification waits; when the process, or the Hydra job, ends first, it ends as diverged.
"""

from collections.abc import Callable
from multiprocessing.util import Finalize

from det_callbacks.errors import DetCallbacksError
from det_callbacks.report.console import end_process, print_error

_waiting: dict[object, Callable[[], DetCallbacksError | None]] = {}  # by owner: what no more fits leave unfinished

num_ended = 0
"""How many fits have ended in this process."""


def note_ended() -> None:
    """Count a fit that ended in this process, with or without success."""
    global num_ended
    num_ended += 1


def wait(owner: object, unfinished: Callable[[], DetCallbacksError | None]) -> None:
    """Let the process end with the error that is returned at its end, unless the owner goes on."""
    # Not atexit, which processes that multiprocessing forks do not run (ddp_fork, ddp_notebook). Each time, since a
    # fork forgets it; a second one finds nobody waiting.
    Finalize(None, _end_waiting, exitpriority=0)
    _waiting[owner] = unfinished


def go_on(owner: object) -> None:
    """Wait no longer: the owner's next fit begins, or it has an outcome."""
    _waiting.pop(owner, None)


def take_unfinished() -> DetCallbacksError | None:
    """Ask all who still wait, and forget them; return the first error, None when there is nothing to raise."""
    waiting = list(_waiting.values())
    _waiting.clear()
    errors = [unfinished() for unfinished in waiting]
    return next(filter(None, errors), None)


def _end_waiting() -> None:
    """Run at the end of the process that registered it, and of none that it forked."""
    if (error := take_unfinished()) is not None:
        print_error(error)
        end_process(error.exit_code)
