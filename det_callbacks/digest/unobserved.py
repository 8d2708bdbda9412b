"""Hides the taking of digests from the program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from det_callbacks.internals import dynamo
from det_callbacks.internals.torch import (
    below_autograd,
    jit_tracer,
    set_jit_tracer,
    without_dispatch,
    without_function_modes,
    without_transforms,
)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@contextmanager
def unobserved() -> Iterator[None]:
    """Hide everything inside from torch-function modes, transforms, dispatch modes and autograd."""
    with without_function_modes(), without_transforms(), without_dispatch(), below_autograd():
        yield


def hidden(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Hide a function of ours, which reads tensors, from torch functions and from
    ``torch.jit.trace``.
    """

    def ours(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        tracer = jit_tracer()
        with without_function_modes():
            if tracer is None:
                return function(*args, **kwargs)
            set_jit_tracer(None)
            try:
                return function(*args, **kwargs)
            finally:
                set_jit_tracer(tracer)

    dynamo.skip(ours.__code__)
    return wraps(function)(ours)
