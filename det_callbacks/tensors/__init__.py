"""Tensors of chosen ops, saved with each step: to be put back while verifying, or to say by how much they differ."""
