"""Digests of plain tensors: every dtype, every way to lie in memory, and what a change does to them."""

import digest_reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from det_callbacks.digest import components, digest_bytes, digest_output, digest_tensor, digest_tensors
from det_callbacks.errors import DetCallbacksError

# torch says this once per process when a complex32 tensor is made, digested or not.
# every dtype is digested, those that torch calls experimental too
pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental:UserWarning"
)  # torch says so of the dtype

QUANTISED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTISED, key=str)
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def make(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a contiguous tensor of random bits (a bool's bytes are 0 or 1)."""
    numel = torch.Size(shape).numel()
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=torch.manual_seed(seed))
    return raw.view(dtype).reshape(shape)


def stored_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes in row-major order, element by element, without any code of the package."""
    integers = tensor.detach().view(SAME_SIZE[tensor.element_size()])
    return b"".join(integers[tuple(index)].numpy().tobytes() for index in np.ndindex(*tensor.shape))


@dtypes
def test_every_dtype_is_its_stored_bytes(dtype: torch.dtype) -> None:
    tensor = make(dtype, 6, 5)
    expected = digest_reference.digest(stored_bytes(tensor))
    assert digest_tensor(tensor) == digest_output(tensor) == expected
    assert digest_tensors([tensor]) == [expected]


@dtypes
def test_every_dtype_in_any_strides_is_its_row_major_bytes(dtype: torch.dtype) -> None:
    base = make(dtype, 6, 10)
    for view in (base.t(), base[:, ::2], base[1:, 3:], base[:1].expand(4, 10), base[2], base.t()[3:, ::2]):
        expected = digest_reference.digest(stored_bytes(view))
        assert digest_tensor(view) == expected
        assert digest_tensors([view, view]) == [expected] * 2


@dtypes
def test_every_dtype_0_d_and_empty(dtype: torch.dtype) -> None:
    scalar = make(dtype, 3)[1]
    assert scalar.dim() == 0
    assert digest_tensor(scalar) == digest_output(scalar) == digest_reference.digest(stored_bytes(scalar))
    for empty in (make(dtype, 0), make(dtype, 3, 0, 2), make(dtype, 4, 4)[:, 4:], make(dtype, 2, 0).t()):
        assert digest_tensor(empty) == digest_output(empty) == digest_bytes(b"")
        negated = torch._neg_view(empty) if dtype.is_complex or dtype is torch.float32 else empty
        assert digest_tensor(negated) == digest_output(negated) == digest_bytes(b"")


def test_a_quantised_dtype_is_not_forgotten() -> None:
    assert {
        dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "q" in str(dtype)
    } == QUANTISED


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negative_views_are_what_they_mean(dtype: torch.dtype) -> None:
    tensor = torch.complex(torch.arange(6.0), torch.arange(1.0, 7.0)).to(dtype).reshape(2, 3)
    conjugate = tensor.conj()
    assert conjugate.is_conj()
    resolved = conjugate.resolve_conj()
    assert digest_tensor(conjugate) == digest_output(conjugate) == digest_tensor(resolved) != digest_tensor(tensor)
    assert digest_tensor(conjugate.t()) == digest_tensor(resolved.t().contiguous())
    assert digest_output(conjugate.t()) == digest_tensor(resolved)
    negative = conjugate.imag
    assert negative.is_neg()
    assert digest_tensor(negative) == digest_tensor((-tensor.imag).contiguous()) != digest_tensor(tensor.imag)
    contiguous = torch._neg_view(torch.arange(1.0, 7.0))
    assert contiguous.is_neg()
    assert digest_tensor(contiguous) == digest_output(contiguous) == digest_tensor(-torch.arange(1.0, 7.0))
    both = torch._neg_view(conjugate)
    assert both.is_conj()
    assert both.is_neg()
    expected = digest_tensor(torch.complex(-tensor.real.float(), tensor.imag.float()).to(dtype))
    assert digest_tensor(both) == digest_output(both) == expected
    assert digest_output(both.t()) == expected


def test_outputs_are_read_in_memory_order_where_they_are_dense() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    for order in ((0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 2, 3)):
        permuted = tensor.permute(order)
        assert digest_output(permuted) == digest_tensor(tensor)
        assert digest_tensor(permuted) == digest_tensor(permuted.contiguous()) != digest_tensor(tensor)
    channels_last = tensor.to(memory_format=torch.channels_last)
    assert digest_output(channels_last) == digest_tensor(channels_last.permute(0, 2, 3, 1))
    memory = torch.randn(12)
    size_of_one = memory.as_strided((3, 1, 4), (1, 99, 3))
    assert digest_output(size_of_one) == digest_tensor(memory) != digest_tensor(size_of_one)


def test_what_lies_in_order_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "_digest", lambda tensor, memory_order: pytest.fail("took the way of copies"))
    tensor = torch.randn(2, 3, 4, 5)
    for plain in (tensor, tensor[1], torch.nn.Parameter(tensor), torch.tensor(1.0), torch.empty(0, 3)):
        digest_tensor(plain)
        digest_output(plain)
        digest_tensors([plain])
    for dense in (tensor.permute(3, 0, 2, 1), tensor[1].mT):
        digest_output(dense)


def test_outputs_with_gaps_or_overlaps_are_read_in_row_major_order() -> None:
    tensor = torch.randn(6, 10)
    for view in (tensor[:, ::2], tensor.t()[::2], tensor[:1].expand(4, 10), tensor.as_strided((3, 3), (1, 1))):
        assert digest_output(view) == digest_tensor(view.contiguous())


def test_parameters_leaves_and_inference_tensors_are_their_data() -> None:
    data = torch.randn(3, 4)
    expected = digest_tensor(data)
    with torch.inference_mode():
        inference = data.clone()
        transposed = data.t().clone(memory_format=torch.contiguous_format)
    leaf = data.clone().requires_grad_()
    for tensor in (torch.nn.Parameter(data), torch.nn.Buffer(data), leaf, leaf * 1, inference, transposed.t()):
        assert digest_tensor(tensor) == expected
    with torch.inference_mode():
        assert digest_tensor(leaf.t()) == digest_tensor(data.t())


def test_a_copy_on_write_tensor_is_read_without_being_copied() -> None:
    tensor = torch.randn(4)
    lazy = torch._lazy_clone(tensor)
    assert digest_tensor(lazy) == digest_tensor(tensor)
    assert torch._C._is_cow_tensor(lazy)


def test_a_zero_tensor_without_memory_is_zeros() -> None:
    zeros = torch._efficientzerotensor(5)
    for tensor in (zeros, zeros[1:], torch._efficientzerotensor(4, 5).t()):
        assert torch._is_zerotensor(tensor)
        assert digest_tensor(tensor) == digest_output(tensor) == digest_tensor(torch.zeros(tensor.shape))


def test_a_freed_storage_is_an_error_and_no_crash() -> None:
    for tensor in (torch.randn(1000), torch.randn(1000)[500:], torch.randn(40, 25).t(), torch.randn(1000)[::2]):
        tensor.untyped_storage().resize_(0)
        for digest in (digest_tensor, digest_output, lambda freed: digest_tensors([torch.ones(1), freed])):
            with pytest.raises(DetCallbacksError, match=r"\d+ bytes of storage and 0 are there"):
                digest(tensor)


def test_a_storage_that_is_too_short_is_an_error_and_no_crash() -> None:
    tensor = torch.randn(1000)
    tensor.untyped_storage().resize_(3999)
    with pytest.raises(DetCallbacksError, match="needs 4000 bytes of storage and 3999 are there"):
        digest_tensor(tensor)
    strided = torch.randn(100, 10)[:, ::3]
    strided.untyped_storage().resize_(3999)
    with pytest.raises(DetCallbacksError, match="needs 4000 bytes of storage and 3999 are there"):
        digest_output(strided)
    strided.untyped_storage().resize_(4000)
    digest_output(strided)


def test_many_tensors_have_the_digests_that_they_have_alone() -> None:
    sizes = [3, 0, 5_000_000, 1, 256 * 1024, 2_000_000]
    tensors = [make(torch.float32, size, seed=size) for size in sizes]
    tensors += [make(torch.bfloat16, 300, 200).t(), torch.eye(4).to_sparse(), torch.randn(4).conj(), tensors[0]]
    assert digest_tensors(tensors) == [digest_tensor(tensor) for tensor in tensors]
    assert digest_tensors([]) == []


def test_what_is_no_tensor_is_refused() -> None:
    for digest in (digest_tensor, digest_output, lambda value: digest_tensors([value])):
        for value in (None, 1.0, [torch.ones(1)], b"bytes"):
            with pytest.raises(TypeError, match=f"not of a {type(value).__name__}"):
                digest(value)


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([dtype for dtype in DTYPES if dtype is not torch.bool]), shapes, st.data())
def test_any_changed_bit_of_any_dtype_is_seen(dtype: torch.dtype, shape: tuple[int, ...], data: st.DataObject) -> None:
    tensor = make(dtype, *shape)
    before = digest_tensor(tensor)
    raw = tensor.view(-1).view(torch.uint8)
    position, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
    raw[position] ^= 1 << bit
    assert digest_tensor(tensor) != before


@settings(max_examples=100, deadline=None)
@given(shapes, st.data())
def test_strides_play_no_part_in_the_digest_of_a_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    stored = tuple(data.draw(st.permutations(range(len(shape)))))
    steps = [data.draw(st.integers(1, 3)) for _ in shape]
    tensor = make(torch.float32, *shape)
    inflated = torch.zeros([size * step for size, step in zip(shape, steps, strict=True)])
    window = tuple(slice(None, None, step) for step in steps)
    inflated[window] = tensor
    restored = inflated.permute(stored).contiguous().permute([stored.index(axis) for axis in range(len(shape))])[window]
    assert digest_tensor(restored) == digest_tensor(tensor)
    assert digest_bytes(tensor.numpy()) == digest_tensor(tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_digest_means_the_same_on_the_device() -> None:
    views = (lambda t: t, lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[:1].expand(4, 10), lambda t: t[0, 0])
    for dtype in DTYPES:
        base = make(dtype, 6, 10)
        for view in views:
            assert digest_tensor(view(base.cuda())) == digest_tensor(view(base))
            assert digest_output(view(base.cuda())) == digest_output(view(base))
