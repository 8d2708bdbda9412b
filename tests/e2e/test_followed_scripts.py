"""Small scripts in which something else than a call of a model and one update makes a step,
or no process records.
"""

import sys
from pathlib import Path

import pytest
from test_followed_loops import command  # noqa: F401  # a fixture
from test_launch import start

from det_callbacks import compare_runs
from det_callbacks.errors import NothingComparedError, ReferenceFormatError
from det_callbacks.runs.store import Run

HEAD = """
import multiprocessing, os, sys, threading
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(0)
inputs = torch.randn(16, 4)
rate = 0.2 if "other" in sys.argv else 0.1
first, second = nn.Linear(4, 2), nn.Linear(6, 1)
of_first, of_second = optim.SGD(first.parameters(), lr=rate), optim.SGD(second.parameters(), lr=rate)
def critic(x):
    with torch.no_grad():
        made = first(x)
    of_second.zero_grad()
    second(torch.cat([x, made], 1)).pow(2).mean().backward()
    of_second.step()
def actor(x):
    of_first.zero_grad()
    second(torch.cat([x, first(x)], 1)).mean().backward()
    of_first.step()
def train(lr=rate):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = optim.SGD(model.parameters(), lr=lr)
    for _ in range(4):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
def evaluate():
    first(inputs).sum()
def in_child(body):
    child = multiprocessing.get_context("fork").Process(target=body)
    child.start()
    child.join()
def in_pool(body):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            pool.apply(body)
        except Exception as error:
            print("pool", type(error).__name__)
def in_fork(body):
    child = os.fork()
    if not child:
        try:
            body()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
class Worked(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return first(inputs[index]).detach().new_full((4,), index)
"""  # noqa: E501  # a text

OWN_CALL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 1))
    def __call__(self, *args):
        return self.forward(*args)
    def forward(self, inputs):
        return inputs @ self.weight
"""
LOOP = """
for _ in range(4):
    optimizer.zero_grad()
    {}.pow(2).mean().backward()
    optimizer.step()
"""
FIRST = "not in the run: the first iteration of the loop (1 step of SGD), since no module"

RECORDED = {
    "own __call__": (
        OWN_CALL
        + "model = Model()\noptimizer = optim.SGD(model.parameters(), lr=rate)"
        + LOOP.format("model(inputs)"),
        "4 steps of Linear and Model, SGD, no DataLoader; each update is a step",
    ),
    "own method": (
        OWN_CALL + "model = Model()\noptimizer = optim.SGD(model.parameters(), lr=rate)"
        "" + LOOP.format("Model.forward(model, inputs)"),
        (
            "3 steps of Linear and Model, SGD, no DataLoader; each update is a step\n"
            f"det_callbacks: {FIRST}"
        ),
    ),
    "functional call": (
        "model, optimizer = first, of_first"
        + LOOP.format(
            "torch.func.functional_call(model, {k: v * 1 for k, v in model.named_parameters()}, "
            "inputs)"
        ),
        f"no DataLoader; each update is a step\ndet_callbacks: {FIRST}",
    ),
    "bare tensor": (
        "weight = torch.randn(4, 1, requires_grad=True)\noptimizer = optim.SGD([weight], lr=rate)"
        "" + LOOP.format("(inputs @ weight)"),
        f"det_callbacks: {FIRST}",
    ),
    "lazily made optimizers": (
        """
weights, optimizers = [torch.randn(4, 1, requires_grad=True) for _ in range(2)], {}
for _ in range(4):
    sum((inputs @ weight).pow(2).mean() for weight in weights).backward()
    for number, weight in enumerate(weights):
        if number not in optimizers:
            optimizers[number] = optim.SGD([weight], lr=rate)
        optimizers[number].step()
        weight.grad = None
""",
        "not in the run: the first iteration of the loop (2 steps of SGD), since no module",
    ),
    "critic each, actor every second": (
        "for number in range(8):\n    critic(inputs)\n    if number % 2:\n        actor(inputs)",
        "12 steps of Linear, SGD, no DataLoader; each update is a step",
    ),
    "two updates in a row": (
        """
for _ in range(4):
    second(torch.cat([inputs, first(inputs)], 1)).pow(2).mean().backward()
    for one in (of_first, of_second):
        one.step()
        one.zero_grad()
""",
        "4 steps of Linear, SGD, no DataLoader; each update, or several in a row, is a step",
    ),
    "critic several times a batch": (
        (
            "for x, in DataLoader(TensorDataset(inputs), batch_size=4):\n"
            "    critic(x)\n"
            "    critic(x)\n"
            "    actor(x)"
        ),
        "4 steps of Linear, SGD, 1 DataLoader; each batch is a step",
    ),
    "a trial before the training": (
        """
model = nn.Linear(4, 1)
trial = optim.SGD(model.parameters(), lr=rate)
for x, in DataLoader(TensorDataset(inputs), batch_size=8):
    model(x).square().mean().backward()
optimizer = optim.SGD(model.parameters(), lr=rate)
for x, in DataLoader(TensorDataset(inputs), batch_size=4):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
""",
        "4 steps of Linear, SGD, 1 DataLoader; each batch is a step",
    ),
    "another optimizer in the first step": (
        """
head = None
for _ in range(4):
    first(inputs).pow(2).mean().backward()
    if head is None:
        head = optim.SGD(nn.Linear(2, 1).parameters(), lr=rate)
    of_first.step()
    of_first.zero_grad()
""",
        "4 steps of Linear, SGD, no DataLoader",
    ),
    "cleared environment": ("os.environ.clear()\ntrain()", "recorded 4 steps"),
    "child that evaluates before": ("in_child(evaluate)\ntrain()", "recorded 4 steps"),
    "child that evaluates after": ("train()\nin_child(evaluate)", "recorded 4 steps"),
    "child that trains alone": ("in_child(train)", "recorded 4 steps"),
    "workers that call the model": (
        "for x in DataLoader(Worked(), batch_size=4, num_workers=1):\n    critic(x)",
        "recorded 2 steps",
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_script_is_recorded_and_a_change_of_it_diverges(name, command):  # noqa: F811
    source, says = RECORDED[name]
    Path("train.py").write_text(HEAD + source)
    done = command("record", "run", "--level=state", "--")
    assert (done.status, says in done.text) == (0, True), done.text + done.errors
    assert "finding" not in done.text
    done = command("verify", "run")
    assert (done.status, "\nMATCH\n" in done.text) == (0, True), done.text + done.errors
    done = command("verify", "run", "other")
    assert (done.status, "\nDIVERGED\n" in done.text) == (1, True), done.text + done.errors


def test_what_a_match_does_not_cover_comes_first_and_is_in_the_run(command):  # noqa: F811
    Path("train.py").write_text(
        HEAD
        + (
            "for number in range(8):\n"
            "    critic(inputs) if not number else second(torch.ones(1, 6)).backward()"
        )
    )
    rest = "the last 7 calls of Linear, after which SGD did not step"
    assert f"not in the run: {rest}" in command("record", "run").text
    done = command("verify", "run")
    assert (done.status, "\nMATCH\nThe recorded part matches: all " in done.text) == (0, True), (
        done.text
    )
    assert command("record", "again").status == 0
    verdict = compare_runs("run", "again")
    assert verdict.explanation.startswith("The recorded part matches: all ")
    assert f"Not recorded, so not compared: {rest}" in verdict.explanation
    assert verdict.coverage.lost == (rest,)
    assert not [entry.name for entry in verdict.environment if entry.name.startswith("loop.")]


REFUSED = {
    "fork after": ("train()\nin_fork(lambda: train(5.0))", "trains in several processes"),
    "child after": ("train()\nin_child(lambda: train(5.0))", "trains in several processes"),
    "child before": ("in_child(train)\ntrain()", "trains in several processes"),
    "two children": ("in_child(train)\nin_child(train)", "trains in several processes"),
    "pool": ("train()\nin_pool(train)", "trains in several processes"),
    "thread": (
        "train()\none = threading.Thread(target=train)\none.start()\none.join()",
        "4 steps of SGD ran outside of the main thread",
    ),
    "only a thread": (
        "one = threading.Thread(target=train)\none.start()\none.join()",
        "SGD stepped 4 times outside of the main thread",
    ),
    "stale optimizer": (
        (
            "model = nn.Linear(4, 1)\n"
            "for _ in range(3):\n"
            "    model(inputs).sum().backward()\n"
            "    of_first.step()"
        ),
        "SGD stepped 3 times, and none of its 2 parameters is in a module that was called",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_trains_and_is_not_recorded_is_an_error_that_says_what_was_seen(name, command):  # noqa: F811
    source, says = REFUSED[name]
    Path("train.py").write_text(HEAD + source)
    done = command("record", "run", "--level=state", "--")
    assert (done.status, says in done.text + done.errors) == (2, True), done.text + done.errors
    is_left = Path("run", "run.json").exists()
    assert not is_left or Run.open(Path("run")).incomplete_reason, (
        "a part of what trained is no reference"
    )


def test_a_verification_of_a_part_of_what_trained_leaves_no_verdict(command):  # noqa: F811
    Path("train.py").write_text(HEAD + "train()\nif 'child' in sys.argv:\n    in_child(train)")
    assert command("record", "run").status == 0
    done = command("verify", "run", "child")
    assert (done.status, "was not kept" in done.text + done.errors) == (2, True), (
        done.text + done.errors
    )
    assert [*Path().glob("determinism-verify/*/run/verdict.json")] == []


STEPPER = """
import torch
weight = torch.ones(3, requires_grad=True)
class Stepper:
    def step(self):
        weight.data -= weight.grad
    def zero_grad(self):
        weight.grad = None
stepper = Stepper()
weight.sum().backward()
stepper.step()
"""
LOOKED_FOR = """
import importlib.util, sys
for name in ("torch", "numpy", "lightning"):
    importlib.util.find_spec(name)
import torch
print("seed", torch.initial_seed())
if "train" in sys.argv:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(torch.ones(2, 4), batch_size=2):
        model(batch).sum().backward()
        optimizer.step()
    sys.stdout.close()
    sys.stderr.close()
"""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            LOOKED_FOR,
            "no optimizer of torch.optim was built, and no module with parameters was called",
        ),
        (STEPPER, "was built (the script has __main__.Stepper), and backward() ran once"),
    ],
)
def test_a_script_without_an_optimizer_of_torch_says_what_it_did(source, says, command):  # noqa: F811
    Path("train.py").write_text(source)
    done = command("record", "run", "--seed=7", "--")
    assert (done.status, says in done.text) == (2, True), done.text + done.errors


@pytest.mark.parametrize(
    ("source", "words", "status", "says"),
    [
        (LOOKED_FOR, ["train"], 0, "seed 7\n"),
        ("print()", [], 2, "torch was not imported, and no other framework is supported"),
        (
            "import os, sys\nos.execv(sys.executable, [sys.executable, '-I', '-c', 'pass'])",
            [],
            2,
            "no process told what it did with torch",
        ),
    ],
)
def test_a_script_that_looks_for_torch_first_is_recorded_and_others_say_what_they_did(
    source, words, status, says, tmp_path
):
    """In processes of their own, which Python starts with our startup code."""
    (tmp_path / "train.py").write_text(source)
    done = start(
        "record", "run", "--seed", "7", "--", sys.executable, "train.py", *words, folder=tmp_path
    )
    assert (done.returncode, says in done.stdout) == (status, True), done.stdout + done.stderr
    if not status:
        assert "followed torch's optimizers: 1 step of Linear, SGD, 1 DataLoader" in done.stdout
        assert Run.open(tmp_path / "run").rank(0).steps(0).tolist() == [0]


def test_a_script_that_exits_with_an_error_leaves_no_complete_run_and_no_match(command):  # noqa: F811
    Path("train.py").write_text(HEAD + "train()\nif 'fails' in sys.argv:\n    raise SystemExit(3)")
    assert command("record", "run", "fails").status == 2
    assert "its script ended with an error" in str(Run.open("run").incomplete_reason)
    with pytest.raises(ReferenceFormatError, match="a part of the training may be missing"):
        compare_runs("run", "run")
    assert command("record", "run", "--overwrite", "--").status == 0
    assert Run.open("run").is_complete

    assert command("verify", "run", "fails").status == 2
    (current,) = Path().glob("determinism-verify/*/run")
    assert not (current / "verdict.json").exists()
    with pytest.raises(NothingComparedError, match="ended with an error"):
        compare_runs("run", current)


def test_what_a_model_is_called_with_is_not_said_to_come_from_a_data_set(command):  # noqa: F811
    Path("train.py").write_text(
        HEAD
        + """
class Carried(nn.Linear):
    def forward(self, x, carried=None):
        return super().forward(x if carried is None else x + carried)
model, carried = Carried(4, 1), None
optimizer = optim.SGD(model.parameters(), lr=0.1)
for number in range(4):
    if "other" not in sys.argv or number < 2:
        carried = None
    result = model(inputs, carried)
    carried = result.detach()
    optimizer.zero_grad()
    result.square().mean().backward()
    optimizer.step()
"""
    )
    assert command("record", "run", "--level=state", "--").status == 0
    done = command("verify", "run", "other")
    text = " ".join(done.text.split())
    assert "what is kept from earlier steps" in text, text
    assert "data set" not in text
