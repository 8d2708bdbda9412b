"""Taking digests without the program noticing."""

from collections.abc import Iterator
from contextlib import contextmanager

# torch-private, looked at in torch 2.13.0
from torch._C import DisableTorchFunction, _AutoDispatchBelowAutograd, _DisableFuncTorch, _DisableTorchDispatch


@contextmanager
def unobserved() -> Iterator[None]:
    """Keep torch-function modes, transforms, dispatch modes and autograd from seeing what is done inside."""
    with DisableTorchFunction(), _DisableFuncTorch(), _DisableTorchDispatch(), _AutoDispatchBelowAutograd():
        yield
