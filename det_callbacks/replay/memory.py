"""The bits of one strided tensor: copied out of its memory, and written into it.

Everything goes through an integer tensor laid over the same memory (``alias``). It has a version counter of its own, so
what autograd saved stays valid; it carries no conjugation or negation bit, no history and no inference flag. Integers,
since float8 and sub-byte dtypes have few ops, and since no NaN is touched.
"""

from collections.abc import Callable
from ctypes import memmove

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNS = {torch.uint8: 0x80, torch.int16: -(2**15), torch.int32: -(2**31), torch.int64: -(2**63)}
_PACKED = {torch.quint4x2: 2, torch.quint2x4: 4}
"""Elements that one byte of the memory holds, where ``element_size`` does not tell."""


def alias(tensor: Tensor) -> Tensor:
    """Return an integer tensor over the memory of a strided tensor, of its shape (complex128 has one dimension more).

    Must run inside ``digest.unobserved``, as everything here.
    """
    size, shape = tensor.element_size(), list(tensor.shape)
    stride, offset = list(tensor.stride()), tensor.storage_offset()
    if tensor.dtype in _PACKED:
        shape, stride = [-(-tensor.numel() // _PACKED[tensor.dtype])], [1]
    if size == 16:
        size, shape = 8, [*shape, 2]
        stride, offset = [*(2 * step for step in stride), 1], 2 * offset
    integers = torch.empty(0, dtype=_INTEGERS[size], device=tensor.device)
    return integers.set_(tensor.untyped_storage(), offset, shape, stride)


def read_bits(tensor: Tensor, fetch: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return a copy of a strided tensor's bytes on the host: uint8, row-major, conjugation and negation resolved.

    Args:
        tensor: any strided one with memory.
        fetch: returns a copy of a contiguous tensor on the host, perhaps to be read later only, as the result then is;
            by default it is made at once.
    """
    if fetch is None and _is_plain(tensor):
        bits = torch.empty(tensor.nbytes, dtype=torch.uint8)
        memmove(bits.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return bits
    integers = alias(tensor.clone() if torch._is_zerotensor(tensor) else tensor)
    if fetch is None:
        integers = integers.clone(memory_format=torch.contiguous_format).cpu()
    elif not integers.is_contiguous() or _is_lazy(tensor):
        integers = integers.clone(memory_format=torch.contiguous_format)
    integers = integers.reshape(-1)
    _resolve(integers, tensor)
    return (integers if fetch is None else fetch(integers)).view(torch.uint8)


def write_bits(tensor: Tensor, bits: Tensor, send: Callable[[Tensor, Tensor], None] | None = None) -> bool:
    """Write bytes as ``read_bits`` returns them into a tensor's memory.

    Args:
        tensor: any strided one.
        bits: on the host.
        send: writes a host tensor into another one, perhaps later; by default it is done at once.

    Returns:
        False, with nothing written, when they do not fit: several elements share a place (an expanded tensor) and the
        bytes hold different ones for it, or the tensor has no memory and the bytes are not its zeros. That is seen on
        the host, whatever the tensor's device.
    """
    if torch._is_zerotensor(tensor):
        return not bool(bits.any())
    if send is None and _is_plain(tensor) and bits.is_contiguous():
        memmove(tensor.data_ptr(), bits.data_ptr(), tensor.nbytes)
        return True
    integers = alias(tensor)
    values = bits.view(integers.dtype)
    if _is_lazy(tensor):
        values = values.clone()
        _resolve(values, tensor)  # both flip bits, so they are their own inverse
    values = values.reshape(integers.shape)
    if not integers.numel():
        return True
    write = _copy if send is None else send
    for dimension, (length, step) in enumerate(zip(integers.shape, integers.stride(), strict=True)):
        if length > 1 and not step:
            first = values.narrow(dimension, 0, 1)
            if not torch.equal(values, first.expand_as(values)):
                return False
            values, integers = first, integers.narrow(dimension, 0, 1)
    if not _may_overlap(integers):
        write(values, integers)
        return True
    places, index = _places(integers).unique(return_inverse=True)
    wanted = torch.empty(len(places), dtype=values.dtype, device=values.device)
    wanted[index] = values.reshape(-1)
    if not torch.equal(wanted[index], values.reshape(-1)):
        return False
    extent = 1 + sum((length - 1) * step for length, step in zip(integers.shape, integers.stride(), strict=True))
    flat = integers.as_strided((extent,), (1,), integers.storage_offset())
    if len(places) == extent:
        write(wanted, flat)
        return True
    there = torch.empty_like(places, device=integers.device)
    write(places, there)
    chosen = torch.empty_like(wanted, device=integers.device)
    write(wanted, chosen)
    flat.index_copy_(0, there, chosen)
    return True


def _copy(values: Tensor, target: Tensor) -> None:
    target.copy_(values)


def _places(integers: Tensor) -> Tensor:
    """Return where each element lies, row-major, from the first one's place on."""
    places = torch.zeros(integers.shape, dtype=torch.int64, device="cpu")
    for dimension, (length, step) in enumerate(zip(integers.shape, integers.stride(), strict=True)):
        shape = [1] * integers.dim()
        shape[dimension] = length
        places += (torch.arange(length, device="cpu") * step).reshape(shape)
    return places.reshape(-1)


def _is_lazy(tensor: Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's bytes lie on the host, row-major and in one piece.

    They are copied in one thread: torch's own copy waits for its thread pool, which on a busy machine took 8 ms for
    10 MiB where the copy itself takes 0.3.
    """
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.dtype not in _PACKED
        and not (_is_lazy(tensor) or torch._is_zerotensor(tensor))
    )


def _may_overlap(tensor: Tensor) -> bool:
    """Return whether two elements may share a place; true as well for some tangles of strides where none do."""
    extent = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if step < extent:
            return True
        extent += (length - 1) * step
    return False


def _resolve(integers: Tensor, tensor: Tensor) -> None:
    """Apply a tensor's lazy conjugation and negation to a flat copy of its memory, in place."""
    if not _is_lazy(tensor):
        return
    if not (tensor.is_complex() or tensor.is_floating_point()):
        integers.neg_()
        return
    is_pair = tensor.is_complex()
    numbers = integers.view(_INTEGERS[tensor.element_size() // 2]) if is_pair else integers
    sign = _SIGNS[numbers.dtype]
    if tensor.is_neg():
        numbers ^= sign
    if tensor.is_conj():
        numbers[1::2] ^= sign
