"""A check in words."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from verdicts import DIVERGED, MATCH, NOT_COMPARABLE

from det_callbacks.check import CheckedRun, CheckReport
from det_callbacks.cli.check import render_check
from det_callbacks.report.console import to_text

RECORDED = CheckedRun(name="recording", outcome="recorded")
PLAIN = CheckedRun(name="plain", outcome="match", verdict=MATCH)
BROKEN = replace(PLAIN, outcome="diverged", verdict=DIVERGED)


def text_of(*runs: CheckedRun, **fields: Any) -> str:
    report = CheckReport(**{"folder": Path("home"), "runs": runs, "not_run": (), **fields})
    return to_text(lambda console: render_check(report, console))


def factor(name: str, **fields: Any) -> CheckedRun:
    return replace(PLAIN, name=name, **{"change": f"another {name}", **fields})


def last(text: str) -> str:
    return text.splitlines()[-1].removeprefix("det-callbacks check: ").removesuffix("; kept in home")


def test_one_pair_is_the_verdict_that_diff_prints() -> None:
    text = text_of(RECORDED, PLAIN)
    assert text.strip().startswith("MATCH\nAll agree.\n")
    assert last(text) == "match: the script repeats itself, bit for bit"
    text = text_of(RECORDED, BROKEN, not_run=("workers", "threads"))
    assert text.strip().startswith("DIVERGED\nNo.\n")
    assert last(text) == "diverged: the script does not repeat itself; not run: workers, threads"
    other = replace(BROKEN, outcome="not_comparable", verdict=NOT_COMPARABLE)
    assert last(text_of(RECORDED, other)) == "not_comparable: the two runs differ, and so does what they ran on"


def test_factors_are_a_table_and_those_that_break_bits_have_their_verdict() -> None:
    threads = factor("threads", outcome="diverged", verdict=NOT_COMPARABLE)
    failed = factor("hash-seed", outcome="failed", verdict=None, reason="it ended")
    text = text_of(RECORDED, PLAIN, factor("workers"), threads, failed)
    assert "MATCH" not in text
    assert "threads: another threads\nNOT COMPARABLE\n" in text
    table = [line.split("  ") for line in text.splitlines() if line.startswith(("plain  ", "workers  ", "threads  "))]
    assert [[cell.strip() for cell in row if cell] for row in table] == [
        ["plain", "nothing", "match", "-", "-"],
        ["workers", "another workers", "match", "-", "-"],
        ["threads", "another threads", "diverged", "step 3, forward: aten.addmm.default", "forward"],
    ]
    assert "hash-seed: it ended." in text
    assert last(text) == (
        "diverged: the script repeats itself, bit for bit; bits depend on: threads; bits do not depend on: workers; "
        "could not be varied or checked: hash-seed"
    )


def test_a_recording_that_failed_says_why() -> None:
    text = text_of(replace(RECORDED, outcome="failed", reason="no callback"))
    assert "recording: no callback.\ncheck expects a Hydra application with pkg://det_callbacks.conf" in text
    assert last(text) == "failed: it could not be checked whether the script repeats itself"
