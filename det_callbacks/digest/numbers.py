"""By how much two tensors of torch differ."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from det_callbacks.digest.unobserved import unobserved
from det_callbacks.numbers import tensor_numbers as numbers_of_bytes
from det_callbacks.verdict import TensorNumbers

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_numbers(label: TensorNumbers, reference: Tensor, current: Tensor) -> TensorNumbers:
    """Return by how much a tensor differs from the reference's; see ``det_callbacks.numbers``.

    Tensors on a device come to the host for it: ask first whether they differ.

    Args:
        label: what the tensor is; the rest of it is filled in.
        reference: an ordinary strided tensor.
        current: one of the same shape and dtype.

    Raises:
        ValueError: shapes or dtypes differ, or a tensor is not an ordinary strided one.

    Example:
        >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002384185791])
        >>> found = tensor_numbers(TensorNumbers(tensor="output 0"), one, other)
        >>> found.num_differing, found.max_ulps
        (1, 1)
    """
    if reference.shape != current.shape or reference.dtype != current.dtype:
        raise ValueError(
            f"{reference.dtype} {tuple(reference.shape)} and {current.dtype} {tuple(current.shape)} have no elements "
            "in common; compare tensors of one dtype and shape"
        )
    for tensor in (reference, current):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise ValueError("only ordinary strided tensors have numbers; compare what this one is made of")
    label = replace(label, shape=tuple(reference.shape), dtype=str(reference.dtype).removeprefix("torch."))
    with unobserved():
        return numbers_of_bytes(label, _bytes(reference), _bytes(current))


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor's elements, row-major; not a copy where they lie like that on the host."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    words = tensor.view(_WORDS[tensor.element_size()]).cpu().numpy()
    return np.ascontiguousarray(words).reshape(-1).view(np.uint8)
