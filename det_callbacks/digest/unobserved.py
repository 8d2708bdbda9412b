"""Taking digests without the program noticing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# torch-private, looked at in torch 2.13.0; its stubs leave some of them out
from torch._C import (
    DisableTorchFunction,
    _AutoDispatchBelowAutograd,
    _DisableFuncTorch,
    _DisableTorchDispatch,
)

from det_callbacks.errors import DetCallbacksError


@contextmanager
def unobserved() -> Iterator[None]:
    """Keep torch-function modes, transforms, dispatch modes and autograd from seeing what is done inside."""
    with DisableTorchFunction(), _DisableFuncTorch(), _DisableTorchDispatch(), _AutoDispatchBelowAutograd():
        yield


def require_no_capture() -> None:
    """Raise where the current stream of CUDA's current device is capturing; costs well below a microsecond.

    Raises:
        DetCallbacksError: then nothing may be allocated, copied or waited for, and a kernel would become part of the
            graph and read whatever is there at each replay.
    """
    # where CUDA has not begun nothing captures, and builds without it raise at the question
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise DetCallbacksError(
            "a digest was asked for while the current stream captures a CUDA graph, in which nothing may be allocated "
            "or waited for; the capture and all tensors are intact; take digests before or after the capture"
        )
