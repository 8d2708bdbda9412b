import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from det_callbacks.trace import source
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.trace.source import capture_source

SITE_PACKAGES = source._TORCH.removesuffix("/torch/")


def called(
    filename: str, call: Callable[[], object], code: str = "def f():\n    return call()\n"
) -> Any:
    scope = {"call": call}
    exec(compile(code, filename, "exec"), scope)
    return scope["f"]()


def line_of(op: str, mode: HashMode) -> tuple[str, ...]:
    return next(site.source for site in mode.trace.program.sites if site.op == op)


def test_lines_are_innermost_first_and_relative_to_the_working_directory():
    def outer():
        return inner()

    def inner():
        return capture_source()

    with HashMode() as mode:
        nn.Linear(2, 2)(torch.ones(1, 2))
    here = sys._getframe()
    of_linear = f"tests/unit/test_source.py:{here.f_lineno - 2} in {here.f_code.co_name}"
    assert line_of("aten.addmm.default", mode)[0] == of_linear, "torch's own module is not shown"
    first, second, *_ = outer()
    assert first == f"tests/unit/test_source.py:{inner.__code__.co_firstlineno + 1} in inner"
    assert second == f"tests/unit/test_source.py:{outer.__code__.co_firstlineno + 1} in outer"


def test_the_text_of_a_line_is_read_where_its_file_is_known_beyond_doubt(tmp_path):
    code = "def f():\n    return call()  # this one\n\n"
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "step_of_a_test.py"
    path.write_text(code)
    found = called(str(path), capture_source, code)[:1]
    text = {"a/step_of_a_test.py:2": ("def f():", "    return call()  # this one", "")}
    assert source.read_text([found]) == text
    with HashMode() as mode:
        called(str(path), lambda: torch.ones(1))
    assert mode.trace.program.text.items() >= text.items()
    nowhere = called(str(tmp_path / "a" / "is_not_there.py"), capture_source)
    relative = called("test_source.py", capture_source)
    assert source.read_text([nowhere[:1], relative[:1]]) == {}
    like_it = called(str(tmp_path / "b" / "a" / "step_of_a_test.py"), capture_source)
    assert like_it[0] == found[0]
    assert source.read_text([found]) == {}


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("one.py", "one.py"),
        ("two.py", "two.py"),  # equal code in another file
        ("/home/someone/project/train.py", "project/train.py"),  # no home directory gets into a run
        (f"{SITE_PACKAGES}/timm/layers.py", "timm/layers.py"),  # installed packages are users' code
    ],
)
def test_files_are_shown_without_what_belongs_to_the_machine(path, shown):
    assert called(path, capture_source)[0] == f"{shown}:2 in f"


def test_the_training_loop_is_not_users_code_and_an_optimizer_without_any_shows_its_own_line():
    (line,) = called(
        f"{SITE_PACKAGES}/lightning/pytorch/loops/training_epoch_loop.py", lambda: capture_source()
    )
    assert line.endswith("in <lambda>")
    hooks = called(f"{SITE_PACKAGES}/lightning/pytorch/core/hooks.py", capture_source)
    assert not any("lightning" in line for line in hooks)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.step()  # the wrappers of the first call
    with HashMode() as mode:
        called(f"{SITE_PACKAGES}/lightning/pytorch/loops/optimization/automatic.py", optimizer.step)
    (line,) = line_of("aten.add_.Tensor", mode)
    assert line.startswith("torch/optim/sgd.py:")


def test_the_loop_of_hugging_face_is_not_users_code_and_its_models_are():
    installed = "/env/lib/python3.11/site-packages"
    (line,) = called(f"{installed}/transformers/trainer.py", lambda: capture_source())
    assert line.endswith("in <lambda>")
    assert (
        called(f"{installed}/transformers/models/llama.py", capture_source)[0]
        == "transformers/models/llama.py:2 in f"
    )
    assert not any(
        "accelerate" in line
        for line in called(f"{installed}/accelerate/optimizer.py", capture_source)
    )


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + x

    @staticmethod
    def backward(ctx, grad):
        return grad.div(0.5)


@pytest.mark.parametrize("packing", [lambda x: x * 1.0, lambda x: x])
def test_ops_of_hooks_have_a_source_of_their_own_and_others_that_of_the_forward_op(packing):
    def unpack(packed):
        return packed.abs()

    x = torch.ones(3, requires_grad=True)
    mode = HashMode()
    with mode:
        with torch.autograd.graph.saved_tensors_hooks(packing, unpack):
            y = x.sin()
        y = Double.apply(y)
        y.register_hook(lambda grad: grad.neg())
        y.exp().sum().backward()
    assert line_of("aten.abs.default", mode)[0].endswith(" in unpack")
    assert line_of("aten.neg.default", mode)[0].endswith(" in <lambda>")
    assert line_of("aten.cos.default", mode) == line_of("aten.sin.default", mode)
    own, *forward = line_of("aten.div.Tensor", mode)
    assert own.endswith(" in backward")
    assert forward == [*line_of("aten.add.Tensor", mode)][:3]
