"""One job of a Hydra application: its folders and settings."""

import inspect
import io
import os
import warnings
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from det_callbacks.errors import (
    DetCallbacksError,
    NothingComparedError,
    SelectionError,
    SettingsError,
)
from det_callbacks.integrations.lightning import DeterminismCallback
from det_callbacks.settings import DeterminismSettings, enforce_determinism
from det_callbacks.training import recording
from det_callbacks.training.recording import finish

_ARGUMENTS = inspect.signature(DeterminismCallback).parameters


def callback_of_job(
    reference: str | None, current: str | None, arguments: dict[str, Any]
) -> DeterminismCallback:
    # None if composed outside hydra.main
    config = HydraConfig.get() if HydraConfig.initialized() else None

    def folder(path: str | None) -> Path | None:
        if path is None:
            return None
        if not str(path):  # Path("") is the launch directory
            raise SelectionError(
                "determinism.reference and determinism.current must be paths of folders; got ''."
            )
        if config is None:
            return Path(str(path)).absolute()
        return Path(
            config.runtime.cwd,
            str(path),
            f"job-{config.job.num}" if config.mode == RunMode.MULTIRUN else "",
        )

    place, replay = folder(current), arguments.get("replay")
    if config is not None:
        if place is None and arguments.get("mode", "verify") in ("verify", "audit"):
            place = Path(config.runtime.output_dir, "determinism")
        if isinstance(replay, str) and replay.endswith((".yaml", ".yml")):
            arguments["replay"] = Path(config.runtime.cwd, replay)
    return DeterminismCallback(folder(reference), current=place, **arguments)


class Job:
    def __init__(self) -> None:
        self._undo = ExitStack()

    def begin(self, config: DictConfig) -> None:
        mode = OmegaConf.select(config, "determinism.mode")
        if mode is None:
            raise SettingsError(
                "hydra.callbacks.determinism is configured, but determinism.mode is not. Use the "
                "presets: add pkg://det_callbacks.conf to hydra.searchpath and +determinism=record."
            )
        if mode != "disabled":
            self._open(config)

    def end(self, job_return: JobReturn) -> DetCallbacksError | None:
        """Restore the settings; return our error, if any, that the job ends with and
        that sets its exit status.
        """
        error: Any = finish(has_failed=job_return.status == JobStatus.FAILED)
        self._undo.close()
        if job_return.status == JobStatus.FAILED:
            error = _error_of(job_return)
            if isinstance(error, InstantiationException):
                error = error.__cause__  # raised while hydra.utils.instantiate built the callback
        if not isinstance(error, DetCallbacksError):
            return None
        # Hydra raises the return value of a failed job at the end of the run;
        # it lets a SystemExit pass
        job_return.status = JobStatus.FAILED
        job_return.return_value = SystemExit(error.exit_code)
        return error

    def _open(self, config: DictConfig) -> None:
        if unknown := [name for name in config.determinism if name not in _ARGUMENTS]:
            raise SelectionError(f"DeterminismCallback has no argument {unknown[0]}.")
        if OmegaConf.is_missing(config.determinism, "reference"):
            raise SettingsError(
                "determinism.reference is not set, so there is no folder to record to or verify "
                "against. Add determinism.reference=refs/run1 (relative to the directory where you "
                "start the program)."
            )
        self._undo.callback(os.environ.update, dict(os.environ))
        self._undo.callback(os.environ.clear)  # undone before the update
        self._undo.enter_context(warnings.catch_warnings())
        # restore everything even without settings, so that no job affects the next
        settings = config.determinism.settings
        nothing = DeterminismSettings.choose()
        self._undo.enter_context(enforce_determinism(nothing if settings is None else settings))
        # checked even if the task ends with ``sys.exit``
        mode = config.determinism.mode
        name = "ReplicaAuditCallback" if mode == "replicas" else "DeterminismCallback"
        error = NothingComparedError(
            f"determinism.mode={mode}, but no {name} ran a fit in this job, so nothing was "
            "recorded or compared. In the program, build cfg.callbacks (hydra.utils.instantiate), "
            "pass it to the Trainer, and call trainer.fit, with a strategy that trains in this "
            "process: ddp, not ddp_spawn."
        )
        before, recording.last_error = recording.num_fits, None
        recording.wait(self, lambda: recording.last_error if recording.num_fits > before else error)


def _error_of(job_return: JobReturn) -> BaseException | None:
    try:
        # Hydra writes "Error executing job" each time, and once more at the end
        with redirect_stderr(io.StringIO()):
            job_return.return_value  # noqa: B018  # raises it
    except BaseException as error:  # noqa: BLE001  # the user's code may raise anything
        return error
    return None
