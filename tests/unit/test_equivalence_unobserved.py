"""BitwiseEquivalenceMode has no effect on what runs under it, nor on modes beside it, nor on the process."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from nondeterministic_ops import drawing, noisy
from test_digest_unobserved import CountingDispatch, CountingFunction
from torch import Tensor, library, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from det_callbacks import BitwiseEquivalenceMode
from det_callbacks.digest import digest_tensor
from det_callbacks.errors import CoverageWarning

# torch's, of hooks on inputs without gradients
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")


def generator_states() -> tuple[Any, ...]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def test_generators_passed_as_arguments_and_the_rest():
    def draw(generator: torch.Generator) -> tuple[Any, ...]:
        seed()
        torch.rand(3, generator=generator)
        torch.empty(3).normal_(generator=generator)
        torch.randperm(5, generator=generator)
        torch.randn(2)
        torch.bernoulli(torch.full((4,), 0.5), generator=torch.default_generator)
        drawing(torch.ones(3))
        return generator.get_state().tolist(), generator_states()

    plain = draw(torch.Generator().manual_seed(3))
    with BitwiseEquivalenceMode() as mode:
        assert draw(torch.Generator().manual_seed(3)) == plain
    assert mode.get_mismatches() == []
    assert mode.num_compared >= 7


@library.custom_op("unobserved::odd_draw", mutates_args=())
def odd_draw(x: Tensor) -> Tensor:
    """Draws in every second run only."""
    if next(_TURNS) % 2:
        random.random()
        np.random.rand()
        torch.rand(1)
    return x.clone()


_TURNS = iter(range(10))


def test_generators_that_only_the_second_run_draws_from_are_put_back():
    before = generator_states()
    with BitwiseEquivalenceMode():
        odd_draw(torch.ones(2))
    assert generator_states() == before
    assert next(_TURNS) == 2


def test_a_written_argument_keeps_its_version_and_its_graph():
    def run() -> tuple[int, str, list[float]]:
        x = torch.arange(4.0, requires_grad=True)
        y = x * 2
        y[1:].mul_(3)
        y.add_(1)
        y.square().sum().backward()
        return y._version, type(y.grad_fn).__name__, x.grad.tolist()

    plain = run()
    with BitwiseEquivalenceMode() as mode:
        assert run() == plain
    assert mode.get_mismatches() == []


def test_modes_outside_see_each_op_once():
    def run() -> None:
        x = torch.randn(3, 3)
        x.add_(x @ x)
        x[1:].add_(x[0])

    alone, below, flops = CountingDispatch(), CountingDispatch(), FlopCounterMode(display=False)
    function_alone, function = CountingFunction(), CountingFunction()
    with alone, function_alone:
        run()
    with flops, below, BitwiseEquivalenceMode() as mode, function:
        run()
    assert below.seen == alone.seen
    assert function.seen == function_alone.seen
    assert flops.get_total_flops() == 2 * 27
    assert mode.num_compared >= 4


def test_a_mode_that_was_left_open_is_not_popped():
    stranger = CountingDispatch()
    mode = BitwiseEquivalenceMode()
    mode.begin()
    torch.ones(1)
    stranger.__enter__()
    with pytest.warns(CoverageWarning, match="CountingDispatch"):
        mode.finish()
    torch.ones(1)
    assert len(stranger.seen) == 1
    assert mode.num_ops == 1
    stranger.__exit__(None, None, None)
    torch.utils._python_dispatch._get_current_dispatch_mode().__exit__(None, None, None)
    with mode:
        torch.ones(1)
    assert mode.num_ops == 2


def test_fake_and_meta_tensors_are_passed_through():
    with BitwiseEquivalenceMode() as mode:
        torch.ones(3, device="meta").add_(1)
        with FakeTensorMode():
            torch.ones(3).add_(1).sum()
    with FakeTensorMode(), mode:
        torch.ones(3).add_(1).sum()
    assert mode.num_compared == 0
    assert mode.skipped["no_data"] >= 5


class PlantedError(Exception):
    pass


@library.custom_op("unobserved::raising", mutates_args={"x"})
def raising(x: Tensor) -> None:
    x.add_(1)
    torch.rand(1)
    raise PlantedError("first")


@library.custom_op("unobserved::raising_again", mutates_args={"x"})
def raising_again(x: Tensor) -> None:
    x.add_(1)
    torch.rand(1)
    random.random()
    if x.untyped_storage().data_ptr() != _original:
        raise PlantedError("second")


_original = 0


def test_what_the_program_raises_goes_through():
    def run() -> tuple[Any, ...]:
        seed()
        x = torch.ones(2)
        with pytest.raises(PlantedError, match="first"):
            raising(x)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        return x.tolist(), generator_states()

    plain = run()
    with BitwiseEquivalenceMode() as mode:
        assert run() == plain
    assert mode.skipped == {"raised": 2}


def test_what_only_the_second_run_raises_is_counted():
    global _original
    x = torch.ones(2)
    _original = x.untyped_storage().data_ptr()
    seed()
    torch.rand(1)
    random.random()
    after_one = generator_states()
    seed()
    with BitwiseEquivalenceMode() as mode:
        raising_again(x)
    assert generator_states() == after_one
    assert x.tolist() == [2.0, 2.0]
    assert mode.skipped == {"second_run_raised": 1}


@pytest.mark.filterwarnings("ignore")  # of Dynamo while it compiles: not what is tried
def test_compiled_functions():
    layer = nn.Linear(4, 4)

    def function(x: Tensor) -> Tensor:
        return noisy(layer(x).relu() @ layer.weight)

    plain = copy.deepcopy(layer)
    compiled = torch.compile(function, backend="aot_eager")
    with BitwiseEquivalenceMode(model=layer) as mode:
        compiled(torch.ones(2, 4)).sum().backward()
        compiled(torch.ones(2, 4)).sum().backward()
    assert {found.op for found in mode.get_mismatches()} == {"planted.noisy.default"}
    assert digest_tensor(plain.weight) == digest_tensor(layer.weight)
    assert mode.num_mismatches == 2
