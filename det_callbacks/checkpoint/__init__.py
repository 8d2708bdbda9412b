"""Digests that travel with checkpoints."""

from det_callbacks.checkpoint.check import CheckpointReport, EntryDifference, check_checkpoint
from det_callbacks.checkpoint.sidecar import SaveContext, Sidecar

__all__ = ["CheckpointReport", "EntryDifference", "SaveContext", "Sidecar", "check_checkpoint"]
