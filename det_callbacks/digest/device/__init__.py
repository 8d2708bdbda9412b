"""Digests of tensors on devices: asked for in the order of a device's work, known when it is waited for at the end."""

from det_callbacks.digest.device.choice import Choice, device_choice, disagreement
from det_callbacks.digest.device.late import Bits, Derived, LateBits, LateDigests, value_of
from det_callbacks.digest.device.queue import DeviceDigest, DigestQueue, Span

__all__ = [
    "Bits",
    "Choice",
    "Derived",
    "DeviceDigest",
    "DigestQueue",
    "LateBits",
    "LateDigests",
    "Span",
    "device_choice",
    "disagreement",
    "value_of",
]
