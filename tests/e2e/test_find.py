"""``det-callbacks find``: from a script to its op, the numbers and a file;
and what it says where it cannot.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checking import Ended
from test_followed_loops import fork

from det_callbacks import Verdict
from det_callbacks.cli import check as checks
from det_callbacks.cli import main
from det_callbacks.runs.store import Run

RACING_APP = Path(__file__).with_name("racing_app.py")
Find = Callable[..., Ended]

APP = """
import os, sys, time, torch
from torch import nn
from pathlib import Path

runs = len(list(Path(".").glob("run-*")))
Path(f"run-{runs}").touch()
fault = sys.argv[1] if len(sys.argv) > 1 else ""
torch.manual_seed(runs if fault == "unseeded" else 0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    x = torch.randn(6, 4)
    out = model(x)
    racing = {"once": runs == 1 and step == 4, "moving": runs % 3 == 1 and step == runs}
    if racing.get(fault, False):
        with torch.no_grad():
            out.view(torch.int32)[0, 0].bitwise_xor_(1)
    optimizer.zero_grad()
    out.square().mean().backward()
    optimizer.step()
    if fault == "fails" and step == 5:
        raise ZeroDivisionError("the script's own error")
    if fault == "fails later" and runs > 1:
        raise ZeroDivisionError("the script's own error")
"""


@pytest.fixture
def find(tmp_path: Path, monkeypatch: Any, capfd: Any) -> Find:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "run_process", fork)
    Path("train.py").write_text(APP)

    def run(*words: str, fault: str = "") -> Ended:
        capfd.readouterr()
        status = main(
            ["find", "--out=out", *words, "--", sys.executable, "train.py", *filter(None, [fault])]
        )
        return Ended(status, *capfd.readouterr())

    return run


def test_one_command_goes_from_a_script_to_its_op_the_numbers_and_a_file(find):
    shutil.copy(RACING_APP, "train.py")
    done = find("--json")
    assert done.status == 1, done.errors
    answer = json.loads(done.text)
    first = answer["origins"][0]
    assert (first["op"], first["is_origin"], answer["cause"]) == (
        "app.sum_rows.default",
        True,
        "forward",
    )
    assert first["numbers"]["output"][0]["num_differing"] > 0
    pairs = answer["find"]["pairs"]
    assert [pair["recorded"].split()[0] for pair in pairs] == [
        "level=state",
        "level=op",
        "level=op",
    ]
    assert {pair["verdict"] for pair in pairs} == {"diverged"}
    assert "keep_tensors=forward/2:app.sum_rows.default" in pairs[-1]["recorded"]
    assert answer == {**json.loads(Path("out/verdict.json").read_text()), "find": answer["find"]}
    assert Verdict.from_dict(answer).verdict == "diverged"
    assert Path("out/report.html").exists()
    assert Path(answer["find"]["repro"]["path"]) == Path("out/repro/repro.py").absolute()
    assert "app.sum_rows.default is not an op of torch" in answer["find"]["repro"]["printed"]
    assert "run 1 of 2: level=state" in done.errors
    assert " s left: level=op only_steps=0" in done.errors
    steps = [
        Run.open(Path("out/runs", name)).rank(0).steps(0).tolist()
        for name in ("03-reference", "05-reference")
    ]
    assert steps == [[0], [0]], "a run ends after the step that is wanted"


def test_two_equal_runs_are_said_to_be_equal_and_what_could_be_varied(find):
    done = find()
    assert (done.status, "\nMATCH\n" in done.text) == (0, True), done.errors
    assert "find --vary workers,threads,hash-seed,memory -- " in " ".join(done.text.split())
    assert done.last.startswith("det-callbacks find: match (exit status 0); kept in ")


@pytest.mark.parametrize(("option", "steps"), [("--until=3", [0, 1, 2, 3]), ("--steps=2", [0, 1])])
def test_runs_end_after_the_steps_that_were_asked_for(option, steps, find):
    assert find(option, "--json").status == 0
    assert Run.open(Path("out/runs/01-reference")).rank(0).steps(0).tolist() == steps
    assert Run.open(Path("out/runs/01-reference")).is_complete


def test_the_fit_of_a_trainer_ends_after_the_step_that_was_asked_for(run_command):
    done = run_command("find", "--until=1", "--out=out")
    assert (done.status, "\nMATCH\n" in done.text) == (0, True), done.text + done.errors
    assert Run.open(Path("out/runs/01-reference")).rank(0).steps(0).tolist() == [0, 1]


OWN_RUN = """
with TrainingRun("own", mode="record", model=model, optimizers=optimizer{settings}) as run:
    for step in range(3):
        with run.step(x := torch.randn(6, 4)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("settings", "status"), [("", 0), (", settings={'cudnn_benchmark': False}", 2)]
)
def test_a_run_of_the_script_itself_is_off_unless_it_applies_settings(settings, status, find):
    head = APP.partition("for step in range(12)")[0].replace(
        "torch.manual_seed(", "torch.manual_seed(0 * "
    )
    own = OWN_RUN.replace("{settings}", settings)
    Path("train.py").write_text(f"from det_callbacks import TrainingRun\n{head}{own}")
    done = find()
    assert (done.status, Path("own").exists()) == (status, status == 2), done.text + done.errors
    assert status == 0 or "the script has its own run" in done.errors


def test_a_cause_that_is_no_op_ends_the_search(find):
    done = find("--json", fault="unseeded")
    answer = json.loads(done.text)
    assert (done.status, answer["cause"], len(answer["find"]["pairs"])) == (1, "initial_weights", 1)
    assert answer["find"]["repro"] is None


def test_a_difference_that_does_not_come_again_is_told_with_its_pairs(find):
    done = find("--tries=2", fault="once")
    assert done.status == 1
    text = " ".join(done.text.split())
    assert "It did not come again in 4 more pairs: raise --tries." in text
    assert "the difference came in 1 of 5 pairs" in text
    assert "step 4" in done.last


def test_a_race_that_moves_is_met_at_another_step(find):
    """The step that differed first is equal in the next pairs, so all steps are recorded,
    until it comes again.
    """
    done = find("--json", fault="moving")
    pairs = json.loads(done.text)["find"]["pairs"]
    found = [(pair["recorded"], pair["step"]) for pair in pairs if pair["verdict"] == "diverged"]
    assert done.status == 1
    assert len({step for _, step in found}) > 1
    assert found[1][0].startswith("level=op")
    assert "match" in {pair["verdict"] for pair in pairs}


@pytest.mark.parametrize(
    ("fault", "text", "why"),
    [("fails", APP, "exited with status 1"), ("", "print('nothing')", "nothing was recorded")],
)
def test_a_script_that_fails_or_trains_nothing_cannot_be_checked(fault, text, why, find):
    Path("train.py").write_text(text)
    done = find("--json", fault=fault)
    assert done.status == 2
    assert why in done.errors
    assert "ZeroDivisionError" in done.errors or not fault
    assert not done.text


def test_a_run_that_fails_later_leaves_the_verdict_so_far(find):
    text = APP.replace('"once": runs == 1 and step == 4', '"fails later": runs == 1 and step == 4')
    Path("train.py").write_text(text)
    done = find(fault="fails later")
    assert done.status == 1
    assert "The search ended early: The script exited with status 1" in " ".join(done.text.split())


def test_a_factor_that_cannot_be_varied_does_not_hide_another(find, monkeypatch):
    """The script has no DataLoader whose workers could vary."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = find("--vary=workers,threads")
    assert (done.status, "no torch DataLoader" in done.errors) == (2, True), done.errors
    assert "threads: 2 instead of 1" in done.text
    shutil.rmtree("out")
    Path("train.py").write_text(
        APP.replace('runs if fault == "unseeded"', '7 if os.environ["OMP_NUM_THREADS"] == "2"')
    )
    done = find("--vary=workers,threads", "--tries=1")
    assert done.status == 1, done.errors
    assert "torch.num_threads" in done.text


def test_with_a_given_reference_it_says_what_to_record_where(find):
    shutil.copy(RACING_APP, "train.py")
    assert main(["record", "ref", "--level=state", "--", sys.executable, "train.py"]) == 0
    done = find("ref")
    text = " ".join(done.text.split())
    assert done.status == 1
    assert "det-callbacks record OTHER --level=op --only-steps=0 -- python train.py" in text
    assert f"Then: det-callbacks find OTHER -- {sys.executable} train.py" in text
    shutil.rmtree("out")
    assert (
        main(["record", "ops", "--level=op", "--only-steps=0", "--", sys.executable, "train.py"])
        == 0
    )
    done = find("ops")
    assert (done.status, Path("out/repro/repro.py").exists()) == (1, True), done.text


def commit(folder: Path, *words: str) -> str:
    config = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *config, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_printed_line_bisects_to_the_commit(find, tmp_path, monkeypatch):
    """Of two revisions; a revision that cannot run is skipped."""
    home = tmp_path / "repository"
    home.mkdir()
    monkeypatch.chdir(home)
    lines = APP.replace('Path(f"run-{runs}").touch()', "")
    faster = lines.replace("lr=0.1", "lr=0.2")
    texts = [lines, "raise SystemExit(5)", lines, faster, faster]
    commit(home, "init", "-q")
    for number, text in enumerate(texts):
        Path("train.py").write_text(text + f"\n# {number}")
        commit(home, "add", "train.py")
        commit(home, "commit", "-qm", f"change {number}")
        if not number:
            reference = str(tmp_path / "ref")
            assert (
                main(["record", reference, "--level=state", "--", sys.executable, "train.py"]) == 0
            )
    done = find(reference)
    assert done.status == 1, done.errors
    text = " ".join(done.text.split())
    start, run = text.partition("To find the commit: ")[2].partition(", then: ")[::2]
    run = shlex.join(
        shlex.split(run.partition("; the difference")[0].partition(" det-callbacks find: ")[0])
    )
    tool = shlex.join([sys.executable, "-m", "det_callbacks"])
    commit(home, *shlex.split(start)[1:])
    printed = commit(home, *shlex.split(run.replace("det-callbacks verify", f"{tool} verify"))[1:])
    assert "change 3" in printed
    assert "is the first bad commit" in printed
    assert "125" in run
