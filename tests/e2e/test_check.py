"""``det-callbacks check`` on an application that depends on one thing that must not matter."""

import re
import sys
from pathlib import Path

import pytest
import torch
from checking import Check, Checked, check
from styles import FEATURES, Classifier
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback
from det_callbacks.check import NUM_WORKERS_VARIABLE
from det_callbacks.cli import main
from det_callbacks.errors import SettingsError
from det_callbacks.verdict import Verdict

pytestmark = LIGHTNING_ADVICE

__all__ = ["check"]

STATE = "determinism.level=state"


def verdict_of(done: Checked, name: str) -> Verdict:
    verdict = done.run(name).verdict
    assert verdict is not None
    return verdict


@pytest.mark.slow
def test_a_script_that_repeats_itself_is_a_match(check: Check) -> None:
    done = check(STATE)
    assert done.status == 0
    assert [(run.name, run.outcome) for run in done.report.runs] == [
        ("recording", "recorded"),
        ("plain", "match"),
    ]
    assert verdict_of(done, "plain").counts.steps_compared == 4
    assert "\nMATCH\nAll " in done.text
    assert "training with none" in done.text
    assert re.search(r"check: record: .*/python\S* train.py \S+ \+determinism=record", done.text)
    assert "match: the script repeats itself, bit for bit; kept in " in done.text
    home = done.report.folder
    assert sorted(path.name for path in home.iterdir()) == [".gitignore", "plain", "reference"]
    assert (home / ".gitignore").read_text() == "*\n"


def test_augmentation_in_the_main_process_depends_on_the_workers(check: Check) -> None:
    done = check(STATE, "fault=augmentation", options=("--vary", "workers"))
    assert done.status == 1
    assert [(run.name, run.outcome) for run in done.report.runs[1:]] == [("plain", "match"), ("workers", "diverged")]
    assert done.run("workers").change == "2 instead of 0"
    verdict = verdict_of(done, "workers")
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.step, verdict.cause) == (0, "data_content")
    assert "\nworkers: 2 instead of 0\nDIVERGED\n" in done.text
    assert "num_workers of train_dataloader: 0 in the reference, 2 now" in done.text
    assert re.search(r"^plain +nothing +match +- +-$", done.text, re.MULTILINE)
    assert re.search(
        r"^workers +2 instead of 0 +diverged +step 0, data: batch\[0\] +data_content$", done.text, re.MULTILINE
    )
    assert "bit for bit; bits depend on: workers; kept in" in done.text


@pytest.mark.slow
def test_nothing_is_varied_where_the_plain_pair_differs(check: Check) -> None:
    done = check(STATE, "fault=unseeded", options=("--vary", "workers,threads"))
    assert done.status == 1
    assert [run.outcome for run in done.report.runs] == ["recorded", "diverged"]
    assert "cause      initial_weights" in done.text
    assert "does not repeat itself; not run: workers, threads" in done.text


def test_workers_that_no_loader_can_have_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would tell that a run with another number of them was none."""
    monkeypatch.setenv(NUM_WORKERS_VARIABLE, "2")
    trainer = quiet_trainer(DeterminismCallback(tmp_path / "run", mode="record", level="state"))
    with pytest.raises(SettingsError, match="no torch DataLoader whose number of workers"):
        trainer.fit(Classifier(), [(torch.ones(2, FEATURES), torch.tensor([0, 1]))])


def test_an_application_that_builds_no_callback_is_no_match(check: Check) -> None:
    done = check(STATE, "fault=no callbacks")
    assert done.status == 2
    assert "the script failed with status" in done.report.runs[-1].reason
    assert "no DeterminismCallback ran a fit in this job" in done.errors
    assert "passes them to the Trainer" in done.text
    assert "it could not be checked whether the script repeats itself" in done.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("killed=verify", "the process was killed by signal 9 (Killed)"),
        ("fails_after=verify", "failed with status 1: see what it printed. What was compared before agrees"),
    ],
)
def test_a_script_that_fails_is_no_match(arguments: str, reason: str, check: Check) -> None:
    done = check(STATE, arguments)
    assert done.status == 2
    assert [run.outcome for run in done.report.runs] == ["recorded", "failed"]
    assert reason in done.report.runs[-1].reason
    assert (done.report.runs[-1].verdict is not None) is (arguments == "fails_after=verify")


def test_a_script_that_takes_no_preset_is_no_match(check: Check) -> None:
    Path("ignores.py").touch()
    done = check(STATE, script="ignores.py")
    assert done.status == 2
    assert "no DeterminismCallback recorded anything" in done.text


@pytest.mark.slow
def test_workers_of_what_has_none_are_not_varied(check: Check) -> None:
    done = check(STATE, "fault=no loader", options=("--vary", "workers"))
    assert done.status == 2
    assert "workers: it could not be varied: the training has no torch DataLoader" in done.text


@pytest.mark.slow
def test_threads_that_the_script_sets_by_itself_are_not_varied(check: Check) -> None:
    done = check(STATE, "fault=own threads", "callbacks.determinism.settings=null", options=("--vary", "threads"))
    assert (done.status, verdict_of(done, "threads").verdict) == (2, "match")
    assert "threads: it could not be varied: the script sets torch.num_threads by itself" in done.text


@pytest.mark.slow
def test_the_folder_is_a_new_one_each_time(
    check: Check, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not named; one that holds something is refused."""
    words = ["--", sys.executable, "train.py", "fails=record"]
    assert [main(["check", *words]) for _ in range(2)] == [2, 2]
    homes = sorted(Path("determinism-check").iterdir())
    assert len(homes) == 2
    assert str(homes[1]) in capfd.readouterr().out
    assert main(["check", "--to", str(homes[0]), *words]) == 2
    assert "is not an empty folder" in capfd.readouterr().err
