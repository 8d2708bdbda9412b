"""The fits of this process: how many began, and who still waits for one when the process or the Hydra job ends."""

from collections.abc import Callable
from multiprocessing.util import Finalize

from det_callbacks.errors import DetCallbacksError
from det_callbacks.report.console import end_process, print_error

_waiting: dict[object, Callable[[], DetCallbacksError | None]] = {}  # by owner: what no more fits leave unfinished

num_fits = 0
"""How many fits have begun in this process."""
last_error: BaseException | None = None
"""By what the last of them was ended, also where the program caught it; an error of ours stays."""


def note_fit(*, ended_by: BaseException | None = None) -> None:
    """Count a fit that begins in this process, or keep what ended it."""
    global num_fits, last_error
    num_fits += ended_by is None
    if not isinstance(last_error, DetCallbacksError):
        last_error = ended_by


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
    if (error := take_unfinished()) is not None:
        print_error(error)
        end_process(error.exit_code)
