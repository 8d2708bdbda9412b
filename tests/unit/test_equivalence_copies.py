"""The second run of an op that writes its arguments works on copies that lie in memory as the originals do."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, library

from det_callbacks import BitwiseEquivalenceMode
from det_callbacks.equivalence.second_run import copied_call

SEEN: list[list[dict[str, Any]]] = []


def shape_of(tensor: Tensor) -> dict[str, Any]:
    """Return all that an op can tell of a tensor, but its address."""
    return {
        "size": tuple(tensor.shape),
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
        "offset": tensor.data_ptr() % 64,
        "is_conj": tensor.is_conj(),
        "is_neg": tensor.is_neg(),
        "content": tensor.detach().resolve_conj().resolve_neg().tolist(),
    }


@library.custom_op("copies::write", mutates_args={"x", "others"})
def write(x: Tensor, y: Tensor, others: Sequence[Tensor]) -> None:
    """Writes its arguments, and notes what they were and which of them share memory."""
    tensors = [x, y, *others]
    addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    order = [addresses.index(address) for address in addresses]
    starts = [tensor.data_ptr() - x.data_ptr() for tensor, first in zip(tensors, order, strict=True) if first == 0]
    SEEN.append([*map(shape_of, tensors), {"shared": order, "starts": starts}])
    x.add_(y.sum().to(x.dtype))
    for other in others:
        other.mul_(3)


def both_runs(*tensors: Tensor) -> tuple[list[Any], list[Any]]:
    SEEN.clear()
    with BitwiseEquivalenceMode() as mode, torch.no_grad():
        write(tensors[0], tensors[1], list(tensors[2:]))
    assert mode.skipped == {}
    assert mode.get_mismatches() == []
    first, second = SEEN
    return first, second


def overlapping() -> list[Tensor]:
    base = torch.arange(24.0)
    return [base[1:5], base[3:9], base.view(4, 6).t()[2:, 1:3], base[20:]]


def parameter() -> list[Tensor]:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    return [weight, torch.ones(2), weight.detach()[1]]


def odd_memory() -> list[Tensor]:
    # begins 4 bytes into a page of its own, as memory from elsewhere may
    holder = bytearray(4096)
    start = torch.frombuffer(holder, dtype=torch.uint8).data_ptr() % 64
    skip = (4 - start) % 64
    base = torch.frombuffer(holder, dtype=torch.float32, count=64, offset=skip)
    return [base[3:9], base[:2], base[12:14]]


def of_two_types() -> list[Tensor]:
    base = torch.arange(16, dtype=torch.float32)
    return [base[2:4], base.view(torch.int32)[2:6], base.view(torch.float64)[3:5]]


def expanded() -> list[Tensor]:
    base = torch.arange(6.0)
    return [base[:3], base[4:5].expand(4), base[5:]]


MAKERS = [overlapping, parameter, odd_memory, of_two_types, expanded]


@pytest.mark.parametrize("make", MAKERS)
def test_copies_lie_as_the_originals_do_and_the_program_gets_what_one_run_writes(make):
    torch.manual_seed(0)
    tensors = make()
    first, second = both_runs(*tensors)
    assert first == second
    torch.manual_seed(0)
    plain = make()
    with torch.no_grad():
        write(plain[0], plain[1], plain[2:])
    assert [shape_of(tensor) for tensor in tensors] == [shape_of(tensor) for tensor in plain]


def test_conjugates_and_negatives_stay_what_they_are():
    base = torch.randn(4, dtype=torch.complex64)
    tensors = (base.conj(), base.imag, torch._neg_view(base.real), base.conj().imag)
    copied = copied_call((tensors, {}), [tensors[0]])
    assert [*map(shape_of, copied[0])] == [*map(shape_of, tensors)]
    (address,) = {tensor.untyped_storage().data_ptr() for tensor in copied[0]}
    assert address != base.untyped_storage().data_ptr()


def test_what_writes_beside_a_sparse_tensor_runs_once() -> None:
    x = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=False)
    dense = torch.ones(3)
    assert copied_call(((x, dense), {}), [x]) is None
    with BitwiseEquivalenceMode() as mode:
        dense.add_(x)
    assert dense.tolist() == [2.0, 1.0, 3.0]
    assert mode.skipped["not_copied"] == 1


def test_out_variants_grow_what_they_are_given():
    out, rows = torch.empty(0), torch.zeros(4, 3)
    with BitwiseEquivalenceMode() as mode:
        torch.add(torch.ones(2, 3), 1, out=out)
        torch.mm(torch.ones(2, 3), torch.ones(3, 3), out=rows[1:3])
        torch.cat([torch.ones(2, 3), rows[:1]], out=rows[1:])
    assert out.tolist() == [[2.0] * 3] * 2
    assert rows.tolist() == [[0.0] * 3, [1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert mode.get_mismatches() == []
    assert set(mode.skipped) <= {"view", "uninitialised"}
