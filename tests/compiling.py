"""Networks that are compiled, compilers, and steps of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import Tensor, library, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

from det_callbacks.compare.differences import StepDifference, compare_steps
from det_callbacks.runs.program import Site
from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.compiled.replaced import REPLACED

COMPILING = [
    pytest.mark.usefixtures("compiles_anew"),
    # torch's own, in what Dynamo and inductor import
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # torch's own, when it compiles a module whose input is no leaf
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
"""Marks of a module whose tests compile."""


@pytest.fixture
def generates_anew() -> Iterator[None]:
    """Have inductor generate its code again, which compilers may take from a cache."""
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield


SET_BY_INDUCTOR = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # when it loads its first kernel

FOLLOWER = object()  # of what the tests compile, as a callback is during a fit

NUDGE = {"twice": False}


@library.custom_op("det_tests::twice", mutates_args=())
def twice(tensor: Tensor) -> Tensor:
    result = tensor * 2
    if NUDGE["twice"]:
        result.view(-1)[3] = torch.nextafter(result.view(-1)[3], torch.tensor(1e30))
    return result


twice.register_fake(torch.empty_like)
twice.register_autograd(
    lambda ctx, gradient: gradient * 2, setup_context=lambda ctx, inputs, output: None
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return twice(torch.relu(self.norm(self.linear(x)))) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def backend_of(run: Callable[..., Any]) -> Any:
    """Return a compiler whose graphs do what ``run(graph, *inputs)`` does."""
    return aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(partial(run, graph)))


def opaque_backend() -> Any:
    return backend_of(lambda graph, *inputs: graph.forward(*inputs))


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def batch() -> Tensor:
    return torch.linspace(-1, 1, 32).reshape(4, 8)


def train(model: Callable[[Tensor], Tensor], x: Tensor | None = None) -> Callable[[], None]:
    def body() -> None:
        model(batch() * 3 if x is None else x).square().sum().backward()

    return body


def ends(trace: StepTrace, part: str, phase: str = "forward") -> list[Site]:
    return [
        site for site in trace.program.sites if site.op.endswith(f".{part}") and site.phase == phase
    ]


def difference(reference: StepTrace, current: StepTrace) -> StepDifference:
    return compare_steps(reference.view(), current.view())


def nudged(tensor: Tensor) -> Tensor:
    tensor[1, 2] = torch.nextafter(tensor[1, 2], torch.tensor(9.0))
    return tensor


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def restored(model: nn.Module, state: dict[str, Tensor], run: Callable[[], StepTrace]) -> StepTrace:
    """Run a step from the same weights and buffers."""
    model.load_state_dict(state)
    model.zero_grad()
    return run()


@contextmanager
def nobody_follows() -> Iterator[None]:
    """Compile in here as before anything was recorded."""
    REPLACED.unfollow(FOLLOWER)
    yield
    REPLACED.follow(FOLLOWER)


@pytest.fixture
def compiles_anew() -> Iterator[None]:
    """Forget what was compiled, before and after."""
    REPLACED.follow(FOLLOWER)  # as a callback does during a fit
    was_set = SET_BY_INDUCTOR in os.environ
    torch._dynamo.reset()
    counters.clear()
    NUDGE["twice"] = False
    yield
    REPLACED.unfollow(FOLLOWER)
    NUDGE["twice"] = False
    torch._dynamo.reset()
    if not was_set:
        os.environ.pop(SET_BY_INDUCTOR, None)
    left = list(REPLACED.watchers)
    for watcher in left:
        REPLACED.unfollow(watcher)  # so that one leak fails one test
    assert left == [], "somebody still watches"
