"""Hides the taking of digests from the program."""

from collections.abc import Iterator
from contextlib import contextmanager

from det_callbacks.internals.torch import below_autograd, without_dispatch, without_function_modes, without_transforms


@contextmanager
def unobserved() -> Iterator[None]:
    """Hide everything inside from torch-function modes, transforms, dispatch modes and autograd."""
    with without_function_modes(), without_transforms(), without_dispatch(), below_autograd():
        yield
