"""The tensors of a batch as named sites, and digests of its samples that ignore their order."""

import struct
from collections.abc import Sequence
from ctypes import string_at
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from det_callbacks.digest.deferred import Bits, derived
from det_callbacks.digest.host import digest_bytes, digest_rows
from det_callbacks.internals.torch import without_dispatch
from det_callbacks.runs.program import UNREAD
from det_callbacks.trace.components import has_parts, holds_data
from det_callbacks.trace.deferred_sites import DeferredSites
from det_callbacks.trace.leaves import Entry, is_constant, leaves
from det_callbacks.trace.named_sites import Derived, DerivedEntry, NamedSites
from det_callbacks.trace.sites import SpecialName
from det_callbacks.trace.step import Step

MAX_SAMPLES = 1024  # samples of larger batches are not digested individually
MAX_SKETCHED = 8  # digests in a sketch; ``compare.evidence`` searches fewer of them

_DTYPES_OF_ARRAYS = frozenset(
    [
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    ]
)
_WORD_SIZES = (1, 2, 4, 8)  # bytes


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a batch tensor (dimension 0), independent of their order.

    The sketch, the 8 smallest digests of samples, identifies batches of the same data in a
    different order (bottom-k, Cohen and Kaplan 2007). Samples of 8 bytes or less
    have none, since they repeat.
    """

    digest: int
    sketch: tuple[int, ...]
    num_bytes: int  # of one sample


def record_batch(
    step: Step, named: NamedSites, batch: Any, samples: list[Samples], name_of_batch: str = "batch"
) -> None:
    """Record the tensors of a batch (phase data), each of 2 to 1,024 samples with an
    order-independent digest of these.

    Opaque objects are recorded by their type. Appends to ``samples`` those of each tensor; of a
    tensor on a device only when the step is settled, and never if they have 1, 2, 4 or 8 bytes,
    since they have no sketch.
    """
    entries: list[Entry | DerivedEntry] = []
    unread: dict[str, str] = {}
    for name, leaf in leaves(batch, name_of_batch, is_whole=True):
        value = tensor_of_array(leaf) if type(leaf) is np.ndarray else leaf
        if issubclass(type(value), Tensor | int | float):
            entries.append((name, value))
            if _has_samples(value):
                bits = _digest_samples(step.deferred, value, samples)
                if value.shape[0] > 1:
                    entries.append((SpecialName("samples", name), Derived(bits, step.layouts.none)))
        elif not is_constant(value):
            unread.setdefault(f"{type(value).__module__}.{type(value).__qualname__}", name)
    for kind, name in unread.items():
        entries.append((name, Derived(0, step.layouts.special(kind, (), UNREAD))))
        step.counts.opaque.add(f"{name} ({kind})")
    named.record_group("batch", "data", entries, owner="", is_writer=True)


def tensor_of_array(array: np.ndarray) -> Any:
    """Return the tensor that shares the memory of a NumPy array, or a copy;
    the array if torch lacks its dtype.
    """
    if array.dtype.name not in _DTYPES_OF_ARRAYS or not array.dtype.isnative:
        return array
    # as torch needs them
    are_whole = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    is_shared = array.flags.writeable and are_whole
    return torch.from_numpy(array if is_shared else array.copy())


def _has_samples(value: Any) -> TypeGuard[Tensor]:
    """Return whether the rows of a tensor are digested one by one."""
    if (
        not isinstance(value, Tensor)
        or has_parts(value)
        or not holds_data(value)
        or value.is_quantized
    ):
        return False
    # nested tensors of the older layout have no sizes
    return (
        not value.is_nested
        and value.numel() > 0
        and value.dim() > 0
        and value.shape[0] <= MAX_SAMPLES
    )


def _digest_samples(deferred: DeferredSites, tensor: Tensor, samples: list[Samples]) -> Bits:
    """Return the digest of a tensor's samples, and append them to ``samples`` as ``record_batch``
    does.
    """
    if not deferred.is_deferred(tensor):
        samples.append(samples_of(tensor))
        return samples[-1].digest
    size = tensor.numel() // tensor.shape[0] * tensor.itemsize
    if size in _WORD_SIZES:
        copy = deferred.fetch(tensor)
        return derived((), lambda _: samples_of(copy).digest)
    rows = deferred.digest_rows(tensor)
    deferred.when_known(rows, lambda digests: samples.append(_of_digests(digests, size)))
    return derived(rows, lambda digests: _of_digests(digests, size).digest)


def samples_of(tensor: Tensor) -> Samples:
    """Return the samples of a strided tensor.

    The digest covers the sorted digests of the samples, or the sorted samples if
    they have 1, 2, 4 or 8 bytes.
    """
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        with without_dispatch(), torch.no_grad():
            tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    num_samples, address = tensor.shape[0], tensor.data_ptr()
    size = tensor.numel() // num_samples * tensor.itemsize
    if size not in _WORD_SIZES:
        return _of_digests(digest_rows(address, num_samples, size), size)
    words = np.sort(np.frombuffer(string_at(address, num_samples * size), dtype=f"<u{size}"))
    return Samples(digest_bytes(words.tobytes()), (), size)


def _of_digests(digests: Sequence[int], size: int) -> Samples:
    digests = sorted(digests)
    sketch = tuple(digests[:MAX_SKETCHED]) if size > max(_WORD_SIZES) else ()
    return Samples(digest_bytes(struct.pack(f"<{len(digests)}Q", *digests)), sketch, size)
