"""The file that repeats a saved call: it computes what the recorded call computed,
or says why it cannot.
"""

import hashlib
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from det_callbacks import HashMode
from det_callbacks.cli import repro
from det_callbacks.cli.repro import Repro, make_repro
from det_callbacks.runs.program import Site
from det_callbacks.tensors.calls import CallCapture

SETTINGS = {
    "num_threads": 1,
    "deterministic_algorithms": "disabled",
    "float32_matmul_precision": "highest",
}
X = torch.arange(24.0).reshape(4, 6).sin()
INDEX = torch.tensor([0, 2, 2, 1])


def capture(
    function: Callable[[], Any], op: str, path: Path, *, phase: str = "forward", number: int = 0
) -> list[Site]:
    """Save a call of an op in what a function does, and return the sites."""
    wanted = {"phase": phase, "module": "", "op": op, "occurrence": number, "path": str(path)}
    capture = CallCapture(json.dumps(wanted), 16)
    mode = HashMode()
    mode.recorder.plans.around = capture.around
    mode.recorder.output_hooks.every = (capture,)
    capture.begin(is_wanted=True)
    with mode:
        function()
    capture.end_step(mode.trace)
    return [*mode.trace.program.sites]


@pytest.fixture
def repeat(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Callable[[], tuple[Repro, list[str]]]:
    """Write and run the file in this process; return what was made,
    and the digests of its results.
    """
    digests: list[list[str]] = []

    def run(python: str, path: Path) -> "subprocess.CompletedProcess[str]":
        threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
        monkeypatch.setattr(sys, "argv", [str(path), "--runs=3", "--brief"])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        code, error = 0, ""
        try:
            runpy.run_path(str(path))
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception as failure:  # the hook of the file would print it
            code, error = 2, str(failure)
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(False)
            torch.set_float32_matmul_precision(precision)
        if not code:
            digests.append(json.loads(capsys.readouterr().out))
        return subprocess.CompletedProcess([], code, "what it printed", error)

    monkeypatch.setattr(repro, "run_file", run)
    monkeypatch.chdir(tmp_path)

    def made() -> tuple[Repro, list[str]]:
        return make_repro(
            tmp_path / "call", tmp_path / "repro", settings=SETTINGS, python=""
        ), digests[-1]

    return made


def digest(*tensors: Tensor) -> list[str]:
    content = b"".join(
        tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for tensor in tensors
    )
    return [hashlib.sha256(content).hexdigest()]


def in_place() -> Tensor:
    table = X.clone()
    return table.index_add_(0, INDEX, X)


def shared() -> Tensor:
    table = torch.cat([X, X]).t()
    return table[:, :4].add_(table[:, 4:], alpha=0.5)


def rounded_up() -> Tensor:
    return X.to(torch.bfloat16).double()


CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "functional": ("aten.mm.default", lambda: X @ X.t()),
    "transposed and gaps": ("aten.mm.default", lambda: X[:, ::2] @ X.t()[::2]),
    "expanded": ("aten.mul.Tensor", lambda: X[:1].expand(4, 6) * X),
    "in place": ("aten.index_add_.default", in_place),
    "shared memory": ("aten.add_.Tensor", shared),
    "a list": ("aten.cat.default", lambda: torch.cat([X, X + 1], dim=1)),
    "several outputs": ("aten.max.dim", lambda: X.max(dim=1)),
    "numbers": ("aten.clamp.default", lambda: X.clamp(-float("inf"), 0.25)),
    "a dtype": ("aten._to_copy.default", lambda: X.to(torch.bfloat16)),
    "bfloat16": ("aten._to_copy.default", lambda: X.to(torch.bfloat16)),
    "complex": ("aten.mul.Tensor", lambda: torch.complex(X, X) * torch.complex(X, X)),
    "draws": ("aten.bernoulli_.float", lambda: torch.empty(64).bernoulli_(0.5)),
    "dropout": ("aten.native_dropout.default", lambda: torch.native_dropout(X, 0.5, True)),
    "no elements": ("aten.mul.Tensor", lambda: X[:0] * 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_file_computes_what_the_call_computed(name, tmp_path, repeat):
    op, function = CALLS[name]
    state, results = torch.get_rng_state(), list[Any]()
    capture(lambda: results.append(function()), op, tmp_path / "call")
    made, found = repeat()
    out = results[0]
    assert found == digest(*(out if isinstance(out, tuple) else (out,)))
    text = made.path.read_text()
    assert "det_callbacks" not in text
    assert len(text.splitlines()) <= 80
    torch.set_rng_state(state)


BACKWARDS: dict[str, tuple[str, str, Callable[[Tensor], Tensor]]] = {
    "index": (
        "aten.index_put.default",
        "torch.ops.aten.index.Tensor(self, [indices_0])",
        lambda x: x[INDEX],
    ),
    "embedding": (
        "aten.embedding_dense_backward.default",
        "torch.ops.aten.embedding.default(weight, indices)",
        lambda x: nn.functional.embedding(INDEX, x),
    ),
    "softmax": (
        "aten._softmax_backward_data.default",
        "torch.ops.aten._softmax.default(self, 1, False)",
        lambda x: x.softmax(1),
    ),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_op_is_called_through_its_forward_op(name, tmp_path, repeat):
    op, called, function = BACKWARDS[name]
    leaf = X.clone().requires_grad_()
    capture(
        lambda: (function(leaf) * X[:4]).sum().backward(), op, tmp_path / "call", phase="backward"
    )
    made, found = repeat()
    assert f"    result = {called}\n" in made.path.read_text()
    assert found == digest(leaf.grad)


def test_without_the_forward_call_a_backward_op_is_called_by_itself(tmp_path, repeat):
    """The forward op wrote its own input, so it cannot be called with gradients of that."""
    leaf = X.clone().requires_grad_()
    op = "aten.threshold_backward.default"
    capture(lambda: (leaf * 2).relu_().sum().backward(), op, tmp_path / "call", phase="backward")
    made, found = repeat()
    assert f"torch.ops.{op}(grad_output, self, 0)" in made.path.read_text()
    assert found == digest((X > 0).float())


@pytest.mark.parametrize("number", [0, 1])
def test_the_call_that_is_saved_is_the_one_that_was_wanted(number, tmp_path, repeat):
    """Of equal calls the occurrence decides."""

    def twice() -> None:
        torch.sin(X)
        torch.sin(X + 1)

    sites = capture(twice, "aten.sin.default", tmp_path / "call", number=number)
    assert [site.occurrence for site in sites if site.op == "aten.sin.default"] == [0, 1]
    assert repeat()[1] == digest(torch.sin(X + number))
    assert not (tmp_path / "call").exists(), "it is the file's input now"


@pytest.mark.parametrize(
    ("function", "op", "why"),
    [
        (lambda: X.to_sparse().sum(), "aten.sum.default", "sparse"),
        (
            lambda: torch.rand(3, generator=torch.Generator().manual_seed(0)),
            "aten.rand.generator",
            "is a generator",
        ),
    ],
)
def test_what_cannot_be_repeated_is_said(function, op, why, tmp_path, repeat):
    capture(function, op, tmp_path / "call")
    made = make_repro(tmp_path / "call", tmp_path / "repro", settings=SETTINGS, python="")
    assert made.path is None
    assert why in made.text
    assert not (tmp_path / "repro" / "repro.py").exists()


RACING = """
import random, torch
from torch import library
@library.custom_op("racing::sum", mutates_args=())
def total(x: torch.Tensor) -> torch.Tensor:
    return x[random.SystemRandom().sample(range(len(x)), 1)]
"""


@pytest.mark.slow
def test_the_file_tells_how_many_results_there_are_and_how_far_they_are_apart(
    tmp_path, monkeypatch
):
    """As a user runs it: an op of another library, whose module the user names."""
    (tmp_path / "racing.py").write_text(RACING)
    monkeypatch.syspath_prepend(tmp_path)
    import racing  # registers the op

    x = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    capture(lambda: racing.total(x), "racing.sum.default", tmp_path / "call")
    made = make_repro(tmp_path / "call", tmp_path / "repro", settings=SETTINGS, python="")
    assert (
        made.text
        == "racing.sum.default is not an op of torch: name the module that registers it in MODULES"
    )

    def run(*options: str) -> "subprocess.CompletedProcess[str]":
        words = [sys.executable, "-W", "ignore", str(made.path), *options]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)

    failed = run("--runs=2")
    assert (failed.returncode, failed.stdout, "racing" in failed.stderr) == (2, "", True)
    text = made.path.read_text()
    (tmp_path / "repro" / "racing.py").write_text(RACING)
    made.path.write_text(text.replace("MODULES = []", 'MODULES = ["racing"]'))
    done = run("--runs=20", "--issue")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("### racing.sum.default: equal inputs, distinct results: ")
    assert int(lines[0].split()[-1]) > 1
    assert torch.__version__ in lines[1]
    assert "1 of 1 elements, by up to" in lines[3]
    assert str(tmp_path) not in done.stdout
    assert made.path.read_text() in done.stdout
