"""The Hydra job callback where a job starts the processes that train."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra_apps import CONFIG, VERIFY, RunApp
from omegaconf import DictConfig

from det_callbacks.callback import fits as fits_of_process
from det_callbacks.runs.store import Run

SPAWNING = """
    import sys

    import hydra
    import lightning.pytorch as pl

    sys.path[:0] = {paths!r}
    from styles import Classifier, Samples
    from torch.utils.data import DataLoader
    from trainers import quiet_trainer


    @hydra.main(version_base="1.3", config_path="conf", config_name="config")
    def main(config):
        callback = hydra.utils.instantiate(config.callbacks.determinism)
        trainer = quiet_trainer(callback, devices=2, strategy="ddp_spawn")
        trainer.fit(Classifier(), DataLoader(Samples(), batch_size=8))


    if __name__ == "__main__":
        main()
"""


def forked(task: Callable[[], None]) -> int:
    """Run a task in a child, as a strategy does, and return how it ended."""
    child = multiprocessing.get_context("fork").Process(target=task)
    child.start()
    child.join()
    return int(child.exitcode or 0)


@pytest.mark.parametrize("multirun", [False, True])
def test_a_fit_in_a_process_that_the_job_starts_counts(
    multirun: bool, run_app: RunApp, capsys: pytest.CaptureFixture[str]
) -> None:
    def task(config: DictConfig) -> None:
        assert forked(fits_of_process.note_ended if config.seed == 1 else time.thread_time) == 0

    assert run_app(task, *VERIFY, "seed=1") == 0
    assert run_app(task, *(("--multirun", "seed=1,2") if multirun else ("seed=2",)), *VERIFY) == 2
    assert capsys.readouterr().err.count("no DeterminismCallback ran a fit in this job") == 1
    assert fits_of_process.FITS_FILE not in os.environ
    # the job has ended, and this one nobody asks for
    assert forked(fits_of_process.note_ended) == 0


def test_the_file_that_fits_are_counted_in_is_gone_after_the_job(run_app: RunApp) -> None:
    files = []

    def task(config: DictConfig) -> None:
        files.append(Path(os.environ[fits_of_process.FITS_FILE]))
        assert files[0].read_bytes() == b""
        fits_of_process.note_ended()
        assert files[0].read_bytes() == b"1"

    assert run_app(task, "--multirun", *VERIFY, "seed=1,2") == 0
    assert files == files[:1] * 2
    assert not files[0].exists()


@pytest.mark.slow
@pytest.mark.ddp
def test_an_application_that_spawns_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    paths = [str(folder) for folder in Path(__file__).parents[:2]]
    (tmp_path / "train.py").write_text(textwrap.dedent(SPAWNING).format(paths=paths))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "train.py", "+determinism=record", *VERIFY[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run.open(tmp_path / "refs" / "run1")
    assert run.is_complete
    assert run.ranks == [0, 1]
    # the flags of the process that built the model are those of the ranks
    assert run.environment.entries["settings.cudnn_deterministic"].value is True
