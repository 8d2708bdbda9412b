"""Digests beside checkpoints, and what an exact resume needs."""
