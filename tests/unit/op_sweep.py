"""Runs ops twice on the same inputs with other bytes in fresh memory,
and notes what their schema does not tell.

An output that differs between the two calls is made of memory that nobody wrote; an argument whose
bytes differ after a call was written.

As a program it sweeps the samples of torch's own operator database,
and prints what it found as one line of JSON.
"""

import ctypes
import itertools
import json
import sys
import types
import unittest
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from op_programs import total_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from det_callbacks.trace.components import has_parts, parts_of
from det_callbacks.trace.overloads import (
    OPAQUE_WRITES,
    OpKind,
    OpPlan,
    make_plan,
    written_arguments,
)

# glibc, malloc.h: allocated memory is filled with the complement of a byte,
# freed memory with the byte
_M_PERTURB = -6
_LIBC = ctypes.CDLL(None)


@contextmanager
def dirty_memory(pattern: int) -> Iterator[None]:
    assert _LIBC.mallopt(_M_PERTURB, pattern) == 1
    for size in (16, 64, 256, 1024):
        junk = [torch.empty(size, dtype=torch.uint8).fill_(pattern) for _ in range(4)]
        del junk
    try:
        yield
    finally:
        _LIBC.mallopt(_M_PERTURB, 0)


def bytes_of(tensor: Tensor) -> bytes:
    if has_parts(tensor):
        return b"".join(bytes_of(part) for part in parts_of(tensor))
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def copy_of(tensor: Tensor) -> Tensor:
    if torch._is_zerotensor(tensor):
        return tensor  # has no memory
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return tensor.detach().clone()
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


class SweepMode(TorchDispatchMode):
    """Checks each op that passes.

    ``faults`` are (op, what the tables and schemas do not tell): an output that differs, an
    argument that is written, "draws", "copies" of what is taken for a view,
    and "aliases" of what is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checked: set[str] = set()
        # op and index of a returned tensor, declared opaque or not
        self.differing: set[tuple[str, int]] = set()
        self.written: set[tuple[str, str]] = set()  # op and argument, declared or not
        self.drawing: set[str] = set()
        self.faults: set[tuple[str, int | str]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        plan = make_plan(func)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if plan.kind in (OpKind.DIGEST, OpKind.VIEW) and all(
            tensor.device.type == "cpu" for tensor in tensors
        ):
            self._check(func, plan, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, plan: OpPlan, args: Any, kwargs: Any) -> None:
        generator = torch.get_rng_state()
        runs = []
        for pattern in (0x5A, 0x21):
            torch.set_rng_state(generator)
            copied = tree_map_only(Tensor, copy_of, (args, kwargs))
            with dirty_memory(pattern):
                returned = func(*copied[0], **copied[1])
            self._check_writes(plan, (args, kwargs), copied)
            self._check_memory(plan, copied, returned)
            if not torch.equal(torch.get_rng_state(), generator):
                self.drawing.add(plan.base)
                if not plan.draws_random:
                    self.faults.add((plan.base, "draws"))
            runs.append(list(returned) if isinstance(returned, list | tuple) else [returned])
        torch.set_rng_state(generator)
        self.checked.add(plan.base)
        for index, (one, other) in enumerate(zip(*runs, strict=True)):
            pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
            if any(
                isinstance(left, Tensor) and bytes_of(left) != bytes_of(right)
                for left, right in pairs
            ):
                self.differing.add((plan.base, index))
                if index not in plan.opaque_outputs:
                    self.faults.add((plan.base, index))

    def _check_writes(self, plan: OpPlan, before: Any, after: Any) -> None:
        declared = {id(tensor) for tensor in written_arguments(plan, *after)}
        named = [*zip(plan.argument_names, zip(before[0], after[0], strict=True), strict=False)]
        named += [(name, (before[1][name], after[1][name])) for name in after[1]]
        for name, (one, other) in named:
            for left, right in zip(tree_leaves(one), tree_leaves(other), strict=True):
                if isinstance(left, Tensor) and bytes_of(left) != bytes_of(right):
                    self.written.add((plan.base, name))
                    if id(right) not in declared and name not in OPAQUE_WRITES.get(plan.base, ()):
                        self.faults.add((plan.base, name))

    def _check_memory(self, plan: OpPlan, arguments: Any, returned: Any) -> None:
        read = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if not all(map(_has_memory, read)):
            return
        memory = {address for tensor in read if (address := tensor.untyped_storage().data_ptr())}
        values = (
            list(returned)
            if isinstance(returned, list | tuple) and not plan.returns_one
            else [returned]
        )
        for index, value in enumerate(values):
            for tensor in tree_leaves(value):
                if not isinstance(tensor, Tensor) or not _has_memory(tensor) or tensor.numel() == 0:
                    continue
                is_alias = tensor.untyped_storage().data_ptr() in memory
                if plan.kind is OpKind.VIEW and not is_alias:
                    self.faults.add((plan.base, "copies"))
                if plan.kind is OpKind.DIGEST and index in plan.fresh_returns and is_alias:
                    self.faults.add((plan.base, "aliases"))


def _has_memory(tensor: Tensor) -> bool:
    return not has_parts(tensor) and not torch._is_zerotensor(tensor)


if __name__ == "__main__":
    # torch's test package imports it for assertions that are not used here
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    stand_in.assert_expected_inline = None
    sys.modules["expecttest"] = stand_in
    warnings.simplefilter("ignore")  # beta and deprecated ops are swept too

    from torch.testing._internal.common_methods_invocations import op_db  # looked at in torch 2.13

    torch.set_num_threads(1)
    mode = SweepMode()
    failures = []
    num_samples = 0
    for op in op_db:
        if op.name.startswith("jiterator"):
            continue  # for GPUs only
        for dtype in (torch.float32, torch.int64, torch.complex64, torch.bfloat16):
            if dtype not in op.dtypes:
                continue
            needs_grad = op.supports_autograd and dtype in (torch.float32, torch.complex64)
            for sample in itertools.islice(
                op.sample_inputs("cpu", dtype, requires_grad=needs_grad), 4
            ):
                num_samples += 1
                try:
                    with mode:
                        total = total_of(op(sample.input, *sample.args, **sample.kwargs))
                        if total is not None:
                            total.backward()
                except (RuntimeError, NotImplementedError) as error:
                    # samples that this build cannot run
                    failures.append(f"{op.name} {dtype} {error}")
    report = {"num_samples": num_samples, "num_failed": len(failures), "failures": failures[:50]}
    report |= {"faults": sorted(map(list, mode.faults), key=str), "num_checked": len(mode.checked)}
    print(json.dumps(report))
