"""Which way the digests of tensors on a device are computed: where they are, or on the host."""

import functools
from dataclasses import dataclass
from subprocess import SubprocessError
from typing import Any

import torch

from det_callbacks.digest.device.copied import CopiedDigest
from det_callbacks.digest.device.queue import DeviceDigest
from det_callbacks.digest.device.triton_digest import TritonDigest
from det_callbacks.host_digest import BLOCK_BYTES, LEAF_BYTES, digest_bytes

QUEUED_DEVICES = frozenset({"cuda", "mps", "xpu"})
"""Devices whose tensors are strided memory of their own; others may have no memory to show."""

# What an attempt to use a device's compiler or ops may end with; memory errors of the device are RuntimeErrors. Looked
# at in Triton 3.7.1: a missing libcuda.so.1 is an AssertionError; another Triton may lack a name.
_FAILURES = (AssertionError, AttributeError, ImportError, OSError, RuntimeError, SubprocessError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a device's tensors are digested, and why not in a faster way.

    Attributes:
        method: of the queue; None where each tensor is copied to the host when its digest is asked for.
        reasons: why each faster way is not taken, fastest first.
    """

    method: DeviceDigest[Any] | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        name = "a copy to the host" if self.method is None else self.method.name
        return "; ".join((name, *self.reasons))


@functools.cache
def device_choice(device: torch.device) -> Choice:
    """Return how tensors on a device are digested, found out when it is first asked for and kept.

    Triton's kernels on CUDA, else copies in the order of the device's work. What is chosen has first given the host's
    bits for a few hundred KiB on that device; what failed is in the reasons. With Triton the first call compiles for
    some seconds, unless Triton has them in its cache.

    Args:
        device: with its index.
    """
    if device.type not in QUEUED_DEVICES:
        return Choice(method=None, reasons=())
    reasons = []
    if device.type == "cuda":
        method, reason = _try_triton(device)
        if method is not None:
            return Choice(method=method, reasons=())
        reasons.append(f"no Triton: {reason}")
    copied = CopiedDigest(device)
    try:
        trial = disagreement(copied, device)
    except _FAILURES as error:
        trial = f"{type(error).__name__}: {error}"
    if trial is None:
        return Choice(method=copied, reasons=tuple(reasons))
    return Choice(method=None, reasons=(*reasons, f"no {copied.name} together: {trial}"))


def _try_triton(device: torch.device) -> tuple[TritonDigest | None, str]:
    try:
        import det_callbacks.digest.device.triton_kernels as kernels
    except _FAILURES as error:
        return None, f"{type(error).__name__}: {error}"
    if kernels.IS_INTERPRETED:
        return None, "TRITON_INTERPRET is set, and Triton's interpreter would read the device's memory on the host"
    try:
        method = TritonDigest(kernels, device)
        reason = disagreement(method, device)
    except (*_FAILURES, kernels.TritonError) as error:
        return None, f"{type(error).__name__}: {error}"
    return (method, "") if reason is None else (None, reason)


def disagreement(method: DeviceDigest[Any], device: torch.device) -> str | None:
    """Return in what a method does not give the host's bits, None where it does.

    Raises:
        RuntimeError: or another error of the device, its compiler or its ops.
    """
    length = LEAF_BYTES + BLOCK_BYTES + 5
    # the top byte of multiples of 2**32 divided by the golden ratio: no two words are alike
    content = (torch.arange(length + 3, dtype=torch.int64, device="cpu") * 2654435761 >> 24).to(torch.uint8)
    there = content.to(device)
    parts = [slice(0, length), slice(3, 3 + length), slice(1, 6), slice(8, 8 + BLOCK_BYTES), slice(0, 0)]
    spans = [(there.untyped_storage(), part.start, part.stop - part.start) for part in parts]
    given = method.collect([method.launch(spans, method.stream())])
    expected = [digest_bytes(content[part].numpy().tobytes()) for part in parts]
    for part, one, other in zip(parts, expected, given, strict=True):
        if one != other:
            return f"{method.name} gave other bits than the host for {part.stop - part.start} bytes at {part.start}"
    return None
