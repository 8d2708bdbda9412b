"""BitwiseEquivalenceMode: what it finds and where, what it keeps,
and that nothing it runs beside notices it.
"""

import pickle
import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import op_programs
import pytest
import torch
import torch.distributed as dist
from attribution_models import MODELS
from beta_tensors import BETA_DTYPES, BETA_TENSORS
from nondeterministic_ops import drawing, entropy, noisy
from test_digest import CountingDispatch, CountingFunction
from tiers import rest_slow
from torch import Tensor, library, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore  # looked at in torch 2.13
from torch.utils.flop_counter import FlopCounterMode

from det_callbacks import BitwiseEquivalenceMode, EquivalenceError, HashMode, OpMismatch, TraceError
from det_callbacks.audit import equivalence
from det_callbacks.audit.equivalence import difference_of, has_same_bits
from det_callbacks.errors import CoverageWarning

# torch's, of hooks on inputs without gradients
pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True:UserWarning"
)


def places(found: list[OpMismatch]) -> list[tuple[str, str, str]]:
    return [(item.phase, item.module, item.op) for item in found]


@pytest.mark.parametrize("name", rest_slow(MODELS, every=5))
def test_ops_are_placed_where_hash_mode_places_them(name, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(equivalence, "has_same_bits", lambda *_: False)
    monkeypatch.setattr(equivalence, "MAX_KEPT", 100_000)
    model, step = MODELS[name]()
    hashing = HashMode(model)
    mode = BitwiseEquivalenceMode(model=model)
    with hashing, mode:
        step()
    sites = [
        site for site in hashing.trace.program.sites if site.op and site.role in ("output", "value")
    ]
    ours = mode.get_mismatches()
    assert len(ours) > 20
    assert places(ours) == [(site.phase, site.module, site.op) for site in sites]
    assert [found.source for found in ours] == [site.source for site in sites]
    assert mode.num_ops == mode.num_compared + sum(mode.skipped.values())


ZEROS: list[Tensor] = []


@library.custom_op("flip::next_zero", mutates_args=())
def next_zero(x: Tensor) -> Tensor:
    return ZEROS.pop(0)


@library.custom_op("flip::number", mutates_args=())
def number(x: Tensor) -> float:
    return entropy()


def test_a_single_bit_and_a_number_count_and_the_program_gets_what_the_first_run_gave():
    ZEROS[:] = [torch.tensor([0.0]), torch.tensor([-0.0])]
    with BitwiseEquivalenceMode() as mode:
        out = next_zero(torch.empty(1))
        number(torch.ones(1))
        torch.ones(1).item()
    zero, value = mode.get_mismatches()
    assert (zero.num_differing, zero.num_elements, zero.max_ulps) == (1, 1, 0)
    assert (value.dtype, value.shape, value.num_elements, value.max_ulps) == ("float", (), 1, None)
    assert not out.signbit().item()


def test_what_is_kept_is_bounded_and_the_mode_is_not_reentrant(monkeypatch):
    monkeypatch.setattr(equivalence, "MAX_KEPT", 5)
    mode = BitwiseEquivalenceMode()
    with mode:
        for _ in range(12):
            noisy(torch.ones(2))
        with pytest.raises(TraceError, match="already open"):
            mode.begin()
    with mode:
        noisy(torch.ones(1))
    assert (len(mode.get_mismatches()), mode.num_mismatches, mode.skipped) == (5, 13, {})


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return noisy(x)


def test_it_raises_at_the_op():
    model = nn.Sequential(nn.Linear(4, 4), Noisy())
    mode = BitwiseEquivalenceMode(raise_on_mismatch=True, model=model)
    with (
        mode,
        pytest.raises(
            EquivalenceError, match=r"planted\.noisy\.default in 1 at tests/unit/test_equ"
        ) as caught,
    ):
        model(torch.randn(3, 4))
    error = caught.value
    assert "12 of 12 elements of output 0 differ, by up to" in str(error)
    assert "ULPs" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.mismatch, copy.args) == (str(error), error.mismatch, error.args)
    assert mode.get_mismatches() == [error.mismatch]


# what the beta parts of torch say of themselves is not the subject here
@pytest.mark.filterwarnings("ignore")  # of ops that torch calls beta or deprecated
@pytest.mark.parametrize("name", op_programs.PROGRAMS)
def test_everyday_ops_give_the_same_bits_twice(name):
    with BitwiseEquivalenceMode() as mode:
        op_programs.PROGRAMS[name]()
    assert mode.get_mismatches() == []
    assert mode.num_compared > 40
    harmless = {
        "view",
        "uninitialised",
        "relayout",
        "side_effect",
        "no_tensors",
        "no_output",
        "not_copied",
    }
    assert set(mode.skipped) <= harmless, mode.skipped


def test_what_an_op_writes_lies_in_the_second_run_as_in_the_first():
    base, numbers = torch.arange(64.0), torch.randn(4, dtype=torch.complex64)
    with BitwiseEquivalenceMode() as mode:
        torch._foreach_add_([base[1:5], base[3:9], base[9:33].view(4, 6).t()[2:, 1:3]], 1)
        torch._foreach_add_(
            [base[40:], base.view(torch.int32)[44:]], [torch.tensor(1), torch.tensor(2)]
        )
        numbers.conj().conj_physical_()  # of the few that see such views as they are
        torch._neg_view(numbers.real).neg_()
    assert mode.get_mismatches() == []
    assert mode.skipped["not_copied"] == 1
    assert mode.skipped.keys() <= {"view", "not_copied"}, mode.skipped
    assert (base[:6].tolist(), base[40].item()) == ([0, 2, 3, 5, 6, 6], 41)


@BETA_TENSORS
def test_what_cannot_be_copied_or_has_nothing_to_compare_runs_once():
    holder = bytearray(4096)
    skip = (4 - torch.frombuffer(holder, dtype=torch.uint8).data_ptr()) % 64
    x = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=False)
    dense, quantised = torch.ones(3), torch.ao.nn.quantized.Linear(4, 4)
    inputs = torch.quantize_per_tensor(torch.randn(2, 4), 0.1, 0, torch.quint8)
    with BitwiseEquivalenceMode() as mode:
        # memory from elsewhere
        torch.frombuffer(holder, dtype=torch.float32, count=64, offset=skip).add_(1)
        dense.add_(x)  # beside a sparse tensor
        torch.cond(torch.tensor(True), torch.sin, torch.cos, (dense,))
        torch._assert_async(dense.sum())
        quantised(inputs)
    assert dense.tolist() == [2.0, 1.0, 3.0]
    assert mode.skipped == {"not_copied": 2, "opaque": 1, "side_effect": 1, "view": 1}


# It has no effect on what runs under it, nor on modes beside it, nor on the process.


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def generator_states() -> tuple[Any, ...]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()


def test_generators_passed_as_arguments_and_the_rest():
    def draw(generator: torch.Generator) -> tuple[Any, ...]:
        seed()
        torch.rand(3, generator=generator)
        torch.empty(3).normal_(generator=generator)
        torch.bernoulli(torch.full((4,), 0.5), generator=torch.default_generator)
        torch.randn(2)
        drawing(torch.ones(3))
        return generator.get_state().tolist(), generator_states()

    plain = draw(torch.Generator().manual_seed(3))
    with BitwiseEquivalenceMode() as mode:
        assert draw(torch.Generator().manual_seed(3)) == plain
    assert mode.get_mismatches() == []
    assert mode.num_compared >= 6


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
    assert (mode.num_compared, mode.skipped["no_data"] >= 4) == (0, True)


@library.custom_op("unobserved::raising", mutates_args={"x"})
def raising(x: Tensor, first: int) -> None:
    """Raises in the run that gets this memory, and in any other if it is 0."""
    x.add_(1)
    torch.rand(1)
    random.random()
    if x.untyped_storage().data_ptr() != first:
        np.random.rand()  # from a generator that the other run does not draw from
        raise ZeroDivisionError("planted")


@pytest.mark.parametrize("reason", ["raised", "second_run_raised"])
def test_what_a_run_raises_is_counted_and_goes_through_where_it_is_the_program_s(reason):
    def run() -> tuple[Any, ...]:
        seed()
        x = torch.ones(2)
        is_first = reason == "raised"
        with pytest.raises(ZeroDivisionError, match="planted") if is_first else nullcontext():
            raising(x, 0 if is_first else x.untyped_storage().data_ptr())
        return x.tolist(), generator_states()

    plain = run()
    with BitwiseEquivalenceMode() as mode:
        assert run() == plain
    assert mode.skipped == {reason: 1}


# Tensors beside the ordinary: nothing is reported, nothing fails.


@BETA_DTYPES
def test_odd_dtypes_and_layouts_give_the_same_bits_twice():
    with BitwiseEquivalenceMode() as mode:
        x = torch.arange(10.0)
        written, read = torch._lazy_clone(x), torch._lazy_clone(x)
        written.add_(1)
        read.add(1)
        assert x[0] == 0
        assert torch._C._is_cow_tensor(read)
        for dtype in (
            torch.float8_e4m3fn,
            torch.float8_e8m0fnu,
            torch.complex32,
            torch.uint16,
            torch.bool,
        ):
            torch.ones(3).to(dtype).clone().copy_(torch.zeros(3).to(dtype))
        x = torch.ones(3, dtype=torch.complex64)
        x.conj().add_(x).imag.zero_()
        x.resize_(5).fill_(1).set_(torch.ones(2, dtype=torch.complex64))
        x.unsqueeze_(0).t_().requires_grad_()
    assert mode.get_mismatches() == []
    assert mode.num_compared > 25
    assert set(mode.skipped) <= {"view", "uninitialised", "relayout", "not_copied"}, mode.skipped


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


@pytest.mark.filterwarnings("ignore")  # of kinds of tensors that torch calls beta or deprecated
@pytest.mark.parametrize(
    ("make", "num_differing", "max_ulps"),
    [
        (lambda: (torch.eye(3).to_sparse(), torch.eye(3).mul(2).to_sparse()), 9, None),
        (
            lambda: tuple(
                torch.quantize_per_tensor(torch.zeros(2), x, 0, torch.qint8) for x in (0.1, 0.2)
            ),
            2,
            None,
        ),
        (
            lambda: tuple(
                torch.nested.nested_tensor([torch.tensor([0.0, x])]) for x in (0.0, -0.0)
            ),
            2,
            None,
        ),
        (lambda: (torch.zeros(2), torch.zeros(3)), 2, None),
        (lambda: (torch.zeros(2), torch.zeros(2, dtype=torch.float64)), 2, None),
        (lambda: (torch.ones(3, 4), torch.ones(4, 3).t().mul(2)), 12, 1 << 23),
        (lambda: (3, 5), 1, None),
        (lambda: (1.0, 1.0000000000000002), 1, None),
        (lambda: (True, 1), 1, None),
    ],
)
def test_how_odd_outputs_differ(make, num_differing, max_ulps):
    first, second = make()
    assert not has_same_bits(first, second)
    assert has_same_bits(first, first.clone() if isinstance(first, Tensor) else first)
    found = difference_of(first, second)
    assert (found["num_differing"], found["max_ulps"]) == (num_differing, max_ulps)


@library.custom_op("fresh::unwritten", mutates_args=())
def unwritten(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_memory_that_a_kernel_allocates_is_other_memory_in_the_second_run():
    """A megabyte, which the host's allocator gets from the system as zeros each time."""
    given = torch.ones(1 << 20)
    with BitwiseEquivalenceMode() as mode:
        torch.ops.fresh.unwritten(given)
    assert [one.op for one in mode.get_mismatches()] == ["fresh.unwritten.default"]
