"""The commands show and diff on real recordings: exit status, JSON, plain output and errors."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Fit, record
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, cli, compare_runs
from det_callbacks.digest import format_digest
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE

ANSI = "\x1b["
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference, the same again, and one in which a weight was initialised differently."""
    folder = tmp_path_factory.mktemp("runs")
    record(folder / "reference")
    record(folder / "again")
    fit = Fit(DeterminismCallback(folder / "other", mode="record"))
    with torch.no_grad():
        fit.model.first.weight[0, 0] += 1
    fit.run()
    Fit(DeterminismCallback(folder / "state", mode="record", level="state")).run()
    record(folder / "longer", max_epochs=6)
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; return its exit status, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as leaving:  # argparse
            status = int(leaving.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


# processes


def test_a_process_exits_with_the_verdict_and_pipes_plain_text(runs: Path) -> None:
    words = [sys.executable, "-m", "det_callbacks", "diff", str(runs / "reference"), str(runs / "other")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stdout.startswith("DIVERGED\n")
    assert "the initial state first.weight differs" in done.stdout
    assert done.stderr == ""
    assert ANSI not in done.stdout


@pytest.mark.parametrize("words", ["show {run} --json", "ops --used-by {run} --json"])
def test_what_could_not_be_done_is_said_on_standard_error(words: str, tmp_path: Path, command: Command) -> None:
    status, out, err = command(*words.format(run=tmp_path / "nowhere").split())
    assert (status, out) == (2, "")
    assert err.startswith("det-callbacks: There is no run at ")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_whoever_reads_may_leave(runs: Path) -> None:
    script = f"{sys.executable} -m det_callbacks show {runs / 'longer'} --json | head -c 20; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout[20:] == "0\n"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


# diff


def test_diff_of_equal_runs(runs: Path, command: Command) -> None:
    status, out, err = command("diff", runs / "reference", runs / "again")
    assert (status, err) == (0, "")
    assert out.startswith("MATCH\nAll ")
    assert "cause" not in out


@pytest.mark.parametrize(("current", "status"), [("again", 0), ("other", 1), ("longer", 1)])
def test_diff_json_is_the_verdict_and_nothing_else(current: str, status: int, runs: Path, command: Command) -> None:
    done, out, err = command("diff", runs / "reference", runs / current, "--json")
    assert (done, err) == (status, "")
    verdict = compare_runs(runs / "reference", runs / current)
    assert json.loads(out) == verdict.to_dict()
    assert out.endswith("}\n")


def test_diff_of_runs_of_other_length(runs: Path, command: Command) -> None:
    status, out, _ = command("diff", runs / "reference", runs / "longer")
    assert status == 1
    assert "Steps 4 to 23 (20 of them) are only in the current run; the 4 steps that both have agree." in out
    status, out, _ = command("diff", runs / "reference", runs / "longer", "--steps", "common")
    assert status == 0
    assert "Only steps that both runs have were compared." in out


def test_diff_of_machines_that_differ_is_not_comparable(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        fit = Fit(DeterminismCallback(tmp_path / "run", mode="record"))
        with torch.no_grad():
            fit.model.first.weight[0, 0] += 1
        fit.run()
    finally:
        torch.set_num_threads(threads)
    status, out, _ = command("diff", runs / "reference", tmp_path / "run")
    assert status == 3
    assert out.startswith("NOT COMPARABLE\n")
    assert f"num_threads: {threads} in the reference, {threads + 1} now" in out


def test_diff_of_other_selections_is_no_verdict(runs: Path, command: Command) -> None:
    status, out, err = command("diff", runs / "reference", runs / "state")
    assert (status, out) == (2, "")
    assert "did not record the same: level: 'op' and 'state'" in err


# show


def test_show_lists_the_steps(runs: Path, command: Command) -> None:
    status, out, err = command("show", runs / "reference")
    assert (status, err) == (0, "")
    run = Run.open(runs / "reference")
    lines = out.splitlines()
    assert lines[0] == f"run {run.run_id} in {runs / 'reference'}: complete"
    assert "level op" in lines[1]
    assert lines[2] == "rank 0: 4 steps in 1 fit"
    assert lines[3].split() == ["fit", "step", "epoch", "sites", "program", "layout", "chain"]
    assert [line.split()[1] for line in lines[4:]] == ["0", "1", "2", "3"]
    assert lines[-1].endswith(format_digest(run.rank(0).chain(0, 3)))
    assert ANSI not in out


def test_show_shortens_a_long_run(runs: Path, command: Command) -> None:
    _, short, _ = command("show", runs / "longer")
    _, long, _ = command("show", runs / "longer", "--all")
    assert [line.split()[1] for line in short.splitlines()[4:]] == [
        *map(str, range(10)),
        "...",
        *map(str, range(14, 24)),
    ]
    assert [line.split()[1] for line in long.splitlines()[4:]] == list(map(str, range(24)))


def test_show_step_gives_a_row_a_site(runs: Path, command: Command) -> None:
    status, out, _ = command("show", runs / "reference", "--step", "1")
    assert status == 0
    view = Run.open(runs / "reference").view(0, 0, 1)
    lines = out.splitlines()
    assert lines[0].startswith(f"step 1 (epoch 0, rank 0): {len(view.program)} sites, ")
    assert len(lines) == 2 + len(view.program)
    position = next(place for place, site in enumerate(view.program.sites) if site.op == "aten.addmm.default")
    row = lines[2 + position]
    assert row.split()[:4] == [str(position), "forward", "first", "aten.addmm.default#0"]
    assert "float32 [8, 16]" in row
    assert format_digest(int(view.record.digests[position])) in row
    assert row.endswith("in forward")


def test_show_json_holds_the_steps_and_every_digest(runs: Path, command: Command) -> None:
    content = json.loads(command("show", runs / "reference", "--json")[1])
    assert (content["complete"], content["world_size"], content["selection"]["level"]) == (True, 1, "op")
    assert [row["step"] for row in content["steps"]] == [0, 1, 2, 3]
    _, out, _ = command("show", runs / "reference", "--step", "1", "--json")
    content = json.loads(out)
    view = Run.open(runs / "reference").view(0, 0, 1)
    assert [row["digest"] for row in content["sites"]] == [format_digest(int(bits)) for bits in view.record.digests]
    assert [row["op"] for row in content["sites"]] == [site.op for site in view.program.sites]


def test_show_ops_counts_calls(runs: Path, command: Command) -> None:
    status, out, _ = command("show", runs / "reference", "--ops")
    assert status == 0
    view = Run.open(runs / "reference").view(0, 0, 3)
    wanted = sum(
        site.op == "aten.addmm.default" and site.output == 0 and site.role == "output" for site in view.program.sites
    )
    (row,) = [line.split() for line in out.splitlines() if line.startswith("aten.addmm.default")]
    assert row[:3] == ["aten.addmm.default", str(wanted), "2"]
    calls = [int(line.split()[1]) for line in out.splitlines()[1:]]
    assert calls == sorted(calls, reverse=True)


def test_show_find_lists_the_places_of_a_digest(runs: Path, command: Command) -> None:
    view = Run.open(runs / "reference").view(0, 0, 2)
    position = next(place for place, site in enumerate(view.program.sites) if site.op == "aten.relu.default")
    digest = format_digest(int(view.record.digests[position]))
    status, out, _ = command("show", runs / "reference", "--find", digest)
    assert status == 0
    assert any(line.split()[:4] == ["0", "2", str(position), "forward"] for line in out.splitlines()[1:])
    assert all(line.split()[1] == "2" for line in out.splitlines()[1:])
    status, out, _ = command("show", runs / "reference", "--find", "0123456789abcdef")
    assert status == 1
    assert out == "0123456789abcdef appears nowhere in rank 0.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", "4"), "holds no step 4 of fit 0, rank 0; it holds 4 steps from 0 to 3."),
        (("--segment", "1", "--step", "0"), "holds no step 0 of fit 1, rank 0; it holds no steps."),
        (("--segment", "1", "--ops"), "holds no step of fit 1"),
        (("--rank", "1"), "has no rank 1; it has 1, from 0."),
    ],
)
def test_show_of_what_is_not_there(arguments: tuple[str, ...], message: str, runs: Path, command: Command) -> None:
    status, out, err = command("show", runs / "reference", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("det-callbacks: ")
    assert message in err


# usage


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("show",),
        ("show", "run", "--step", "-1"),
        ("show", "run", "--find", "xyz"),
        ("show", "run", "--find", "1" * 17),
        ("diff", "reference"),
        ("diff", "reference", "current", "--steps", "some"),
        ("ops", "--used-by"),
    ],
)
def test_wrong_usage(arguments: tuple[Any, ...], command: Command) -> None:
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert "usage: det-callbacks" in err


@pytest.mark.parametrize("arguments", [("--help",), ("diff", "--help"), ("--version",)])
def test_help(arguments: tuple[str, ...], command: Command) -> None:
    status, out, err = command(*arguments)
    assert (status, err) == (0, "")
    assert "det-callbacks" in out
