"""Tensor -> 64 bits."""
