"""The commands show, diff and ops on real recordings: exit status, JSON, plain output and errors."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import BLOCKS, WIDTH, Deep, Training
from fits import Fit, record
from torch import Tensor, nn
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, cli, compare_runs
from det_callbacks.digest import format_digest
from det_callbacks.nondeterminism import read_op_facts
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE

Command = Callable[..., tuple[int, str, str]]


class Middle(nn.Module):
    """A convolution, a padding, dropout and an index_add: torch says something of each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.pad = nn.ReflectionPad1d(1)
        self.drop = nn.Dropout()

    def forward(self, inputs: Tensor) -> Tensor:
        padded = self.drop(self.pad(self.conv(inputs[:, None])))[:, 0, 1:-1]
        return torch.zeros_like(padded).index_add(1, torch.arange(WIDTH), padded)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference, the same again, others of which each differs in one way, and one with ops that torch speaks of."""
    folder = tmp_path_factory.mktemp("runs")
    threads = torch.get_num_threads()
    for name in ("reference", "again"):
        record(folder / name)
    for name, num_threads in (("other", threads), ("elsewhere", threads + 1)):
        torch.set_num_threads(num_threads)
        fit = Fit(DeterminismCallback(folder / name, mode="record"))
        with torch.no_grad():
            fit.model.first.weight[0, 0] += 1
        fit.run()
    torch.set_num_threads(threads)
    Fit(DeterminismCallback(folder / "state", mode="record", level="state")).run()
    record(folder / "longer", max_epochs=6)
    Training(model=partial(Deep, middle=Middle)).record(folder / "ops")
    return folder


@pytest.fixture
def command(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command in this process, beside the runs; return its exit status, standard output and standard error."""
    monkeypatch.chdir(runs)

    def run(words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = cli.main(words.split())
        except SystemExit as leaving:  # argparse
            status = int(leaving.code or 0)
        return status, *capsys.readouterr()

    return run


def view_of(folder: Path, step: int) -> Any:
    return Run.open(folder).view(0, 0, step)


@pytest.mark.slow
def test_whoever_reads_may_leave_and_a_pipe_gets_plain_text(runs: Path) -> None:
    words = [sys.executable, "-m", "det_callbacks", "diff", str(runs / "reference"), str(runs / "other")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("DIVERGED\n")
    assert "\x1b[" not in done.stdout
    script = f"{sys.executable} -m det_callbacks show {runs / 'longer'} --json | head -c 20; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout[20:] == "0\n"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


# diff


@pytest.mark.parametrize(
    ("words", "status", "texts"),
    [
        ("reference again", 0, ["MATCH\nAll "]),
        ("reference other", 1, ["DIVERGED\n", "the initial state first.weight differs"]),
        (
            "reference longer",
            1,
            ["Steps 4 to 23 (20 of them) are only in the current run; the 4 steps that both have agree."],
        ),
        ("reference longer --steps common", 0, ["Only steps that both runs have were compared."]),
        ("reference elsewhere", 3, ["NOT COMPARABLE\n", "num_threads: "]),
    ],
)
def test_diff_prints_the_verdict(words: str, status: int, texts: list[str], command: Command) -> None:
    done, out, err = command(f"diff {words}")
    assert (done, err) == (status, "")
    for text in texts:
        assert text in out
    assert ("cause" in out) is (status != 0)
    assert "\x1b[" not in out
    done, out, err = command(f"diff {words} --json")
    assert (done, err) == (status, "")
    reference, current, *options = words.split()
    assert json.loads(out) == compare_runs(reference, current, steps="common" if options else "all").to_dict()


# show


def test_show_lists_the_steps(runs: Path, command: Command) -> None:
    status, out, err = command("show reference")
    assert (status, err) == (0, "")
    run = Run.open(runs / "reference")
    lines = out.splitlines()
    assert lines[0] == f"run {run.run_id} in reference: complete"
    assert "level op" in lines[1]
    assert lines[2] == "rank 0: 4 steps in 1 fit"
    assert lines[3].split() == ["fit", "step", "epoch", "sites", "program", "layout", "chain"]
    assert [line.split()[1] for line in lines[4:]] == ["0", "1", "2", "3"]
    assert lines[-1].endswith(format_digest(run.rank(0).chain(0, 3)))
    content = json.loads(command("show reference --json")[1])
    assert (content["complete"], content["world_size"], content["selection"]["level"]) == (True, 1, "op")
    assert [row["step"] for row in content["steps"]] == [0, 1, 2, 3]

    shown, every = (
        [line.split()[1] for line in command(f"show longer{option}")[1].splitlines()[4:]] for option in ("", " --all")
    )
    assert every == list(map(str, range(24)))
    assert shown == [*every[:10], "...", *every[14:]]


def test_show_step_gives_a_row_a_site(runs: Path, command: Command) -> None:
    _, out, _ = command("show reference --step 1")
    view = view_of(runs / "reference", 1)
    lines = out.splitlines()
    assert lines[0].startswith(f"step 1 (epoch 0, rank 0): {len(view.program)} sites, ")
    assert len(lines) == 2 + len(view.program)
    position = next(place for place, site in enumerate(view.program.sites) if site.op == "aten.addmm.default")
    row = lines[2 + position]
    assert row.split()[:4] == [str(position), "forward", "first", "aten.addmm.default#0"]
    assert "float32 [8, 16]" in row
    assert format_digest(int(view.record.digests[position])) in row
    assert row.endswith("in forward")
    sites = json.loads(command("show reference --step 1 --json")[1])["sites"]
    assert [row["digest"] for row in sites] == [format_digest(int(bits)) for bits in view.record.digests]
    assert [row["op"] for row in sites] == [site.op for site in view.program.sites]


def test_show_counts_ops_and_finds_digests(runs: Path, command: Command) -> None:
    lines = command("show reference --ops")[1].splitlines()
    view = view_of(runs / "reference", 2)
    calls = [site for site in view.program.sites if site.op == "aten.addmm.default" and site.output == 0]
    (row,) = [line.split() for line in lines if line.startswith("aten.addmm.default")]
    assert row[:3] == ["aten.addmm.default", str(sum(site.role == "output" for site in calls)), "2"]
    counts = [int(line.split()[1]) for line in lines[1:]]
    assert counts == sorted(counts, reverse=True)

    position = next(place for place, site in enumerate(view.program.sites) if site.op == "aten.relu.default")
    status, out, _ = command(f"show reference --find {format_digest(int(view.record.digests[position]))}")
    assert status == 0
    assert any(line.split()[:4] == ["0", "2", str(position), "forward"] for line in out.splitlines()[1:])
    assert all(line.split()[1] == "2" for line in out.splitlines()[1:])
    found = command("show reference --find 0123456789abcdef")
    assert found == (1, "0123456789abcdef appears nowhere in rank 0.\n", "")


# ops


def test_ops_lists_what_torch_says(command: Command) -> None:
    status, out, err = command("ops")
    assert (status, err) == (0, "")
    facts = read_op_facts()
    counts = Counter(fact.behaviour for fact in facts)
    lines = out.splitlines()
    listed = ", ".join(f"{counts[kind]} {kind}" for kind in ("alternate algorithm", "error", "random"))
    assert lines[0] == f"torch {torch.__version__}: {len(facts)} entries ({listed})"
    assert [line.split()[0] for line in lines[5:]] == [fact.name for fact in facts]
    (row,) = [line for line in lines if line.startswith("torch.histc ")]
    assert row.split() == ["torch.histc", "error", "cuda", "aten.histc", "when", "called", "on", "a", "CUDA", "tensor"]
    content = json.loads(command("ops --json")[1])
    assert (content["schema"], content["torch"], content["run"]) == (1, torch.__version__, None)
    assert content["counts"] == Counter(entry["behaviour"] for entry in content["entries"])
    (entry,) = [entry for entry in content["entries"] if entry["name"] == "torch.nn.ReflectionPad1d"]
    assert entry == {
        "name": "torch.nn.ReflectionPad1d",
        "ops": ["aten.reflection_pad1d_backward"],
        "behaviour": "error",
        "device": "cuda",
        "condition": "when attempting to differentiate a CUDA tensor",
    }


def test_ops_used_by_a_run_have_their_modules_and_counts(runs: Path, command: Command) -> None:
    status, out, err = command("ops --used-by ops --json")
    assert (status, err) == (0, "")
    used = {entry["name"]: entry for entry in json.loads(out)["entries"]}
    modules = {name: {row["module"]: row["sites"] for row in entry["modules"]} for name, entry in used.items()}
    assert modules == {
        "torch.index_add": {"middle": 1},
        "torch.nn.Conv1d": {"middle.conv": 4},  # its output, and the gradients of input, weight and bias
        "torch.nn.ReflectionPad1d": {"middle.pad": 1},
        "aten.bernoulli_": {"middle.drop": 1} | {f"net.{block}.drop": 1 for block in range(BLOCKS)},
    }
    lines = command("ops --used-by ops")[1].splitlines()
    ops = {site.op for step in range(4) for site in view_of(runs / "ops", step).program.sites if site.op}
    assert lines[2].startswith(f"{len(ops)} ops in 2 programs; torch {torch.__version__}: ")
    assert lines[2].endswith("; 4 may be about this run")
    (row,) = [line for line in lines if line.startswith("torch.nn.ReflectionPad1d")]
    backward = "aten.reflection_pad1d_backward.default"
    assert row.split()[:6] == ["torch.nn.ReflectionPad1d", "error", "cuda", "middle.pad", "1", backward]


# errors and usage


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show nowhere --json", "There is no run at "),
        ("ops --used-by nowhere --json", "There is no run at "),
        ("diff reference state", "did not record the same: level: 'op' and 'state'"),
        ("show reference --step 4", "holds no step 4 of fit 0, rank 0; it holds 4 steps from 0 to 3."),
        ("show reference --segment 1 --step 0", "holds no step 0 of fit 1, rank 0; it holds no steps."),
        ("show reference --segment 1 --ops", "holds no step of fit 1"),
        ("show reference --rank 1", "has no rank 1; it has 1, from 0."),
        # a run that holds no ops is no run that uses none
        ("ops --used-by state", "state holds no ops (level state, 4 steps of rank 0)"),
        ("ops --used-by state --json", 'level="op"'),
    ],
)
def test_what_could_not_be_done_is_written_to_standard_error(words: str, message: str, command: Command) -> None:
    status, out, err = command(words)
    assert (status, out) == (2, "")
    assert err.startswith("det-callbacks: ")
    assert message in err


@pytest.mark.parametrize(
    "words",
    [
        *("", "show", "show run --step -1", "show run --find xyz", f"show run --find {'1' * 17}"),
        *("diff reference", "diff reference current --steps some", "ops --used-by"),
    ],
)
def test_wrong_usage(words: str, command: Command) -> None:
    status, out, err = command(words)
    assert (status, out) == (2, "")
    assert "usage: det-callbacks" in err


@pytest.mark.parametrize("words", ["--help", "diff --help", "--version"])
def test_help(words: str, command: Command) -> None:
    status, out, err = command(words)
    assert (status, err) == (0, "")
    assert "det-callbacks" in out
