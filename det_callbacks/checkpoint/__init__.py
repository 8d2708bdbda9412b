"""Digests that travel with checkpoints."""

from det_callbacks.checkpoint.check import CheckpointReport, check_checkpoint
from det_callbacks.checkpoint.difference import EntryDifference
from det_callbacks.checkpoint.sidecar import SaveContext, Sidecar

__all__ = ["CheckpointReport", "EntryDifference", "SaveContext", "Sidecar", "check_checkpoint"]
