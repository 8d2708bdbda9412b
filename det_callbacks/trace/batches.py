"""The batch that a step trains on, and its samples whatever their order."""

import struct
from ctypes import string_at
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from det_callbacks.digest import digest_bytes, digest_rows
from det_callbacks.trace.components import has_parts, holds_data
from det_callbacks.trace.named import flatten, record_bits, record_group
from det_callbacks.trace.recorder import Recorder

MAX_SAMPLES = 1024
"""Samples of a batch up to which they are also digested one by one, to tell their order from their content."""

MAX_SKETCHED = 8
"""Samples that a sketch keeps."""

_WORDS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a batch tensor (dimension 0) without their order.

    Attributes:
        digest: does not depend on their order.
        sketch: the 8 smallest digests of samples, ascending; () for samples of 8 bytes or less, which repeat. A sample
            with a small digest is in the sketch of nearly every batch that it is in (bottom-k sketch, Cohen and Kaplan
            2007), so that a batch of another order of the same data is found without keeping all of it.
        num_bytes: of a sample.
    """

    digest: int
    sketch: tuple[int, ...]
    num_bytes: int


def record_batch(recorder: Recorder, batch: Any) -> tuple[int, ...]:
    """Record the tensors of a batch (phase data), each followed by the order-free digest of its samples.

    Returns:
        The sketch of the tensor with the largest samples; () where there is none.
    """
    largest = Samples(digest=0, sketch=(), num_bytes=0)
    for name, tensor in flatten(batch, "batch"):
        record_group(recorder, "batch", "data", [(name, tensor)], owner="", is_source=True)
        if not isinstance(tensor, Tensor) or not holds_data(tensor) or tensor.is_nested or not tensor.dim():
            continue  # nested ones of torch's older layout have no sizes to ask for
        if 1 <= tensor.shape[0] <= MAX_SAMPLES:
            samples = samples_of(tensor)
            if samples is None:
                continue
            if tensor.shape[0] > 1:
                record_bits(recorder, "samples", "data", name, samples.digest, role="samples")
            if samples.sketch and samples.num_bytes > largest.num_bytes:
                largest = samples
    return largest.sketch


def samples_of(tensor: Tensor) -> Samples | None:
    """Return the samples of a batch tensor, whatever their order.

    The digest is that of the sorted digests of the samples' bytes; of the sorted samples themselves where they have 1,
    2, 4 or 8 bytes, as labels do. None for tensors whose samples are not bytes in a row (sparse, quantised, sub-byte).
    Costs 0.2 microseconds a sample besides the digests.
    """
    if has_parts(tensor) or tensor.is_quantized or not tensor.numel():
        return None
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    samples = tensor.shape[0]
    address = tensor.data_ptr()
    size = tensor.numel() // samples * tensor.itemsize
    if size in _WORDS:
        words = np.frombuffer(string_at(address, samples * size), dtype=_WORDS[size])
        return Samples(digest_bytes(np.sort(words).tobytes()), (), size)
    digests = sorted(digest_rows(address, samples, size))
    sketch = tuple(digests[:MAX_SKETCHED]) if size > max(_WORDS) else ()
    return Samples(digest_bytes(struct.pack(f"<{samples}Q", *digests)), sketch, size)
