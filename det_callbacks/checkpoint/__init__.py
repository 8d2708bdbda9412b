"""Digests beside checkpoints, and what an exact resume needs."""

from det_callbacks.checkpoint.check import CheckpointReport, EntryDifference, check_checkpoint

__all__ = ["CheckpointReport", "EntryDifference", "check_checkpoint"]
