"""Applications that hydra.main runs in this process."""

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from det_callbacks.callback import fits as fits_of_process

RunApp = Callable[..., int]

CONFIG = """
seed: 1
callbacks: {}
hydra:
  searchpath: ['pkg://det_callbacks.conf']
  output_subdir: null
  run: {dir: out}
  sweep: {dir: outs}
"""


@pytest.fixture
def run_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunApp]:
    """Run a task function as ``hydra.main`` does and return the exit status of the process it would have ended."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    def run(task: Callable[[DictConfig], None], *arguments: str) -> int:
        quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none")
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments, *quiet])
        GlobalHydra.instance().clear()
        try:
            hydra.main(version_base="1.3", config_path=str(tmp_path / "conf"), config_name="config")(task)()
        except SystemExit as leaving:
            return int(leaving.code or 0)
        finally:
            GlobalHydra.instance().clear()
        return 0

    with warnings.catch_warnings():
        yield run


VERIFY = ("+determinism=verify", "determinism.reference=refs/run1")


def finish_a_fit() -> None:
    fits_of_process._num_ended += 1
