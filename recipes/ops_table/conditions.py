"""Runs one op of torch's operator database under several conditions,
and says on which of them its bits depend.
"""

import ctypes
import itertools
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

FILLS = (0x00, 0x7F, 0xFE)  # bytes of fresh memory; glibc cannot fill it with 0xff
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
# the side of larger samples: its cube is more than one thread takes by itself (32768 elements)
LARGE = 33
MAX_ELEMENTS = 1_000_000
MAX_SAMPLES = 5  # of each size
_M_PERTURB = -6  # glibc, malloc.h: allocated memory is filled with the complement of a byte

ERRORS = (
    RuntimeError,
    NotImplementedError,
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    AssertionError,
)

Sample = Any  # torch.testing._internal.opinfo.core.SampleInput


@contextmanager
def filled_host(byte: int) -> Iterator[None]:
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_PERTURB, byte ^ 0xFF) == 1
    try:
        yield
    finally:
        libc.mallopt(_M_PERTURB, 0)


@contextmanager
def filled_device(byte: int) -> Iterator[None]:
    """Fill what the caching allocator hands out next."""
    blocks = [
        torch.empty(size, dtype=torch.uint8, device="cuda").fill_(byte)
        for size in (1 << 10, 1 << 18, 1 << 24)
    ]
    del blocks
    yield


@contextmanager
def two_threads(filled: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    torch.set_num_threads(2)
    try:
        with filled(FILLS[0]):
            yield
    finally:
        torch.set_num_threads(1)


def shifted(tensor: Tensor) -> Tensor:
    """Return the same tensor in memory that begins one element after an aligned address."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_quantized:
        return tensor
    storage, size = tensor.untyped_storage(), tensor.element_size()
    if tensor.device.type == "cpu":
        memory = bytearray(storage.nbytes() + 64 + size)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        moved = torch.frombuffer(memory, dtype=torch.uint8, offset=-address % 64 + size)[
            : storage.nbytes()
        ]
        offset = tensor.storage_offset()
    else:
        moved = torch.empty(storage.nbytes() + size, dtype=torch.uint8, device=tensor.device)[size:]
        offset = tensor.storage_offset() + 1
    moved.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(moved.untyped_storage(), offset, tensor.shape, tensor.stride())


def copied(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    copy = tensor.untyped_storage().clone()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())


def bits(values: Any) -> list[bytes]:
    found = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            value = torch.empty(leaf.numel(), dtype=leaf.dtype).copy_(leaf.detach().reshape(-1))
            found.append(value.view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, Tensor):
            found += bits(leaf.detach().to_dense())
    return found


def outcome(
    op: Any, sample: Sample, move: Callable[[Tensor], Tensor]
) -> tuple[list[bytes], list[bytes]]:
    """Run an op and its backward pass; return the bits of the outputs and of the gradients."""
    given = (sample.input, sample.args, sample.kwargs)
    needs = [leaf.requires_grad for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    given = tree_map_only(Tensor, lambda tensor: move(tensor.detach()), given)
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    for tensor, need in zip(tensors, needs, strict=True):
        tensor.requires_grad_(need)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    first, args, kwargs = given
    outputs = op(first, *args, **kwargs)
    flat = [
        leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    inputs = [tensor for tensor in tensors if tensor.requires_grad]
    gradients: Any = ()
    if flat and inputs:
        ones = [torch.ones_like(one) for one in flat]
        gradients = torch.autograd.grad(flat, inputs, ones, allow_unused=True)
    return bits(outputs), bits([one for one in gradients if one is not None])


def samples_of(op: Any, device: str) -> Iterator[tuple[Sample, bool]]:
    """Yield samples, and whether they are larger than the database has them."""
    dtype = next(one for one in DTYPES if one in op.dtypes)
    needs_grad = op.supports_autograd and dtype.is_floating_point
    for is_large in (False, True):
        with sides(LARGE if is_large else None):
            torch.manual_seed(1)
            for sample in itertools.islice(
                op.sample_inputs(device, dtype, requires_grad=needs_grad), MAX_SAMPLES
            ):
                leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
                num_elements = sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
                if 1000 * is_large <= num_elements <= MAX_ELEMENTS:
                    yield sample, is_large
    yield from ((sample, True) for sample in _of_many_elements(op, device, dtype, needs_grad))


def _of_many_elements(
    op: Any, device: str, dtype: torch.dtype, needs_grad: bool
) -> Iterator[Sample]:
    """Yield one sample of many elements for ops whose own have shapes that cannot be changed."""
    from torch.testing._internal.opinfo import core

    if isinstance(op, core.ReductionOpInfo | core.UnaryUfuncInfo):
        low, high = getattr(op, "domain", (None, None))
        options: dict[str, Any] = {"low": low, "high": high, "requires_grad": needs_grad}
        yield core.SampleInput(
            torch.testing.make_tensor((64, 1024), device=device, dtype=dtype, **options)
        )


@contextmanager
def sides(length: int | None) -> Iterator[None]:
    """Give the samples that are made inside sides of another length;
    the modules of the database call it S, M and L.
    """
    modules = [
        module for name, module in sys.modules.items() if name.startswith("torch.testing._internal")
    ]
    before = [
        (module, name, vars(module)[name])
        for module in modules
        for name in "SML"
        if name in vars(module)
    ]
    try:
        for module, name, value in before:
            setattr(module, name, length or value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def examine(op: Any, device: str) -> dict[str, Any]:
    """Return which conditions change the bits of an op, forward or backward,
    and how many samples could be run.
    """
    found: dict[str, set[str]] = {}
    num_samples, problem = 0, ""
    try:
        for sample, is_large in samples_of(op, device):
            try:
                for name, part in differing(op, sample, device, is_large=is_large):
                    found.setdefault(name, set()).add(part)
                num_samples += 1
            except ERRORS as error:  # what this build, or the op without arguments, cannot run
                problem = _said(error)
    except (*ERRORS, StopIteration) as error:  # the database makes none for this device
        problem = _said(error)
    return {
        "samples": num_samples,
        "problem": problem,
        "found": {name: sorted(parts) for name, parts in found.items()},
    }


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:120]


def differing(op: Any, sample: Sample, device: str, *, is_large: bool) -> Iterator[tuple[str, str]]:
    """Yield each condition under which a sample has other bits, with "forward" or "backward"."""
    filled = filled_device if device == "cuda" else filled_host

    def run(around: AbstractContextManager[None], move: Callable[[Tensor], Tensor] = copied) -> Any:
        with around:
            return outcome(op, sample, move)

    torch.set_num_threads(1)
    base = run(filled(FILLS[0]))
    runs = [("run", base, run(filled(FILLS[0]))) for _ in range(10 if device == "cuda" else 1)]
    runs += [("memory", base, run(filled(byte))) for byte in FILLS[1:] if not is_large]
    runs += [("alignment", base, run(filled(FILLS[0]), shifted))]
    if device == "cpu":
        of_two = run(two_threads(filled))
        runs += [("threads", base, of_two)]
        runs += [("run with two threads", of_two, run(two_threads(filled))) for _ in range(2)]
    for name, one, other in runs:
        for part, left, right in zip(("forward", "backward"), one, other, strict=True):
            if left != right:
                yield name, part


def limit_time(seconds: int) -> None:
    """End this process if it takes longer."""
    signal.alarm(seconds)
