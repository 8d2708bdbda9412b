"""BitwiseEquivalenceMode has no effect on what runs under it, nor on modes beside it, nor on the process."""

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from nondeterministic_ops import drawing, noisy
from test_digest import CountingDispatch, CountingFunction
from torch import Tensor, library, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore  # looked at in torch 2.13
from torch.utils.flop_counter import FlopCounterMode

from det_callbacks import BitwiseEquivalenceMode
from det_callbacks.equivalence import difference_of, has_same_bits, make_check_plan
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


def test_modes_outside_see_each_op_once_and_a_written_argument_keeps_its_version_and_its_graph():
    def run() -> tuple[int, str, list[float]]:
        x = torch.eye(3, requires_grad=True)
        y = x @ x
        y[1:].mul_(3)
        y.add_(1)
        y.square().sum().backward()
        return y._version, type(y.grad_fn).__name__, x.grad.tolist()

    alone, below, flops = CountingDispatch(), CountingDispatch(), FlopCounterMode(display=False)
    function_alone, function = CountingFunction(), CountingFunction()
    with alone, function_alone:
        plain = run()
    with flops, below, BitwiseEquivalenceMode() as mode, function:
        assert run() == plain
    assert below.seen == alone.seen
    assert function.seen == function_alone.seen
    assert flops.get_total_flops() == 3 * 2 * 27
    assert mode.get_mismatches() == []
    assert mode.num_compared >= 8


def test_a_mode_that_was_left_open_is_not_popped():
    stranger, mode = CountingDispatch(), BitwiseEquivalenceMode()
    mode.begin()
    stranger.__enter__()
    with pytest.warns(CoverageWarning, match="CountingDispatch"):
        mode.finish()
    torch.ones(1)
    assert (len(stranger.seen), mode.num_ops) == (1, 0)
    stranger.__exit__(None, None, None)
    torch.utils._python_dispatch._get_current_dispatch_mode().__exit__(None, None, None)
    with mode:
        torch.ones(1)
    assert mode.num_ops == 1


def test_fake_and_meta_tensors_are_passed_through():
    with BitwiseEquivalenceMode() as mode:
        torch.ones(3, device="meta").add_(1)
        with FakeTensorMode():
            torch.ones(3).add_(1).sum()
    with FakeTensorMode(), mode:
        torch.ones(3).add_(1).sum()
    assert mode.num_compared == 0
    assert mode.skipped["no_data"] >= 4


class PlantedError(Exception):
    pass


@library.custom_op("unobserved::raising", mutates_args={"x"})
def raising(x: Tensor, first: int) -> None:
    """Raises in the run that gets this memory, and in any other if it is 0."""
    x.add_(1)
    torch.rand(1)
    random.random()
    if x.untyped_storage().data_ptr() != first:
        np.random.rand()  # from a generator that the other run does not draw from
        raise PlantedError("planted")


@pytest.mark.parametrize("reason", ["raised", "second_run_raised"])
def test_what_a_run_raises_is_counted_and_goes_through_where_it_is_the_program_s(reason: str):
    def run() -> tuple[Any, ...]:
        seed()
        x = torch.ones(2)
        is_first = reason == "raised"
        with pytest.raises(PlantedError) if is_first else nullcontext():
            raising(x, 0 if is_first else x.untyped_storage().data_ptr())
        return x.tolist(), generator_states()

    plain = run()
    with BitwiseEquivalenceMode() as mode:
        assert run() == plain
    assert mode.skipped == {reason: 1}


@pytest.mark.filterwarnings("ignore")  # of Dynamo while it compiles: not what is tried
def test_compiled_functions():
    layer = nn.Linear(4, 4)

    def function(x: Tensor) -> Tensor:
        return noisy(layer(x).relu() @ layer.weight)

    compiled = torch.compile(function, backend="aot_eager")
    with BitwiseEquivalenceMode(model=layer) as mode:
        for _ in range(2):
            compiled(torch.ones(2, 4)).sum().backward()
    assert [found.op for found in mode.get_mismatches()] == ["planted.noisy.default"] * 2


# Tensors beside the ordinary: nothing is reported, nothing fails.

aten = torch.ops.aten


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_odd_dtypes_and_layouts_give_the_same_bits_twice():
    with BitwiseEquivalenceMode() as mode:
        x = torch.arange(10.0)
        written, read = torch._lazy_clone(x), torch._lazy_clone(x)
        written.add_(1)
        read.add(1)
        assert x[0] == 0
        assert torch._C._is_cow_tensor(read)
        for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.complex32, torch.uint16, torch.bool):
            torch.ones(3).to(dtype).clone().copy_(torch.zeros(3).to(dtype))
        x = torch.ones(3, dtype=torch.complex64)
        x.conj().add_(x).imag.zero_()
        x.resize_(5).fill_(1).set_(torch.ones(2, dtype=torch.complex64))
        x.unsqueeze_(0).t_().requires_grad_()
    assert mode.get_mismatches() == []
    assert mode.num_compared > 25
    assert set(mode.skipped) <= {"view", "uninitialised", "relayout"}, mode.skipped


def test_shards_are_compared_and_collectives_run_once():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
        optimizer = torch.optim.AdamW([weight], foreach=True)
        with BitwiseEquivalenceMode() as mode:
            (weight @ weight.redistribute(mesh, [Replicate()])).to_local().sum().backward()
            optimizer.step()
            dist.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()
    assert mode.get_mismatches() == []
    assert mode.skipped["collective"] >= 2
    assert mode.skipped["subclass"] > 5
    assert mode.num_compared > 10


def test_what_may_not_run_twice():
    for op, reason in (
        (aten.view.default, "view"),
        (aten.empty.memory_format, "uninitialised"),
        (aten.set_.source_Tensor, "relayout"),
        (aten._assert_async.msg, "side_effect"),
        (torch.ops._c10d_functional.all_reduce.default, "collective"),
        (torch.ops.higher_order.cond, "opaque"),
        (aten.add_.Tensor, ""),
        (aten._local_scalar_dense.default, ""),
        (torch.ops.quantized.linear.default, ""),
    ):
        assert make_check_plan(op).left_out == reason


@pytest.mark.filterwarnings("ignore")  # of kinds of tensors that torch calls beta or deprecated
@pytest.mark.parametrize(
    ("make", "num_differing", "max_ulps"),
    [
        (lambda: (torch.eye(3).to_sparse(), torch.eye(3).mul(2).to_sparse()), 9, None),
        (lambda: tuple(torch.quantize_per_tensor(torch.zeros(2), x, 0, torch.qint8) for x in (0.1, 0.2)), 2, None),
        (lambda: tuple(torch.nested.nested_tensor([torch.tensor([0.0, x])]) for x in (0.0, -0.0)), 2, None),
        (lambda: (torch.zeros(2), torch.zeros(3)), 2, None),
        (lambda: (torch.zeros(2), torch.zeros(2, dtype=torch.float64)), 2, None),
        (lambda: (torch.ones(3, 4), torch.ones(4, 3).t().mul(2)), 12, 1 << 23),
        (lambda: (3, 5), 1, None),
        (lambda: (1.0, 1.0000000000000002), 1, 1),
        (lambda: (True, 1), 1, None),
    ],
)
def test_how_odd_outputs_differ(make, num_differing, max_ulps):
    first, second = make()
    assert not has_same_bits(first, second)
    assert has_same_bits(first, first.clone() if isinstance(first, Tensor) else first)
    found = difference_of(first, second)
    assert (found["num_differing"], found["max_ulps"]) == (num_differing, max_ulps)
