"""What chosen ops read and wrote, kept beside the digests, so that a verdict can say by how much it differs."""

from det_callbacks.kept.counts import KeptCounts, Shortage
from det_callbacks.kept.files import kept_path, read_shortage, shortages
from det_callbacks.kept.keeper import Keeper
from det_callbacks.kept.reading import KeptCall, KeptStep, KeptTensor

__all__ = [
    "Keeper",
    "KeptCall",
    "KeptCounts",
    "KeptStep",
    "KeptTensor",
    "Shortage",
    "kept_path",
    "read_shortage",
    "shortages",
]
