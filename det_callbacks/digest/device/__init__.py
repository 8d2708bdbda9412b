"""Digests of tensors on devices: asked for in the order of a device's work, known when it is waited for at the end."""

from det_callbacks.digest.device.deferred import Bits, DeferredBits, DeferredDigests, derived, value_of
from det_callbacks.digest.device.queue import DeviceDigest, DigestQueue, Span
from det_callbacks.digest.device.triton_digest import Choice, device_choice, disagreement

__all__ = [
    "Bits",
    "Choice",
    "DeferredBits",
    "DeferredDigests",
    "DeviceDigest",
    "DigestQueue",
    "Span",
    "derived",
    "device_choice",
    "disagreement",
    "value_of",
]
