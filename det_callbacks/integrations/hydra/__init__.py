"""Targets of the presets in ``pkg://det_callbacks.conf``.

If a module cannot be imported, Hydra reports only that it cannot locate the target. So the
functions import torch and Lightning, and can show the error.
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
    """Return a :class:`DeterminismCallback` with the folders of this Hydra job.

    Paths are relative to the directory where the program was started; ``current`` defaults to
    ``determinism`` in the job's output directory. In a multirun each job has a separate folder,
    ``job-0``, ``job-1``, in the order of the sweep.
    """
    # loads Lightning
    from det_callbacks.integrations.hydra.job import callback_of_job  # noqa: PLC0415

    return callback_of_job(reference, current, arguments)


class DeterminismJobCallback(Callback):
    """Applies ``determinism.settings`` before the task function, and restores everything after it.

    The exit status is 1 if diverged, 2 on an error, 3 if not comparable; in a multirun it is the
    status of the first job that failed. A job in which none of our callbacks ran a fit fails with
    2. After KeyboardInterrupt or SystemExit nothing is restored, because Hydra calls no callback.
    """

    _job: "Job"

    @override
    def on_job_start(
        self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any
    ) -> None:
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
    """End the process on an error: Hydra turns exceptions of its callbacks into warnings."""
    try:
        yield
    except Exception as error:
        _print_error(error)
        raise SystemExit(getattr(error, "exit_code", DetCallbacksError.exit_code)) from error


def _print_error(error: Exception) -> None:
    """Print our errors without a traceback, unless HYDRA_FULL_ERROR is set, and others with one."""
    if isinstance(error, DetCallbacksError) and os.environ.get("HYDRA_FULL_ERROR", "0") in (
        "",
        "0",
    ):
        from det_callbacks.report.console import print_error  # noqa: PLC0415  # loads rich

        print_error(error)
    else:
        traceback.print_exception(error)
