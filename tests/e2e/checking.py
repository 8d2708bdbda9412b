"""Scripts to be checked, each process a fork of this one."""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forks import fork_process

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


__all__ = ["Check", "Checked", "check", "fork_process", "write_app"]

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
