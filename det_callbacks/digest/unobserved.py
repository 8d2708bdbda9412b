"""Taking digests without the program noticing."""

from collections.abc import Iterator
from contextlib import contextmanager

from det_callbacks.internals.torch import below_autograd, without_dispatch, without_function_modes, without_transforms


@contextmanager
def unobserved() -> Iterator[None]:
    """Keep torch-function modes, transforms, dispatch modes and autograd from seeing what is done inside."""
    with without_function_modes(), without_transforms(), without_dispatch(), below_autograd():
        yield
