"""Composite ops that no autograd took apart: of inference mode, and of tensors made in it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from numerics_models import MODELS
from torch import Tensor, nn
from torch.nn.functional import bilinear, scaled_dot_product_attention
from tracing import reads_of, traced

from det_callbacks import BitwiseEquivalenceMode, HashMode
from det_callbacks.trace.nondeterministic_ops import NondeterministicOps, NondeterministicOpWatch

DATA = torch.linspace(-1.0, 1.0, 72).view(6, 3, 4)
SQUARE = torch.linspace(-2.0, 1.0, 16).view(4, 4)
WEIGHT = torch.linspace(-1.0, 1.0, 80).view(5, 4, 4)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_inference_mode_has_the_sites_of_one_without_gradients(name):
    def sites_of(guard: AbstractContextManager[Any]) -> list[tuple[Any, ...]]:
        torch.manual_seed(4)
        model, inputs = MODELS[name]()
        with guard:
            trace = traced(lambda: model(inputs), model)
        return [
            (site.module, site.op, site.role, site.name, site.arguments, site.inputs, int(bits))
            for site, bits in zip(trace.program.sites, trace.digests, strict=True)
        ]

    inside = sites_of(torch.inference_mode())
    assert inside == sites_of(torch.no_grad())
    ops = {"convolutions": "native_batch_norm.default", "tied with dropout": "bernoulli_.float"}
    assert name not in ops or f"aten.{ops[name]}" in {site[1] for site in inside}


def test_tensors_made_in_it_are_followed_outside_of_it():
    made = torch.inference_mode()(DATA.clone)()
    trace = traced(lambda: made.sin().transpose(0, 1).reshape(3, 24).cos())
    assert reads_of(trace, "cos.default") == ["clone.default"]
    assert reads_of(trace, "clone.default") == ["sin.default"]


# says that they are a prototype
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_has_kernels_of_its_own():
    def body() -> None:
        torch.nn.functional.linear(torch.nested.nested_tensor([SQUARE, SQUARE[:2]]), SQUARE)

    assert "aten.linear.default" in [
        site.op for site in traced(torch.inference_mode()(body)).program.sites
    ]


AUTOCAST: dict[str, Callable[[], Tensor]] = {
    "no rule of its own": lambda: torch.einsum("abc,abd->cd", DATA, DATA),
    "ops inside ops": lambda: torch.linalg.multi_dot([SQUARE, SQUARE, SQUARE]),
    "a rule for bfloat16": lambda: scaled_dot_product_attention(DATA, DATA, DATA),
    "a rule for float32": lambda: torch.cdist(DATA.repeat(1, 20, 1), DATA.repeat(1, 20, 1)),
    "a recurrent layer": lambda: nn.GRU(4, 4)(DATA)[0],
    "a kernel of ops that have rules": lambda: bilinear(DATA, DATA, WEIGHT),
    "one whose result is narrower": lambda: torch.linalg.pinv(SQUARE),
}


@contextmanager
def watched() -> Iterator[None]:
    watch = NondeterministicOpWatch(NondeterministicOps(), nn.Identity())
    watch.open()
    yield
    watch.close()


@pytest.mark.parametrize("mode", [HashMode, BitwiseEquivalenceMode, watched])
@pytest.mark.parametrize("case", AUTOCAST)
def test_autocast_goes_on_inside_composite_ops(case, mode):
    def computed() -> Tensor:
        torch.manual_seed(5)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return AUTOCAST[case]()

    without = computed()
    with mode():
        found = computed()
    assert found.dtype == without.dtype
    assert torch.equal(found, without)
