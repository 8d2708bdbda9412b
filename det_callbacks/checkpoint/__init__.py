"""Digests beside checkpoints, and the files that an exact resume needs."""
