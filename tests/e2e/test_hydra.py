"""The Hydra job callback in applications that hydra.main runs in this process,
without a training.
"""

import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hydra
import numpy as np
import pytest
import torch
from guards import process_state
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

import det_callbacks.integrations.hydra.job as job
from det_callbacks.environment.hydra import job_choices
from det_callbacks.errors import DivergenceError, NotComparableError
from det_callbacks.integrations.hydra import determinism_callback
from det_callbacks.integrations.lightning import ReplicaAuditCallback
from det_callbacks.training.recording import note_fit, wait

RunApp = Callable[..., tuple[int, str]]

CONFIG = """
seed: 1
callbacks: {}
hydra:
  searchpath: ['pkg://det_callbacks.conf']
  output_subdir: null
  run: {dir: out}
  sweep: {dir: outs}
"""
VERIFY = ("+determinism=verify", "determinism.reference=refs/run1")
JOB = "det_callbacks.integrations.hydra.DeterminismJobCallback"
MULTIRUN = ("--multirun", "seed=1,2")


@pytest.fixture
def run_app(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Iterator[RunApp]:
    """Run a task function as ``hydra.main`` does; return the exit status it would have
    ended with, and what it said.

    Whatever the task does, the process is afterwards what it was, unless it is a fork, which ends.
    """
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    def run(task: Callable[[DictConfig], None], *arguments: str) -> tuple[int, str]:
        quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none")
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments, *quiet])
        GlobalHydra.instance().clear()
        before, status = process_state(), 0
        try:
            hydra.main(
                version_base="1.3", config_path=str(tmp_path / "conf"), config_name="config"
            )(task)()
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        finally:
            GlobalHydra.instance().clear()
        assert process_state() == before or multiprocessing.parent_process() is not None
        return status, capsys.readouterr().err

    with warnings.catch_warnings():
        yield run


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
    # the filter that is left behind on purpose
    warnings.filterwarnings("ignore", message="left behind")


ONE_OF_TWO = DivergenceError("one fit of two")
# what the job of seed 1 raises, if Hydra shows all of it, and the status
ENDS: list[tuple[Any, str, int, str]] = [
    (DivergenceError("it diverged"), "1", 1, "DivergenceError: it diverged"),
    (NotComparableError("another machine"), "0", 3, "NotComparableError: another machine"),
    (ZeroDivisionError("mine"), "0", 1, "ZeroDivisionError: mine"),
    ("caught", "0", 2, "ValueError ended the last fit, but the program caught it"),
    ("no fit", "0", 2, "no DeterminismCallback ran a fit in this job"),
    (ONE_OF_TWO, "0", 1, "DivergenceError: one fit of two"),
]


@pytest.mark.parametrize(("end", "is_full", "status", "words"), ENDS)
def test_how_a_job_ended_is_the_status_and_every_job_starts_where_the_first_did(
    end, is_full, status, words, run_app, monkeypatch
):
    """Our errors have no traceback unless Hydra is asked for it, others are left to Hydra."""
    starts: list[dict[str, Any]] = []
    monkeypatch.setenv("HYDRA_FULL_ERROR", is_full)

    def task(config: DictConfig) -> None:
        starts.append(process_state())
        make_a_mess()
        if end != "no fit" or config.seed == 2:
            note_fit()
        if end is ONE_OF_TWO and config.seed == 1:
            wait(task, lambda: end)
        elif end == "caught" and config.seed == 1:
            note_fit(ended_by=ValueError())
        elif isinstance(end, Exception) and config.seed == 1:
            raise end

    ended, printed = run_app(task, *MULTIRUN, *VERIFY, "determinism.settings.seed=3")
    assert (ended, words in printed) == (status, True)
    assert starts == [starts[0]] * 2
    assert starts[0]["deterministic algorithms"] == 2
    assert starts[0]["torch"] == (3, torch.Generator().manual_seed(3).get_state().tolist())
    if not isinstance(end, ZeroDivisionError):
        assert printed.count(words) == 1
        assert ("Traceback" in printed, "in task" in printed) == (is_full == "1",) * 2
    assert printed.count("Error executing job") <= 1, printed


def test_a_refused_argument_of_the_callback_is_ours(run_app):
    def task(config: DictConfig) -> None:
        hydra.utils.instantiate(config.callbacks)

    for word, argument in (
        ("fwd", "determinism.phases=[fwd]"),
        ("got ''", "determinism.reference="),
    ):
        status, printed = run_app(task, *VERIFY, argument)
        assert (status, word in printed, "Traceback" in printed) == (2, True, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (*VERIFY, "determinism.settings.deterministic_algorithms=off"),
            "algorithms='off' is not allowed",
        ),
        (
            (*VERIFY, "determinism.settings=3"),
            "settings must be names with their values, such as seed: 0; got 3.",
        ),
        ((*VERIFY, "+determinism.levle=op"), "DeterminismCallback has no argument levle."),
        ((*MULTIRUN, "+determinism=verify"), "determinism.reference is not set"),
        ((f"+hydra.callbacks.determinism._target_={JOB}",), "determinism.mode is not"),
        (VERIFY, "KeyError: 'a defect'"),  # of ours: not the warning that Hydra makes of it
    ],
)
def test_what_cannot_be_applied_starts_no_job(arguments, words, run_app, monkeypatch):
    jobs: list[Any] = []
    if "a defect" in words:
        monkeypatch.setattr(job, "enforce_determinism", Mock(side_effect=KeyError("a defect")))
    status, printed = run_app(jobs.append, *arguments)
    assert (status, words in printed, jobs) == (2, True, [])


@pytest.mark.parametrize(
    "module", ["det_callbacks.integrations.hydra.job", "det_callbacks.integrations.lightning"]
)
def test_an_import_that_fails_is_shown_as_it_is(module, run_app, monkeypatch):
    """Hydra says of it that it cannot locate
    det_callbacks.integrations.hydra.DeterminismJobCallback.
    """
    for name in [
        name for name in sys.modules if name.startswith("det_callbacks.integrations.hydra")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # its import fails
    jobs: list[Any] = []
    status, printed = run_app(jobs.append, *VERIFY)
    assert (status, jobs, "Error locating target" in printed) == (2, [], False)
    assert f"ModuleNotFoundError: import of {module} halted" in printed


def test_disabled_applies_nothing_and_asks_for_nothing(run_app):
    before = process_state()

    def task(config: DictConfig) -> None:
        assert {**process_state(), "warning filters": before["warning filters"]} == before

    for arguments in (
        ["+determinism=disabled"],
        [*VERIFY, "determinism.mode=disabled", "determinism.settings.seed=9"],
    ):
        assert run_app(task, *arguments)[0] == 0


@pytest.mark.parametrize(("num_fits", "status"), [(0, 2), (1, 0)])
def test_leaving_by_sys_exit_does_not_look_verified(num_fits, status, run_app):
    def task(config: DictConfig) -> None:
        for _ in range(num_fits):
            note_fit()
        sys.exit(0)

    # it ends the process
    child = multiprocessing.get_context("fork").Process(target=run_app, args=(task, *VERIFY))
    child.start()
    child.join()
    assert child.exitcode == status


def test_an_audit_of_replicas_has_to_run(run_app):
    built: list[object] = []

    def task(config: DictConfig) -> None:
        built.append(hydra.utils.instantiate(config.callbacks.determinism))
        if config.seed == 1:
            note_fit()

    status, printed = run_app(task, "+determinism=replicas", "seed=2")
    assert (
        status,
        "mode=replicas, but no ReplicaAuditCallback ran a fit in this job" in printed,
    ) == (2, True)
    assert run_app(task, "+determinism=replicas", 'callbacks.determinism.ignore=["a.*"]')[0] == 0
    callback = built[-1]
    assert isinstance(callback, ReplicaAuditCallback)
    assert (callback.every_n_steps, callback.ignore) == (100, ("a.*",))


def test_folders_start_where_the_program_was_started(run_app, tmp_path):
    built: list[Any] = []
    configurations: list[Any] = []
    folders: set[Path] = set()

    def task(config: DictConfig) -> None:
        built.append(hydra.utils.instantiate(config.callbacks.determinism))
        configurations.append(job_choices()["config"])
        note_fit()
        folders.add(Path.cwd())

    def paths() -> list[tuple[Path | None, Path | None]]:
        return [(callback.reference, callback.current) for callback in built]

    run_app(task, *MULTIRUN, *VERIFY, "hydra.job.chdir=true", "hydra.sweep.subdir=${hydra.job.num}")
    reference = tmp_path / "refs" / "run1"
    assert folders == {tmp_path / "outs" / job for job in "01"}
    assert paths() == [
        (reference / f"job-{job}", tmp_path / "outs" / job / "determinism") for job in "01"
    ]
    assert configurations == [{"seed": seed, "callbacks": {}} for seed in (1, 2)]
    assert job_choices() == {}
    for chdir, given, current in (
        ("true", ["determinism.current=here"], "here"),
        ("false", [], "out/determinism"),
    ):
        built.clear()
        run_app(task, *VERIFY, f"hydra.job.chdir={chdir}", *given)
        assert paths() == [(reference, tmp_path / current)]
    assert tmp_path in folders
    built = [determinism_callback(reference="refs/run1", mode="record")]  # composed by hand
    assert paths() == [(reference, None)]
