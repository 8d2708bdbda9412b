"""Digests of tensors on devices."""
