"""Determinism in a Hydra application, as the presets of ``pkg://det_callbacks.conf`` use it."""

import inspect
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import InstantiationException
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

from det_callbacks.environment import command_choice
from det_callbacks.errors import DetCallbacksError, NothingComparedError, SelectionError, SettingsError
from det_callbacks.integrations.lightning import DeterminismCallback
from det_callbacks.report.console import print_error
from det_callbacks.settings import DeterminismSettings, enforce_determinism
from det_callbacks.training import fits
from det_callbacks.training.fits import take_unfinished

# of the running job; set before the task function and taken back after it
_configuration: ContextVar[Mapping[str, Any] | None] = ContextVar("det_callbacks_configuration", default=None)

_OF_ONE_RUN = re.compile(r"\$\{(now:|hydra:(run|sweep|runtime\.output_dir|runtime\.cwd|job\.num|job\.id))[^}]*\}")

_ARGUMENTS = inspect.signature(DeterminismCallback).parameters


def determinism_callback(
    *, reference: str | None = None, current: str | None = None, **arguments: Any
) -> DeterminismCallback:
    """Return a :class:`DeterminismCallback` whose folders are those of this Hydra job.

    Relative paths start at the directory where the program was started, also where Hydra changes the working
    directory; ``current`` is by default ``determinism`` in the job's output directory. In a multirun each job has its
    own folder below them, ``job-0``, ``job-1`` and so on in the order of the sweep: record and verify the same sweep.
    """
    config = HydraConfig.get() if HydraConfig.initialized() else None  # None: composed by hand, outside hydra.main

    def folder(path: str | None) -> Path | None:
        if path is None or config is None:
            return None if path is None else Path(str(path)).absolute()
        return Path(config.runtime.cwd, str(path), f"job-{config.job.num}" if config.mode == RunMode.MULTIRUN else "")

    place, replay = folder(current), arguments.get("replay")
    if config is not None:
        if place is None and arguments.get("mode", "verify") in ("verify", "audit"):
            place = Path(config.runtime.output_dir, "determinism")
        if isinstance(replay, str) and replay.endswith((".yaml", ".yml")):
            arguments["replay"] = Path(config.runtime.cwd, replay)
    callback = DeterminismCallback(folder(reference), current=place, **arguments)
    if (configuration := _configuration.get()) is not None:
        callback.choices["config"] = configuration
    if config is not None:
        callback.choices |= command_choice(config.overrides.task, start=config.runtime.cwd)
    return callback


class DeterminismJobCallback(Callback):
    """Applies ``determinism.settings`` before the task function, takes them back after it, and sees to the exit status.

    The status is 1 diverged, 2 could not do it, 3 not comparable; in a multirun that of the first job that failed. A
    job in which no callback of ours ran a fit fails with 2, since it must not look verified; so does one whose settings
    cannot be applied, and none starts after it. After each job generators, flags, threads, environment variables and
    warning filters go back; not where a task leaves by KeyboardInterrupt or SystemExit, after which Hydra calls nobody.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()

    @override
    def on_job_start(self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any) -> None:
        with _ending_the_process_on_errors():
            mode = OmegaConf.select(config, "determinism.mode")
            if mode is None:
                raise SettingsError(
                    "hydra.callbacks.determinism is configured, but determinism.mode is not. Use the presets: add "
                    "pkg://det_callbacks.conf to hydra.searchpath and +determinism=record."
                )
            if mode != "disabled":
                self._open(config)

    @override
    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        with _ending_the_process_on_errors():
            error: Any = take_unfinished()
            self._undo.close()
            if job_return.status == JobStatus.FAILED:
                error = _error_of(job_return)
                if isinstance(error, InstantiationException):
                    error = error.__cause__  # an argument of ours that hydra.utils.instantiate passed on
            if isinstance(error, DetCallbacksError):
                # Hydra raises a failed job's return value when the run or the sweep ends, whatever the launcher; a
                # SystemExit passes through it as it is
                _print_error(error)
                job_return.status = JobStatus.FAILED
                job_return.return_value = SystemExit(error.exit_code)

    def _open(self, config: DictConfig) -> None:
        if unknown := [name for name in config.determinism if name not in _ARGUMENTS]:
            raise SelectionError(f"DeterminismCallback has no argument {unknown[0]}.")
        if OmegaConf.is_missing(config.determinism, "reference"):
            raise SettingsError(
                "determinism.reference is not set, so there is nowhere to record to or to verify against. "
                "Add determinism.reference=refs/run1 (a folder, from where the program is started)."
            )
        self._undo.callback(_configuration.reset, _configuration.set(configuration_of(config)))
        self._undo.callback(os.environ.update, dict(os.environ))
        self._undo.callback(os.environ.clear)  # is called before the update
        self._undo.enter_context(warnings.catch_warnings())
        # Nothing to set is still everything to put back, so that no job leaks into the next.
        settings = config.determinism.settings
        self._undo.enter_context(enforce_determinism(DeterminismSettings.choose() if settings is None else settings))
        # also where the job never ends: the task leaves by ``sys.exit``, perhaps with 0
        mode = config.determinism.mode
        name = "ReplicaAuditCallback" if mode == "replicas" else "DeterminismCallback"
        error = NothingComparedError(
            f"determinism.mode={mode}, but no {name} ran a fit in this job, so nothing was recorded or compared. The "
            "configuration is right; the program has to build cfg.callbacks (hydra.utils.instantiate), pass them to "
            "the Trainer, and call trainer.fit, with a strategy that trains in this process, too: ddp, not ddp_spawn."
        )
        before, fits.last_error = fits.num_fits, None
        fits.wait(self, lambda: fits.last_error if fits.num_fits > before else error)


def configuration_of(config: DictConfig) -> Mapping[str, Any]:
    """Return the resolved configuration of a job, without what two runs of one training have different.

    That is our own part, Hydra's, and what is interpolated of the time or of the job's folders. Where an interpolation
    does not resolve, which the program then does not need or will say, all values are as they are written.
    """
    text = _OF_ONE_RUN.sub("<run>", OmegaConf.to_yaml(config))
    written: Any = OmegaConf.to_container(OmegaConf.create(text))
    for place in (written, written.get("callbacks")):
        if isinstance(place, dict):
            place.pop("determinism", None)
    written.pop("hydra", None)
    written = OmegaConf.create(written)
    try:
        found: Any = OmegaConf.to_container(written, resolve=True)
    except OmegaConfBaseException:
        found = OmegaConf.to_container(written, resolve=False)
    return dict(found)


def _error_of(job_return: JobReturn) -> BaseException | None:
    """Return what a failed job raised."""
    try:
        job_return.return_value  # noqa: B018  # raises it
    except BaseException as error:  # noqa: BLE001  # whatever the user's code raised
        return error
    return None


def _print_error(error: Exception) -> None:
    """Print the message of an error of ours, and all of it where Hydra is asked for that, or it is our fault."""
    if isinstance(error, DetCallbacksError) and os.environ.get("HYDRA_FULL_ERROR", "0") in ("", "0"):
        print_error(error)
    else:
        traceback.print_exception(error)


@contextmanager
def _ending_the_process_on_errors() -> Iterator[None]:
    """Hydra turns exceptions of its callbacks into warnings; a SystemExit it lets pass."""
    try:
        yield
    except Exception as error:
        _print_error(error)
        raise SystemExit(getattr(error, "exit_code", DetCallbacksError.exit_code)) from error
