"""``det-callbacks check`` on an application that depends on one thing that must not matter."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from checking import Check, check
from styles import FEATURES, Classifier
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback
from det_callbacks.check import NUM_WORKERS_VARIABLE
from det_callbacks.cli import main
from det_callbacks.errors import SettingsError

pytestmark = LIGHTNING_ADVICE

__all__ = ["check"]

STATE = "determinism.level=state"


@pytest.mark.slow
def test_a_script_that_repeats_itself_is_a_match(check: Check) -> None:
    done = check(STATE)
    assert done.status == 0
    assert [(run["name"], run["outcome"], run["status"]) for run in done.report["runs"]] == [
        ("recording", "recorded", 0),
        ("plain", "match", 0),
    ]
    assert done.report["breaking"] == []
    assert done.run("plain")["verdict"]["counts"]["steps_compared"] == 4
    assert "\nMATCH\nAll " in done.text
    assert "training with none" in done.text
    assert re.search(r"check: record: .*/python\S* .*/train.py \S+ \+determinism=record", done.text)
    assert "match: the script repeats itself, bit for bit; kept in " in done.text
    home = Path(done.report["folder"])
    assert sorted(path.name for path in home.iterdir()) == [".gitignore", "check.json", "plain", "reference"]
    assert (home / ".gitignore").read_text() == "*\n"


def test_augmentation_in_the_main_process_depends_on_the_workers(check: Check) -> None:
    done = check(STATE, "fault=augmentation", options=("--vary", "workers"))
    assert done.status == 1
    assert [(run["name"], run["outcome"], run["breaks_bits"]) for run in done.report["runs"][1:]] == [
        ("plain", "match", False),
        ("workers", "diverged", True),
    ]
    assert done.report["breaking"] == ["workers"]
    workers = done.run("workers")
    assert workers["change"] == "2 workers instead of 0"
    assert workers["verdict"]["first_divergence"]["step"] == 0
    assert workers["verdict"]["cause"] == "data_content"
    assert "\nworkers: 2 workers instead of 0\nDIVERGED\n" in done.text
    assert "num_workers of train_dataloader: 0 in the reference, 2 now" in done.text
    assert re.search(r"^plain +nothing +match +- +-$", done.text, re.MULTILINE)
    assert re.search(
        r"^workers +2 workers instead of 0 +diverged +step 0, data: batch\[0\] +data_content$", done.text, re.MULTILINE
    )
    assert "bit for bit; workers change the bits here; kept in" in done.text


@pytest.mark.slow
def test_what_lies_in_the_folder_decides(check: Check) -> None:
    done = check(STATE, "fault=listing", options=("--vary", "cwd"))
    assert (done.status, done.report["breaking"]) == (1, ["cwd"])
    assert Path(done.run("cwd")["folder"]).name == "elsewhere"
    assert "cwd changes the bits here" in done.text


@pytest.mark.slow
def test_what_cannot_be_run_from_elsewhere_is_said(check: Check) -> None:
    done = check(STATE, "fault=relative path", options=("--vary", "cwd"))
    assert (done.status, done.report["breaking"]) == (2, [])
    assert (done.run("cwd")["outcome"], done.run("cwd")["problem"]) == ("failed", "ended")
    assert "cwd: the script failed from elsewhere, with status 1, and there is no verdict" in done.text
    assert "could not be checked: cwd" in done.text
    assert "No such file or directory: 'data.txt'" in done.errors


@pytest.mark.slow
def test_sorting_by_the_locale_decides(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    localedef = shutil.which("localedef")
    if localedef is None:
        pytest.skip("localedef is not installed, which makes a locale that sorts by language")
    made = subprocess.run(
        [localedef, "-i", "en_US", "-f", "UTF-8", str(tmp_path / "en_US.UTF-8")], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no sources of locales are installed: {made.stderr.decode()}")
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    done = check(STATE, "fault=collation", options=("--vary", "locale"))
    assert (done.status, done.report["breaking"]) == (1, ["locale"])
    assert done.run("locale")["change"] == "LC_ALL en_US.UTF-8 instead of C.UTF-8"


@pytest.mark.slow
def test_nothing_is_varied_where_the_plain_pair_differs(check: Check) -> None:
    done = check(STATE, "fault=unseeded", options=("--vary", "workers,cwd"))
    assert (done.status, done.report["breaking"]) == (1, ["plain"])
    assert [run["outcome"] for run in done.report["runs"]] == ["recorded", "diverged", "not_run", "not_run"]
    assert "cause      initial_weights" in done.text
    assert "does not repeat itself; not run: workers and cwd" in done.text
    assert "--all runs it all the same" in done.text
    assert "--vary hash-seed tells" in done.text


def test_workers_that_no_loader_can_have_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would tell that a run with another number of them was none."""
    monkeypatch.setenv(NUM_WORKERS_VARIABLE, "2")
    trainer = quiet_trainer(DeterminismCallback(tmp_path / "run", mode="record", level="state"))
    with pytest.raises(SettingsError, match="no torch DataLoader whose number of workers"):
        trainer.fit(Classifier(), [(torch.ones(2, FEATURES), torch.tensor([0, 1]))])


def test_an_application_that_builds_no_callback_is_no_match(check: Check) -> None:
    done = check(STATE, "fault=no callbacks")
    assert (done.status, done.report["runs"][-1]["problem"]) == (2, "ended")
    assert "no DeterminismCallback ran a fit in this job" in done.errors
    assert "passes them to the Trainer" in done.text
    assert "it could not be checked whether the script repeats itself" in done.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "outcomes", "problem"),
    [
        ("killed=verify", ["recorded", "failed"], "killed"),
        ("fails_after=verify", ["recorded", "failed"], "ended"),
    ],
)
def test_a_script_that_fails_is_no_match(arguments: str, outcomes: list[str], problem: str, check: Check) -> None:
    done = check(STATE, arguments)
    assert done.status == 2
    assert [run["outcome"] for run in done.report["runs"]] == outcomes
    assert done.report["runs"][-1]["problem"] == problem
    assert (done.report["runs"][-1]["verdict"] is not None) is (arguments == "fails_after=verify")


def test_a_script_that_takes_no_preset_is_no_match(check: Check) -> None:
    Path("ignores.py").touch()
    done = check(STATE, script="ignores.py")
    assert (done.status, done.report["runs"][-1]["problem"]) == (2, "nothing recorded")
    assert "no DeterminismCallback recorded anything" in done.text


@pytest.mark.slow
def test_workers_of_what_has_none_are_not_varied(check: Check) -> None:
    done = check(STATE, "fault=no loader", options=("--vary", "workers"))
    assert (done.status, done.run("workers")["problem"]) == (2, "not varied")
    assert "workers: it could not be varied: the training has no torch DataLoader" in done.text


@pytest.mark.slow
def test_threads_that_the_script_sets_by_itself_are_not_varied(check: Check) -> None:
    done = check(
        STATE, "fault=own threads", "callbacks.determinism.settings=null", options=("--vary", "threads", "--json")
    )
    assert (done.status, done.run("threads")["problem"]) == (2, "not varied")
    assert done.run("threads")["verdict"]["verdict"] == "match"


@pytest.mark.slow
def test_json_is_alone_on_standard_output(check: Check) -> None:
    done = check(STATE, options=("--json",))
    assert json.loads(done.text) == done.report
    assert "training with none" in done.errors
    assert "check: record: " in done.errors


@pytest.mark.slow
def test_the_folder_is_a_new_one_each_time(
    check: Check, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not named; one that holds something is refused."""
    words = ["--", "python", "train.py", "fails=record"]
    assert [main(["check", *words]) for _ in range(2)] == [2, 2]
    homes = sorted(Path("determinism-check").iterdir())
    assert len(homes) == 2
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-\d", home.name) for home in homes)
    assert f"kept in {homes[1]}" in capfd.readouterr().out
    assert main(["check", "--to", str(homes[0]), *words]) == 2
    assert "is not an empty folder" in capfd.readouterr().err
