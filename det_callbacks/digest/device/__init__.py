"""Digests of tensors on devices: asked for in the order of a device's work, known when it is waited for at the end."""

from det_callbacks.digest.device.late import Bits, LateBits, LateDigests, derived, value_of
from det_callbacks.digest.device.queue import DeviceDigest, DigestQueue, Span
from det_callbacks.digest.device.triton_digest import Choice, device_choice, disagreement

__all__ = [
    "Bits",
    "Choice",
    "DeviceDigest",
    "DigestQueue",
    "LateBits",
    "LateDigests",
    "Span",
    "derived",
    "device_choice",
    "disagreement",
    "value_of",
]
