"""The Hydra job callback in applications that hydra.main runs in this process, without a training."""

import os
import random
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import numpy as np
import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra_apps import CONFIG, VERIFY, RunApp, finish_a_fit
from omegaconf import DictConfig

import det_callbacks.hydra as job_callback
from det_callbacks.callback import ReplicaAuditCallback
from det_callbacks.callback import fits as fits_of_process
from det_callbacks.errors import DivergenceError, NotComparableError, ReferenceNotFoundError, SettingsError


def process_state() -> dict[str, Any]:
    return {
        "python": hash(random.getstate()),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "algorithms": torch.get_deterministic_debug_mode(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "variables": dict(os.environ),
        "filters": list(warnings.filters),
    }


def make_a_mess() -> None:
    random.random()
    np.random.random()
    torch.manual_seed(99)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(1 if torch.get_num_threads() != 1 else 2)
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT_BEHIND"] = "1"
    os.environ.pop("HOME", None)
    warnings.filterwarnings("ignore", message="left behind")  # the filter that is left behind on purpose


def test_settings_are_in_force_before_the_task_and_gone_after_it(run_app: RunApp) -> None:
    before, seen = process_state(), {}

    def task(config: DictConfig) -> None:
        seen.update(algorithms=torch.get_deterministic_debug_mode(), seed=torch.initial_seed(), draw=torch.rand(()))
        make_a_mess()
        finish_a_fit()

    assert run_app(task, *VERIFY, "determinism.settings.seed=0") == 0
    assert (seen["algorithms"], seen["seed"]) == (2, 0)
    assert torch.equal(seen["draw"], torch.rand((), generator=torch.Generator().manual_seed(0)))
    assert process_state() == before


@pytest.mark.parametrize("settings", [("determinism.settings.seed=3",), ("determinism.settings=null",)])
def test_every_job_of_a_multirun_starts_where_the_first_did(settings: tuple[str, ...], run_app: RunApp) -> None:
    before: dict[str, Any] = process_state()
    starts: list[dict[str, Any]] = []

    def task(config: DictConfig) -> None:
        starts.append(process_state())
        make_a_mess()
        finish_a_fit()
        if config.seed == 2:
            raise DivergenceError("the way back does not depend on success")

    assert run_app(task, "--multirun", *VERIFY, "seed=1,2,3", *settings) == 1
    assert len(starts) == 3
    assert starts[1] == starts[0]
    assert starts[2] == starts[0]
    assert process_state() == before


@pytest.mark.parametrize(
    ("error", "status", "multirun"),
    [
        (DivergenceError("it diverged"), 1, False),
        (ReferenceNotFoundError("no such run", "refs/run1"), 2, False),
        (SettingsError("not in force"), 2, True),
        (NotComparableError("another machine"), 3, False),
    ],
)
def test_our_errors_are_a_message_and_their_own_status(
    error: Exception, status: int, multirun: bool, run_app: RunApp, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = []

    def task(config: DictConfig) -> None:
        jobs.append(config.seed)
        finish_a_fit()
        if config.seed == 1:
            raise error

    assert run_app(task, *(("--multirun", "seed=1,2") if multirun else ()), *VERIFY) == status
    assert jobs == ([1, 2] if multirun else [1])
    told = capsys.readouterr().err
    assert f"{type(error).__name__}: {error}" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("determinism.level=opp", "got 'opp'"),
        ("determinism.phases=[fwd]", "fwd"),
        ("determinism.steps=some", "got 'some'"),
        ("determinism.on_divergence=stop", "got 'stop'"),
        ("determinism.every_n_steps=0", "every_n_steps=0"),
    ],
)
def test_an_argument_that_hydra_passes_on_is_our_error(
    override: str, told: str, run_app: RunApp, capsys: pytest.CaptureFixture[str]
) -> None:
    def task(config: DictConfig) -> None:
        hydra.utils.instantiate(config.callbacks)
        pytest.fail("the callback was built")

    assert run_app(task, *VERIFY, override) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


def test_full_error_adds_the_traceback(
    run_app: RunApp, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def task(config: DictConfig) -> None:
        raise DivergenceError("it diverged")

    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert run_app(task, *VERIFY) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "in task" in told


@pytest.mark.parametrize("multirun", [False, True])
def test_a_job_without_a_fit_is_not_verified(
    multirun: bool, run_app: RunApp, capsys: pytest.CaptureFixture[str]
) -> None:
    def task(config: DictConfig) -> None:
        if config.seed == 1:
            finish_a_fit()

    if multirun:
        assert run_app(task, "--multirun", *VERIFY, "seed=1,2") == 2
    else:
        assert run_app(task, *VERIFY, "seed=2") == 2
    told = capsys.readouterr().err
    assert told.count("no DeterminismCallback ran a fit in this job") == 1
    assert "determinism.mode=verify" in told
    assert run_app(task, *VERIFY, "seed=1") == 0


def test_an_audit_of_replicas_has_to_run(run_app: RunApp, capsys: pytest.CaptureFixture[str]) -> None:
    built: list[object] = []

    def task(config: DictConfig) -> None:
        built.append(hydra.utils.instantiate(config.callbacks.determinism))
        if config.seed == 1:
            finish_a_fit()

    assert run_app(task, "+determinism=replicas", "seed=2") == 2
    assert "determinism.mode=replicas, but no ReplicaAuditCallback ran a fit in this job" in capsys.readouterr().err
    assert run_app(task, "+determinism=replicas", 'callbacks.determinism.ignore=["a.*"]') == 0
    callback = built[-1]
    assert isinstance(callback, ReplicaAuditCallback)
    assert (callback.every_n_steps, callback.ignore) == (100, ("a.*",))


@pytest.mark.parametrize("multirun", [False, True])
def test_a_job_that_ended_before_the_last_fit_of_its_reference_fails(
    multirun: bool, run_app: RunApp, capsys: pytest.CaptureFixture[str]
) -> None:
    def task(config: DictConfig) -> None:
        finish_a_fit()
        if config.seed == 1:
            error = DivergenceError("one fit of two")
            fits_of_process.wait(task, fits_of_process.Waiting(error=error, is_fatal=True))

    assert run_app(task, *(("--multirun", "seed=1,2") if multirun else ()), *VERIFY) == 1
    assert capsys.readouterr().err.count("DivergenceError: one fit of two") == 1


def test_other_failures_are_left_to_hydra(run_app: RunApp, capsys: pytest.CaptureFixture[str]) -> None:
    before = process_state()

    def task(config: DictConfig) -> None:
        make_a_mess()
        raise ZeroDivisionError("mine")

    assert run_app(task, *VERIFY) == 1
    assert "ZeroDivisionError: mine" in capsys.readouterr().err
    assert process_state() == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("--multirun", "seed=1,2", *VERIFY, "determinism.settings.deterministic_algorithms=off"),
            "deterministic_algorithms='off' is not allowed",
        ),
        ((*VERIFY, "+determinism.settings.sead=0"), "Unknown determinism setting sead"),
        ((*VERIFY, "+determinism.levle=op"), "DeterminismCallback has no argument levle."),
        (("--multirun", "seed=1,2", "+determinism=verify"), "determinism.reference is not set"),
        (
            ("+hydra.callbacks.determinism._target_=det_callbacks.hydra.DeterminismJobCallback",),
            "determinism.mode is not",
        ),
    ],
)
def test_what_cannot_be_applied_starts_no_job(
    arguments: tuple[str, ...],
    told: str,
    run_app: RunApp,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, jobs = process_state(), []
    assert run_app(jobs.append, *arguments) == 2
    assert told in capsys.readouterr().err
    assert jobs == []
    assert process_state() == before


def test_a_defect_of_ours_is_not_a_warning(
    run_app: RunApp, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(settings: Any) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(job_callback, "enforce_determinism", defect)
    jobs: list[Any] = []
    assert run_app(jobs.append, *VERIFY) == 2
    assert "KeyError: 'a defect'" in capsys.readouterr().err
    assert jobs == []


def test_disabled_applies_nothing_and_asks_for_nothing(run_app: RunApp) -> None:
    before = process_state()
    seen = []

    def task(config: DictConfig) -> None:
        seen.append({key: value for key, value in process_state().items() if key != "filters"})

    assert run_app(task, "+determinism=disabled") == 0
    assert run_app(task, *VERIFY, "determinism.mode=disabled", "determinism.settings.seed=9") == 0
    expected = {key: value for key, value in before.items() if key != "filters"}
    assert seen == [expected, expected]


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_folders_start_where_the_program_was_started(chdir: str, run_app: RunApp, tmp_path: Path) -> None:
    built = []

    def task(config: DictConfig) -> None:
        built.append(hydra.utils.instantiate(config.callbacks.determinism))
        finish_a_fit()
        assert (Path.cwd() == tmp_path) is (chdir == "false")
        assert HydraConfig.initialized()

    run_app(task, *VERIFY, f"hydra.job.chdir={chdir}")
    run_app(task, *VERIFY, f"hydra.job.chdir={chdir}", "determinism.current=here")
    run_app(task, "+determinism=record", "determinism.reference=/refs/run1", f"hydra.job.chdir={chdir}")
    run_app(task, "--multirun", *VERIFY, f"hydra.job.chdir={chdir}", "seed=1,2", "hydra.sweep.subdir=${hydra.job.num}")
    assert [(str(callback.reference), callback.current and str(callback.current)) for callback in built] == [
        (f"{tmp_path}/refs/run1", f"{tmp_path}/out/determinism"),
        (f"{tmp_path}/refs/run1", f"{tmp_path}/here"),
        ("/refs/run1", None),
        (f"{tmp_path}/refs/run1/job-0", f"{tmp_path}/outs/0/determinism"),
        (f"{tmp_path}/refs/run1/job-1", f"{tmp_path}/outs/1/determinism"),
    ]


def test_a_callback_built_outside_hydra_main_takes_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    callback = job_callback.determinism_callback(reference="refs/run1", mode="record")
    assert callback.reference == tmp_path / "refs" / "run1"


def test_jobs_leave_no_exit_handlers(run_app: RunApp, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Any] = []
    register = SimpleNamespace(register=lambda handler, *_: handlers.append(handler), unregister=handlers.remove)
    monkeypatch.setattr(job_callback, "atexit", register)

    def task(config: DictConfig) -> None:
        assert len(handlers) == 1
        finish_a_fit()

    assert run_app(task, "--multirun", *VERIFY, "seed=1,2,3") == 0
    assert handlers == []


@pytest.mark.slow
@pytest.mark.parametrize(("fits", "status"), [(0, 2), (1, 0)])
def test_leaving_by_sys_exit_does_not_look_verified(fits: int, status: int, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            f"""
            import sys

            import hydra

            from det_callbacks.callback import fits


            @hydra.main(version_base="1.3", config_path="conf", config_name="config")
            def main(config):
                fits._num_ended += {fits}
                sys.exit(0)


            main()
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "train.py", *VERIFY], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == status, done.stderr
    assert ("no DeterminismCallback ran a fit" in done.stderr) is (status == 2)
