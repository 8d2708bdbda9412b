"""Tensors and transforms beside the ordinary under BitwiseEquivalenceMode: nothing is reported, nothing fails."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from nondeterministic_ops import noisy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore  # looked at in torch 2.13
from torch.testing._internal.two_tensor import TwoTensor

from det_callbacks import BitwiseEquivalenceMode
from det_callbacks.equivalence.mode import make_check_plan
from det_callbacks.equivalence.second_run import difference_of, has_same_bits

aten = torch.ops.aten


def jagged() -> None:
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged, requires_grad=True)
    nn.Linear(3, 3)(x).relu().values().sum().backward()


def nested() -> None:
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    (x * 2).mul_(2.0).to_padded_tensor(0.0)


def pairs_of_tensors() -> None:
    x = nn.Parameter(TwoTensor(torch.randn(3), torch.randn(3)))
    (x * 2).add_(1).square().sum().backward()


def copies_on_write() -> None:
    x = torch.arange(10.0)
    written, read = torch._lazy_clone(x), torch._lazy_clone(x)
    written.add_(1)
    read.add(1)
    assert x[0] == 0
    assert torch._C._is_cow_tensor(read)


def small_dtypes() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.complex32, torch.uint16, torch.bool):
        torch.ones(3).to(dtype).clone().copy_(torch.zeros(3).to(dtype))
    x = torch.ones(3, dtype=torch.complex64)
    x.conj().add_(x).imag.zero_()


def relayouts() -> None:
    x = torch.ones(3)
    x.resize_(5).fill_(1).set_(torch.ones(2))
    x.unsqueeze_(0).t_().requires_grad_()
    y = torch.ones(3)
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(12)
    y.zero_()


@pytest.mark.filterwarnings("ignore")  # what the beta and deprecated parts of torch say of themselves
@pytest.mark.parametrize("program", [jagged, nested, pairs_of_tensors, copies_on_write, small_dtypes, relayouts])
def test_nothing_is_reported(program: Callable[[], None]):
    with BitwiseEquivalenceMode() as mode:
        program()
    assert mode.get_mismatches() == []
    assert mode.num_compared >= 2
    assert set(mode.skipped) <= {"view", "uninitialised", "relayout", "no_data", "subclass", "not_copied"}, mode.skipped


def test_what_a_subclass_comes_down_to_is_compared():
    x = TwoTensor(torch.randn(3), torch.randn(3))
    with BitwiseEquivalenceMode() as mode:
        x * 2
        noisy(torch.ones(1))
    assert mode.skipped == {"subclass": 1}
    assert mode.num_compared == 4
    assert mode.num_mismatches == 1


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_shards_are_compared_and_collectives_run_once(process_group):
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([weight], foreach=True)
    with BitwiseEquivalenceMode() as mode:
        (weight @ weight.redistribute(mesh, [Replicate()])).to_local().sum().backward()
        optimizer.step()
        dist.all_reduce(torch.ones(3))
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


def test_hidden_states_and_scratch_memory_of_ops_for_other_devices():
    plan = make_check_plan(aten._cudnn_rnn.default)
    assert plan.hidden_state in plan.plan.argument_names
    plan = make_check_plan(aten._cudnn_rnn_backward.default)
    assert plan.scratch < set(plan.plan.argument_names)


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
