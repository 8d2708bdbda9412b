"""A check in words, and its exit status."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from verdicts import DIVERGED, MATCH, NOT_COMPARABLE

from det_callbacks.check.model import CheckedRun, CheckReport
from det_callbacks.report import announce_run, render_check
from det_callbacks.report.tables import to_text

HOME = Path.cwd() / "determinism-check" / "today-0"
RECORDED = CheckedRun(name="recording", folder=HOME, outcome="recorded", status=0, command=("python", "a b.py"))
PLAIN = replace(RECORDED, name="plain", outcome="match", verdict=MATCH)
BROKEN = replace(PLAIN, outcome="diverged", verdict=DIVERGED, breaks_bits=True, status=1)


def text_of(*runs: CheckedRun, **fields: Any) -> str:
    values: dict[str, Any] = {"variables": {}, "is_hash_seed_random": False, **fields}
    report = CheckReport(command=("python", "a b.py"), folder=HOME, runs=runs, **values)
    return to_text(lambda console: render_check(report, console))


def factor(name: str, **fields: Any) -> CheckedRun:
    return replace(PLAIN, name=name, **{"change": f"another {name}", **fields})


def last(text: str) -> str:
    return (
        text.splitlines()[-1].removeprefix("det-callbacks check: ").removesuffix("; kept in determinism-check/today-0")
    )


def test_what_is_about_to_run_can_be_pasted_into_a_shell() -> None:
    assert to_text(lambda console: announce_run(RECORDED, console)) == "det-callbacks check: record: python 'a b.py'"
    told = to_text(lambda console: announce_run(factor("cwd"), console))
    assert told == "det-callbacks check: verify, cwd, another cwd: python 'a b.py'"
    cannot = replace(factor("cwd"), command=(), outcome="failed", problem="not varied", detail="it is so")
    told = to_text(lambda console: announce_run(cannot, console))
    assert told == "det-callbacks check: verify, cwd: it could not be varied: it is so."


def test_one_pair_is_the_verdict_that_diff_prints() -> None:
    text = text_of(RECORDED, PLAIN)
    assert text.startswith("MATCH\nAll agree.\n")
    assert last(text) == "match: the script repeats itself, bit for bit"
    text = text_of(RECORDED, BROKEN)
    assert text.startswith("DIVERGED\nNo.\n")
    assert last(text) == "diverged: the script does not repeat itself"
    assert "PYTHONHASHSEED" not in text
    assert "--vary hash-seed tells" in text_of(RECORDED, BROKEN, is_hash_seed_random=True)


def test_factors_are_a_table_and_those_that_break_bits_have_their_verdict() -> None:
    threads = factor("threads", outcome="not_comparable", verdict=NOT_COMPARABLE, breaks_bits=True)
    cwd = factor("cwd", outcome="diverged", verdict=DIVERGED, breaks_bits=True)
    remarked = factor("locale", detail="nothing sorts otherwise")
    text = text_of(RECORDED, PLAIN, threads, cwd, remarked, variables={"PYTHONHASHSEED": "0"})
    assert "MATCH" not in text
    assert (
        "threads: another threads. That was changed on purpose, and excuses nothing: threads change the bits here\n"
        "NOT COMPARABLE\n" in text
    )
    assert "cwd: another cwd\nDIVERGED\n" in text
    table = [
        line.split("  ") for line in text.splitlines() if line.startswith(("plain ", "threads ", "cwd ", "locale "))
    ]
    assert [[cell.strip() for cell in row if cell] for row in table] == [
        ["plain", "nothing", "match", "-", "-"],
        ["threads", "another threads", "diverged", "step 3, forward: aten.addmm.default in net.head", "forward"],
        ["cwd", "another cwd", "diverged", "step 3, forward: aten.addmm.default in net.head", "forward"],
        ["locale", "another locale", "match", "-", "-"],
    ]
    assert "locale: nothing sorts otherwise." in text
    assert "All runs had PYTHONHASHSEED=0, but for the one in which it was varied." in text
    assert last(text) == (
        "diverged: the script repeats itself, bit for bit; threads and cwd change the bits here; "
        "locale (in part) does not change the bits"
    )


def test_what_is_not_known_is_named() -> None:
    failed = factor("cwd", outcome="failed", problem="ended", status=1, verdict=None)
    text = text_of(RECORDED, PLAIN, factor("workers"), failed, factor("locale", outcome="not_comparable"))
    assert "cwd: the script failed from elsewhere, with status 1, and there is no verdict" in text
    assert "give it absolute paths" in text
    assert last(text) == (
        "failed: the script repeats itself, bit for bit; workers do not change the bits; not comparable: locale; "
        "could not be checked: cwd"
    )
    left = factor("cwd", outcome="not_run", problem="plain pair", change="", verdict=None)
    text = text_of(RECORDED, BROKEN, left)
    assert "--all runs it all the same" in text
    assert last(text) == "diverged: the script does not repeat itself; not run: cwd"
    cwd, workers = factor("cwd", outcome="diverged", verdict=DIVERGED), factor("workers")
    assert last(text_of(RECORDED, BROKEN, cwd, workers)) == (
        "diverged: the script does not repeat itself; whether cwd and workers change the bits here cannot be told"
    )
    other = replace(BROKEN, outcome="not_comparable", verdict=NOT_COMPARABLE, breaks_bits=False)
    assert last(text_of(RECORDED, other)).startswith("not_comparable: the two runs differ")


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"problem": "killed", "status": -11}, "recording: the process was killed by SIGSEGV."),
        ({"problem": "killed", "status": -99}, "killed by signal 99"),
        ({"problem": "ended", "status": 1}, "the script failed by itself, with status 1"),
        ({"problem": "ended", "status": 1}, "pkg://det_callbacks.conf in hydra.searchpath"),
        ({"problem": "nothing recorded", "status": 0}, "no DeterminismCallback recorded anything"),
        ({"problem": "incomplete", "detail": "torn"}, "its recording is incomplete: torn"),
        ({"problem": "unreadable", "detail": "x is damaged"}, "recording: x is damaged"),
    ],
)
def test_a_recording_that_failed_says_why(run: dict[str, Any], says: str) -> None:
    text = text_of(replace(RECORDED, outcome="failed", **run))
    assert says in text
    assert last(text) == "failed: it could not be checked whether the script repeats itself"


def test_a_script_that_failed_after_the_training_says_what_agreed() -> None:
    after = replace(PLAIN, outcome="failed", problem="ended", status=1)
    assert "failed after the training, with status 1: see what it printed. What was compared before agrees." in text_of(
        RECORDED, after
    )
    nothing = replace(after, problem="no verdict", verdict=None)
    assert "plain pair: the script ended well, and no DeterminismCallback verified anything." in text_of(
        RECORDED, nothing
    )
