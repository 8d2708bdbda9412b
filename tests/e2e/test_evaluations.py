"""Scripts that train nothing: each call of the outermost module is a step; a script that trains
later is a training.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_followed_loops import command  # noqa: F401  # a fixture
from torch import nn

from det_callbacks import HashMode, SelectionError, TrainingRun, compare_runs
from det_callbacks.runs.store import Run

HEAD = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
inputs = torch.randn(20, 4)
loader = DataLoader(TensorDataset(inputs), batch_size=5)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
    def forward(self, x, scale=1.0):
        hidden = self.first(x).relu() * scale
        if "other" in sys.argv and getattr(self, "calls", 0) == 2:
            hidden = hidden + 1e-6
        self.calls = getattr(self, "calls", 0) + 1
        return self.second(hidden)
model = Model().eval()
"""
LOOP = """
with torch.no_grad():
    for (x,) in loader:
        print(float(model(x).sum()))
"""
GENERATE = """
with torch.inference_mode():
    x = inputs[:1]
    for _ in range(4):
        out = model(x, scale=0.5).softmax(1)
        x = torch.cat([out, out], 1) + torch.multinomial(out, 1)
"""
TWO = """
encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 4)
loss = nn.CrossEntropyLoss(weight=torch.ones(2))
for (x,) in loader:
    loss(model(decoder(encoder(x))), torch.zeros(5, dtype=torch.long))
"""
COUNTED = """
from torch.utils.flop_counter import FlopCounterMode
for (x,) in loader:
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert counter.get_total_flops() > 0
"""
CAUGHT = """
for (x,) in loader:
    try:
        model(x[:, :3])
    except RuntimeError:
        model(x)
"""
COMPILED = """
fast = torch.compile(model, backend="eager")
with torch.no_grad():
    for (x,) in loader:
        fast(x)
"""
NESTED = """
class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, x, depth=2):
        return self.inner(x) if not depth else self(x, depth - 1).sinh()
again = Again()
for (x,) in loader:
    again(x)
"""
SCRIPTS: dict[str, tuple[str, int, str]] = {
    "a loop over a loader": (LOOP, 4, "Model"),
    "a generation": (GENERATE, 4, "Model"),
    "several models": (TWO, 12, "Model, Linear and 1 more"),
    "a dispatch mode around each call": (COUNTED, 4, "Model"),
    "calls that raise": (CAUGHT, 4, "Model"),
    "a compiled model": (COMPILED, 4, "Model"),
    "a module that calls itself": (NESTED, 4, "Again"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_call_of_the_outermost_module_is_a_step(name, command):  # noqa: F811
    source, num_steps, model = SCRIPTS[name]
    Path("train.py").write_text(HEAD + source)
    done = command("record", "run")
    assert done.status == 0, done.text + done.errors
    if name == "a module that calls itself":  # the step ends when the outermost call returns
        shown = [site.op for site in Run.open("run").view(0, 0, 1).program.sites]
        assert shown.count("aten.sinh.default") == 2
    followed = f"followed torch's optimizers: none; each call of {model.partition(',')[0]}"
    assert followed in done.text
    assert f"is a step: {num_steps} steps" in done.text
    assert "finding" not in done.text
    done = command("verify", "run")
    assert (done.status, "\nMATCH\n" in done.text, followed in done.text) == (0, True, True), (
        done.text + done.errors
    )
    done = command("verify", "run", "other")
    assert (done.status, "\nDIVERGED\n" in done.text) == (1, True), done.text + done.errors


@pytest.mark.parametrize("level", ["state", "module"])
def test_other_levels_record_evaluations_too(level, command):  # noqa: F811
    Path("train.py").write_text(HEAD + LOOP)
    assert command("record", "run", f"--level={level}", "--").status == 0
    assert Run.open("run").manifest.selection.level == level
    assert command("verify", "run").status == 0
    assert command("verify", "run", "other").status == (0 if level == "state" else 1)


def test_the_verdict_names_the_op_of_the_call_that_differs(command):  # noqa: F811
    Path("train.py").write_text(HEAD + LOOP)
    assert command("record", "run").status == 0
    assert command("record", "again", "other").status == 0
    verdict = compare_runs("run", "again")
    first = verdict.first_divergence
    assert (first.step, first.phase, first.op, first.is_origin) == (
        2,
        "forward",
        "aten.add.Tensor",
        True,
    )
    assert verdict.coverage.followed == "none; each call of Model is a step"
    assert verdict.coverage.steps == (0, 3)


TRAINS = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.train()
for (x,) in loader:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LATER = {
    "after one call": f"model(inputs)\n{TRAINS}",
    "after an evaluation": LOOP + TRAINS,
    "of inner modules": f"model(inputs)\n{TRAINS.replace('model(x)', 'model.forward(x)')}",
}


@pytest.mark.parametrize("name", LATER)
def test_a_script_that_trains_after_calls_is_recorded_as_a_training(name, command):  # noqa: F811
    Path("train.py").write_text(HEAD + LATER[name])
    done = command("record", "run")
    assert done.status == 0, done.text + done.errors
    assert "none; each call" not in done.text
    assert "SGD" in done.text
    assert "recorded 4 steps" in done.text
    done = command("verify", "run")
    assert (done.status, "verified 4 steps" in done.text) == (0, True), done.text + done.errors


def test_a_training_is_not_verified_against_an_evaluation(command):  # noqa: F811
    Path("train.py").write_text(
        HEAD + LOOP + f"\nif 'other' in sys.argv:\n{TRAINS.replace(chr(10), chr(10) + '    ')}"
    )
    assert command("record", "run").status == 0
    done = command("verify", "run", "other")
    assert done.status == 1, done.text + done.errors
    Path("train.py").write_text(
        HEAD + f"\nif 'other' not in sys.argv:\n{TRAINS.replace(chr(10), chr(10) + '    ')}{LOOP}"
    )
    assert command("record", "trained").status == 0
    done = command("verify", "trained", "other")
    assert (done.status, "nothing was" in done.text or "DIVERGED" in done.text) == (2, True), (
        done.text + done.errors
    )


BY_HAND = """
for (x,) in loader:
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
"""
OWN = """
from det_callbacks import TrainingRun
model(inputs)
with TrainingRun("own", mode="record", model=model) as run:
    for (x,) in loader:
        with run.step(x):
            model(x)
model(inputs)
"""


def test_a_training_without_an_optimizer_is_refused_as_before(command):  # noqa: F811
    Path("train.py").write_text(HEAD + BY_HAND)
    done = command("record", "run")
    assert (done.status, "backward() ran 4 times" in done.text) == (2, True), done.text
    assert not [*Path("run").iterdir()]


def test_the_scripts_own_run_is_used(command):  # noqa: F811
    Path("train.py").write_text(HEAD + OWN)
    done = command("record", "run")
    assert (done.status, "the script has its own run" in done.text) == (2, True), (
        done.text + done.errors
    )
    assert not [*Path("run").iterdir()]
    assert Run.open("own").incomplete_reason is None


def evaluated(folder: Path, model: nn.Module, **options: Any) -> TrainingRun:
    with TrainingRun(folder, model=model, **options) as run:
        for batch in run.batches([torch.ones(3, 4), torch.zeros(3, 4)]):
            with run.step(batch), torch.no_grad():
                run.log("sum", model(batch).sum())
    return run


def test_a_training_run_needs_no_optimizer(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    evaluated(tmp_path / "run", model, mode="record")
    same = evaluated(tmp_path / "run", model, current=tmp_path / "same")
    assert (same.verdict.verdict, same.verdict.counts.steps_compared) == ("match", 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with (
            TrainingRun(tmp_path / "trained", mode="record", model=model) as run,
            run.step(torch.ones(3, 4)),
        ):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    with pytest.raises(SelectionError, match="stepped, but was not passed"):
        train()


def test_hash_mode_records_a_call_without_an_optimizer():
    model = nn.Linear(4, 2)
    with HashMode(model) as mode, torch.inference_mode():
        model(torch.ones(3, 4))
    assert "aten.addmm.default" in {site.op for site in mode.trace.program.sites}
