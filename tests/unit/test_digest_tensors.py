"""Digests of plain tensors: every dtype, every way to lie in memory, and what a change does to them."""

import digest_reference
import numpy as np
import pytest
import torch
from device_cases import DTYPES, of_bits

from det_callbacks.digest import components, digest_bytes, digest_output, digest_tensor, digest_tensors
from det_callbacks.errors import DetCallbacksError

# torch says this once per process when a complex32 tensor is made, digested or not
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def stored_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes in row-major order, element by element, without any code of the package."""
    integers = tensor.detach().view(SAME_SIZE[tensor.element_size()])
    return b"".join(integers[tuple(index)].numpy().tobytes() for index in np.ndindex(*tensor.shape))


@dtypes
def test_every_dtype_is_its_stored_bytes_in_row_major_order(dtype: torch.dtype) -> None:
    tensor = of_bits(dtype, 6, 5)
    assert digest_output(tensor) == digest_reference.digest(stored_bytes(tensor))
    base = of_bits(dtype, 6, 10)
    views = [base.t(), base[:, ::2], base[1:, 3:], base[:1].expand(4, 10), base[2], base.t()[3:, ::2], base[0, 1]]
    for view in (tensor, *views):
        expected = digest_reference.digest(stored_bytes(view))
        assert digest_tensor(view) == expected
        assert digest_tensors([view, view]) == [expected] * 2
    for empty in (of_bits(dtype, 0), of_bits(dtype, 3, 0, 2), of_bits(dtype, 4, 4)[:, 4:], of_bits(dtype, 2, 0).t()):
        assert digest_tensor(empty) == digest_output(empty) == digest_bytes(b"")


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negative_views_are_what_they_mean(dtype: torch.dtype) -> None:
    tensor = torch.complex(torch.arange(6.0), torch.arange(1.0, 7.0)).to(dtype).reshape(2, 3)
    conjugate, numbers = tensor.conj(), torch.arange(1.0, 7.0)
    for view, meant in (
        (conjugate, conjugate.resolve_conj()),
        (conjugate.t(), conjugate.resolve_conj().t().contiguous()),
        (conjugate.imag, (-tensor.imag).contiguous()),
        (torch._neg_view(numbers), -numbers),
        (torch._neg_view(conjugate), torch.complex(-tensor.real.float(), tensor.imag.float()).to(dtype)),
    ):
        assert view.is_conj() or view.is_neg()
        assert digest_tensor(view) == digest_tensor(meant)
        in_memory_order = conjugate.resolve_conj() if view.shape == (3, 2) else meant
        assert digest_output(view) == digest_tensor(in_memory_order)


def test_outputs_are_read_in_memory_order_where_they_are_dense_and_else_in_row_major_order() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    for order in ((0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 2, 3)):
        permuted = tensor.permute(order)
        assert digest_output(permuted) == digest_tensor(tensor)
        assert digest_tensor(permuted) == digest_tensor(permuted.contiguous()) != digest_tensor(tensor)
    memory = torch.randn(12)
    size_of_one = memory.as_strided((3, 1, 4), (1, 99, 3))
    assert digest_output(size_of_one) == digest_tensor(memory) != digest_tensor(size_of_one)
    gaps = torch.randn(6, 10)
    for view in (gaps[:, ::2], gaps.t()[::2], gaps[:1].expand(4, 10), gaps.as_strided((3, 3), (1, 1))):
        assert digest_output(view) == digest_tensor(view.contiguous())


def test_what_lies_in_order_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "_digest", lambda tensor, memory_order: pytest.fail("took the way of copies"))
    tensor = torch.randn(2, 3, 4, 5)
    for plain in (tensor, tensor[1], torch.nn.Parameter(tensor), torch.tensor(1.0), torch.empty(0, 3)):
        digest_tensor(plain)
        digest_output(plain)
        digest_tensors([plain])
    for dense in (tensor.permute(3, 0, 2, 1), tensor[1].mT):
        digest_output(dense)


def test_tensors_that_share_memory_or_have_none_are_their_elements() -> None:
    tensor = torch.randn(4)
    lazy = torch._lazy_clone(tensor)
    assert digest_tensor(lazy) == digest_tensor(tensor)
    assert torch._C._is_cow_tensor(lazy), "it was not copied for that"
    zeros = torch._efficientzerotensor(5)
    for zero in (zeros, zeros[1:], torch._efficientzerotensor(4, 5).t(), torch._neg_view(torch.empty(0))):
        assert digest_tensor(zero) == digest_output(zero) == digest_tensor(torch.zeros(zero.shape))


def test_a_storage_that_is_freed_or_too_short_is_an_error_and_no_crash() -> None:
    for tensor in (torch.randn(1000), torch.randn(1000)[500:], torch.randn(40, 25).t(), torch.randn(100, 10)[:, ::3]):
        for num_bytes in (3995, 0):
            tensor.untyped_storage().resize_(num_bytes)
            for digest in (digest_tensor, digest_output, lambda freed: digest_tensors([torch.ones(1), freed])):
                with pytest.raises(DetCallbacksError, match=rf"\d+ bytes of storage and {num_bytes} are there"):
                    digest(tensor)


def test_what_is_no_tensor_is_refused() -> None:
    for digest in (digest_tensor, digest_output, lambda value: digest_tensors([value])):
        for value in (None, 1.0, [torch.ones(1)], b"bytes"):
            with pytest.raises(TypeError, match=f"not of a {type(value).__name__}"):
                digest(value)
