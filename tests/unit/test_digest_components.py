"""Digests of tensors that are made of other tensors, and of those that have no data."""

import struct
from collections.abc import Callable

import digest_reference
import pytest
import torch
from beta_tensors import BETA_TENSORS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor  # looked at in torch 2.13

from det_callbacks.digest import digest_bytes, digest_output, digest_tensor, digest_tensors

pytestmark = BETA_TENSORS


def combined(*components: torch.Tensor | bytes) -> int:
    """Return what the specification says of these components, by the other implementation."""
    digests = [
        digest_reference.digest(part if isinstance(part, bytes) else part.contiguous().numpy().tobytes())
        for part in components
    ]
    return digest_reference.digest(struct.pack(f"<{len(digests) + 1}Q", len(digests), *digests))


def assert_digest(tensor: torch.Tensor, expected: int) -> None:
    assert digest_tensor(tensor) == expected
    assert digest_output(tensor) == expected
    assert digest_tensors([tensor, tensor]) == [expected, expected]


def test_mkldnn_is_its_plain_form() -> None:
    dense = torch.randn(3, 5)
    assert_digest(dense.to_mkldnn(), digest_tensor(dense))


def test_nested_strided_is_its_tensors_one_by_one() -> None:
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    tensor = torch.nested.nested_tensor(parts, requires_grad=True)
    assert_digest(tensor, combined(*parts))
    assert_digest(tensor.transpose(1, 2), combined(*(part.t() for part in parts)))
    assert digest_tensor(torch.nested.nested_tensor(parts[:1])) == digest_tensor(parts[0]), "one stands for itself"
    assert digest_tensor(torch.nested.nested_tensor([])) == digest_bytes(bytes(8)), "none is not nothing"


def test_nested_jagged_is_values_offsets_and_lengths_whatever_it_caches() -> None:
    values, offsets, lengths = torch.randn(6, 3), torch.tensor([0, 2, 6]), torch.tensor([1, 3])
    cached = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=2, max_seqlen=4)
    assert len(cached.__tensor_flatten__()[0]) == 4
    assert_digest(cached, combined(values, offsets))
    assert_digest(torch.nested.nested_tensor_from_jagged(values, offsets, lengths), combined(values, offsets, lengths))


def test_a_wrapper_subclass_is_its_inner_tensors_recursively() -> None:
    left, right = torch.randn(3, 4), torch.randn(3, 4)
    pair = TwoTensor(left, right)
    assert_digest(pair, combined(left, right))
    outer = digest_reference.digest(struct.pack("<3Q", 2, combined(left, right), combined(right, left)))
    assert_digest(TwoTensor(pair, TwoTensor(right, left)), outer)
    assert_digest(pair.t(), combined(left.t(), right.t()))


class Silent(torch.Tensor):
    """A wrapper subclass without ``__tensor_flatten__``."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Silent":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> None:
        raise AssertionError(f"{func} was called")


def test_a_wrapper_that_does_not_say_what_is_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"cannot digest a Silent: it has no memory of its own.*__tensor_flatten__"):
        digest_tensor(Silent(torch.randn(3)))
    hollow = TwoTensor(torch.ones(1), torch.ones(1))
    monkeypatch.setattr(TwoTensor, "__tensor_flatten__", lambda self: (["shape"], None))
    with pytest.raises(TypeError, match="cannot digest a TwoTensor: its __tensor_flatten__ names no tensor"):
        digest_tensor(hollow)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_what_a_collective_has_not_delivered_yet_is_waited_for() -> None:
    from torch.distributed import _functional_collectives as collectives

    class LateWork(torch.distributed.Work):
        def wait(self, timeout: object = None) -> bool:
            buffer.fill_(7)
            return True

    for digest in (digest_tensor, digest_output, lambda value: digest_tensors([value])[0]):
        buffer = torch.zeros(5)
        torch._C._distributed_c10d._register_work(buffer, LateWork())
        assert digest(collectives.AsyncCollectiveTensor(buffer)) == digest_tensor(torch.full((5,), 7.0))


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("meta", lambda: torch.nn.Linear(2, 2, device="meta").weight),
        ("fake", lambda: FakeTensorMode().from_tensor(torch.empty(3))),
        ("functional", lambda: torch._to_functional_tensor(torch.randn(3))),
        ("uninitialised", lambda: torch.nn.LazyLinear(3).weight),
    ],
)
def test_tensors_without_data_are_refused(kind: str, make: Callable[[], torch.Tensor]) -> None:
    for digest in (digest_tensor, digest_output, lambda value: digest_tensors([value])):
        with pytest.raises(TypeError, match=rf"a {kind} tensor is not data"):
            digest(make())


def test_in_a_gradient_transform_the_data_is_digested() -> None:
    data = torch.randn(3, 4)
    seen = []

    def loss(value: torch.Tensor) -> torch.Tensor:
        seen.append((digest_tensor(value), digest_tensor(value.t()), digest_output(value.t())))
        return (value * value).sum()

    gradient = torch.func.grad(loss)(data)
    torch.func.grad(lambda value: torch.func.grad(loss)(value).sum())(data)
    assert torch.equal(gradient, 2 * data)
    assert seen == [(digest_tensor(data), digest_tensor(data.t()), digest_tensor(data))] * 2


def test_under_vmap_a_batched_tensor_is_refused() -> None:
    def function(value: torch.Tensor) -> torch.Tensor:
        with pytest.raises(TypeError, match=r"a batched \(vmap\) tensor is not data"):
            digest_tensor(value)
        return value

    torch.vmap(function)(torch.randn(2, 3))
