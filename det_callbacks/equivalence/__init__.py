"""Every op run again, and compared bit for bit."""

from det_callbacks.equivalence.mode import BitwiseEquivalenceMode

__all__ = ["BitwiseEquivalenceMode"]
