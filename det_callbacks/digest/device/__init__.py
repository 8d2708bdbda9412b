"""Digests of tensors on devices: asked for in the order of a device's work, known when it is waited for at the end."""
