"""Checkpoint digests, and the files that an exact resume needs."""
