"""Determinism in a Hydra application: what the presets of ``pkg://det_callbacks.conf`` name as their targets.

Of a module that cannot be imported Hydra says only that it cannot locate the target. So this one imports what needs
torch or Lightning when it is called, where the error can be shown as it is.
"""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import TaskFunction
from omegaconf import DictConfig
from typing_extensions import override

from det_callbacks.errors import DetCallbacksError

if TYPE_CHECKING:
    from det_callbacks.integrations.hydra.job import Job
    from det_callbacks.integrations.lightning import DeterminismCallback


def determinism_callback(
    *, reference: str | None = None, current: str | None = None, **arguments: Any
) -> "DeterminismCallback":
    """Return a :class:`DeterminismCallback` whose folders are those of this Hydra job.

    Relative paths start at the directory where the program was started, also where Hydra changes the working
    directory; ``current`` is by default ``determinism`` in the job's output directory. In a multirun each job has its
    own folder below them, ``job-0``, ``job-1`` and so on in the order of the sweep: record and verify the same sweep.
    """
    from det_callbacks.integrations.hydra.job import callback_of_job  # noqa: PLC0415  # loads Lightning

    return callback_of_job(reference, current, arguments)


class DeterminismJobCallback(Callback):
    """Applies ``determinism.settings`` before the task function, takes them back after it, and sees to the exit status.

    The status is 1 diverged, 2 could not do it, 3 not comparable; in a multirun that of the first job that failed. A
    job in which no callback of ours ran a fit fails with 2, since it must not look verified; so does one whose settings
    cannot be applied, and none starts after it. After each job generators, flags, threads, environment variables and
    warning filters go back; not where a task leaves by KeyboardInterrupt or SystemExit, after which Hydra calls nobody.
    """

    _job: "Job"

    @override
    def on_job_start(self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any) -> None:
        with _ending_the_process_on_errors():
            from det_callbacks.integrations.hydra.job import Job  # noqa: PLC0415  # loads Lightning

            self._job = Job()
            self._job.begin(config)

    @override
    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        with _ending_the_process_on_errors():
            error = self._job.end(job_return)
            if error is not None:
                _print_error(error)


@contextmanager
def _ending_the_process_on_errors() -> Iterator[None]:
    """Hydra turns exceptions of its callbacks into warnings; a SystemExit it lets pass."""
    try:
        yield
    except Exception as error:
        _print_error(error)
        raise SystemExit(getattr(error, "exit_code", DetCallbacksError.exit_code)) from error


def _print_error(error: Exception) -> None:
    """Print the message of an error of ours, and all of it where Hydra is asked for that, or it is our fault."""
    if isinstance(error, DetCallbacksError) and os.environ.get("HYDRA_FULL_ERROR", "0") in ("", "0"):
        from det_callbacks.report.console import print_error  # noqa: PLC0415  # loads rich

        print_error(error)
    else:
        traceback.print_exception(error)
