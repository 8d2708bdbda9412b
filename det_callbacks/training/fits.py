"""The fits of this process: how many began, and who still waits for one when the process or the Hydra job ends."""

from collections.abc import Callable
from copy import copy
from multiprocessing.util import Finalize

from det_callbacks.errors import DetCallbacksError, NothingComparedError
from det_callbacks.report.console import end_process, print_error

_waiting: dict[object, Callable[[], DetCallbacksError | None]] = {}  # by owner: what no more fits leave unfinished

num_fits = 0
"""How many fits have begun in this process."""
last_error: DetCallbacksError | None = None
"""What ended the last of them, also where the program caught it; an error of ours stays."""


def note_fit(*, ended_by: BaseException | None = None) -> None:
    """Count a fit that begins in this process, or keep what ended it, without the frames that hold its tensors."""
    global num_fits, last_error
    num_fits += ended_by is None
    if last_error is not None and not isinstance(last_error, NothingComparedError):
        return
    last_error = copy(ended_by) if isinstance(ended_by, DetCallbacksError) else None
    if ended_by is not None and last_error is None:
        name = type(ended_by).__name__
        last_error = NothingComparedError(f"The last fit was ended by {name}, which the program caught: let it pass.")


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
