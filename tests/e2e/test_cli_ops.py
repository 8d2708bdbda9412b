"""The command ops: what torch says of its ops, and of those that a real recording holds."""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import BLOCKS, WIDTH, Deep, Training
from torch import Tensor, nn
from trainers import LIGHTNING_ADVICE

from det_callbacks import cli
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
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Training(model=partial(Deep, middle=Middle)).record(tmp_path_factory.mktemp("ops") / "run")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command ops in this process; return its exit status, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        return cli.main(["ops", *map(str, arguments)]), *capsys.readouterr()

    return run


def entries(out: str) -> dict[str, Any]:
    return {entry["name"]: entry for entry in json.loads(out)["entries"]}


# all of them


def test_ops_lists_what_torch_says(command: Command) -> None:
    status, out, err = command()
    assert (status, err) == (0, "")
    facts = read_op_facts()
    counts = Counter(fact.behaviour for fact in facts)
    lines = out.splitlines()
    assert lines[0] == (
        f"torch {torch.__version__}: {len(facts)} entries ({counts['alternate algorithm']} alternate algorithm, "
        f"{counts['error']} error, {counts['random']} random)"
    )
    assert lines[4].split() == ["name", "behaviour", "device", "ops", "condition"]
    assert [line.split()[0] for line in lines[5:]] == [fact.name for fact in facts]
    (row,) = [line for line in lines if line.startswith("torch.histc ")]
    assert row.split() == ["torch.histc", "error", "cuda", "aten.histc", "when", "called", "on", "a", "CUDA", "tensor"]


def test_ops_json_is_whole_and_the_same_every_time(command: Command) -> None:
    status, out, err = command("--json")
    assert (status, err) == (0, "")
    assert command("--json")[1] == out
    content = json.loads(out)
    assert (content["schema"], content["torch"], content["run"]) == (1, torch.__version__, None)
    assert content["counts"] == Counter(entry["behaviour"] for entry in content["entries"])
    assert entries(out)["torch.nn.ReflectionPad1d"] == {
        "name": "torch.nn.ReflectionPad1d",
        "ops": ["aten.reflection_pad1d_backward"],
        "behaviour": "error",
        "device": "cuda",
        "condition": "when attempting to differentiate a CUDA tensor",
    }


# those of a run


def test_ops_used_by_a_run_have_their_modules_and_counts(run: Path, command: Command) -> None:
    status, out, err = command("--used-by", run, "--json")
    assert (status, err) == (0, "")
    used = entries(out)
    assert list(used) == ["torch.index_add", "torch.nn.Conv1d", "torch.nn.ReflectionPad1d", "aten.bernoulli_"]
    modules = {name: {row["module"]: row["sites"] for row in entry["modules"]} for name, entry in used.items()}
    assert modules == {
        "torch.index_add": {"middle": 1},
        "torch.nn.Conv1d": {"middle.conv": 4},  # its output, and the gradients of input, weight and bias
        "torch.nn.ReflectionPad1d": {"middle.pad": 1},
        "aten.bernoulli_": {"middle.drop": 1} | {f"net.{block}.drop": 1 for block in range(BLOCKS)},
    }
    lines = command("--used-by", run)[1].splitlines()
    opened = Run.open(run)
    assert lines[0] == f"run {opened.run_id} in {run}: complete"
    assert lines[1].startswith("recorded: level op, modules ['*']")
    ops = {site.op for step in range(4) for site in opened.view(0, 0, step).program.sites if site.op}
    assert lines[2].startswith(f"{len(ops)} ops in 2 programs; torch {torch.__version__}: ")
    assert lines[2].endswith("; 4 may be about this run")
    (row,) = [line for line in lines if line.startswith("torch.nn.ReflectionPad1d")]
    assert row.split()[1:6] == ["error", "cuda", "middle.pad", "1", "aten.reflection_pad1d_backward.default"]
    assert sum(line.startswith("aten.bernoulli_ ") for line in lines) == 1 + BLOCKS
    assert lines[-1].startswith("sites: in one step.")


# what it cannot do


def test_a_run_that_holds_no_ops_is_no_run_that_uses_none(tmp_path: Path, command: Command) -> None:
    folder = Training().record(tmp_path / "run", level="module")
    for options in ((), ("--json",)):
        status, out, err = command("--used-by", folder, *options)
        assert (status, out) == (2, "")
        assert err.startswith(f"det-callbacks: {folder} holds no ops (level module, 4 steps of rank 0)")
        assert 'level="op"' in err


def test_torch_without_its_docstring_is_an_error(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(torch.use_deterministic_algorithms, "__doc__", None)
    status, out, err = command()
    assert (status, out) == (2, "")
    assert "has no list of ops for: alternate algorithm, error" in err
