"""Scripts to be checked, and processes that are forked: importing what a training needs takes longer than the test."""

import os
import runpy
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from det_callbacks import check as checks
from det_callbacks.check import CheckedRun, CheckReport
from det_callbacks.cli import check as command
from det_callbacks.cli import main

CONFIG = """
defaults: [_self_, override hydra/job_logging: none, override hydra/hydra_logging: none]
fault: none
steps: -1
callbacks: {}
hydra:
  searchpath: ['pkg://det_callbacks.conf']
  output_subdir: null
  run: {dir: hydra}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What ``det-callbacks check`` came to."""

    status: int
    report: CheckReport
    text: str
    errors: str

    def run(self, name: str) -> CheckedRun:
        """What a process came to."""
        (found,) = [run for run in self.report.runs if run.name == name]
        return found


Check = Callable[..., Checked]


def write_app(folder: Path) -> Path:
    """Put the application into a folder, and return its script."""
    (folder / "conf").mkdir(parents=True)
    (folder / "conf" / "config.yaml").write_text(CONFIG)
    return Path(shutil.copy(Path(__file__).with_name("checked_app.py"), folder / "train.py"))


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Check:
    """Check the application, each process a fork of this one: ``check("fault=set", options=("--vary", "threads"))``."""
    write_app(tmp_path / "app")
    monkeypatch.chdir(tmp_path / "app")
    monkeypatch.setattr(checks, "run_process", fork_process)
    reports: list[CheckReport] = []

    def keep(*words: Any, **options: Any) -> CheckReport:
        reports.append(checks.check_script(*words, **options))
        return reports[-1]

    monkeypatch.setattr(command, "check_script", keep)

    def run(*arguments: str, options: Sequence[str] = (), script: str = "train.py") -> Checked:
        home = tmp_path / f"check-{len(list(tmp_path.iterdir()))}"
        capfd.readouterr()
        status = main(["check", "--to", str(home), *options, "--", sys.executable, script, *arguments])
        text, errors = capfd.readouterr()
        assert reports[-1].exit_code == status
        return Checked(status=status, report=reports[-1], text=text, errors=errors)

    return run


def fork_process(
    words: Sequence[str], *, variables: Mapping[str, str], folder: Path | None = None, output: int | None = None
) -> int:
    """Run ``python SCRIPT ...`` in a fork, as ``run_process`` does in a fresh process.

    Args:
        words: Python, the script and its arguments.
        variables: the environment.
        folder: working directory; None is this one.
        output: file that gets what is printed, errors included; None leaves both where they are.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if not process:
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        if folder is not None:
            os.chdir(folder)
        _run(words, variables)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def _run(words: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    status = 1
    try:
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        for name in set(os.environ) - set(variables):
            del os.environ[name]
        os.environ.update(variables)
        sys.argv = [*words[1:]]
        sys.path.insert(0, str(Path(words[1]).resolve().parent))
        warnings.simplefilter("ignore")  # of Lightning and torch: what is printed is looked at
        torch.set_num_threads(1)  # threads of the parent's pool are not there
        GlobalHydra.instance().clear()
        runpy.run_path(words[1], run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException:  # a forked child has nobody above it: it prints what Python would, and ends
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
