"""Copies the bits of a tensor, writes bits into it, and changes its last bits.

Both go through an integer tensor on the same memory. It has a separate version counter, so what
autograd saved stays valid, and neither history nor an inference flag. Only plain tensors can be
saved: strided tensors with a storage, and wrappers around one such tensor (a DTensor's shard).
"""

import math
import shutil
from collections.abc import Sequence
from ctypes import memmove
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from det_callbacks.digest.components import INTEGERS, inner_tensors, require_storage
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.errors import ReplayError, SelectionError
from det_callbacks.internals.torch import is_wrapper, is_zero_tensor
from det_callbacks.tensors.files import MIB, SavedTensor
from det_callbacks.trace.components import holds_data, unwrapped
from det_callbacks.trace.deferred_sites import DeferredSites
from det_callbacks.trace.leaves import leaves

TENSOR_BUDGET_MIB = 1024.0
"""What one step may save by default."""
_RESERVED_MIB = 64
"""Disk space to leave free when a run begins: its digests need room too."""

STATISTICS = ("squares", "nan", "inf")
"""Sum of the squares of finite elements, counts of NaNs and infinities."""
_CHUNK_ELEMENTS = 1 << 22

_INTEGERS = INTEGERS | {16: torch.complex128}


def plain(tensor: Tensor) -> Tensor:
    """Return the strided tensor that holds a tensor's bits;
    raise ``ReplayError`` unless there is exactly one.
    """
    with unobserved():
        inner = unwrapped(tensor)
        if not holds_data(inner):
            raise _refused(tensor, "holds no data", "save it where real tensors flow")
        while is_wrapper(inner):
            parts = inner_tensors(inner)
            if len(parts) != 1:
                raise _refused(tensor, f"is made of {len(parts)} tensors", "save these one by one")
            (inner,) = parts
        if inner.is_quantized:
            raise _refused(tensor, "is quantised", "save its int_repr()")
        if inner.layout is not torch.strided:
            raise _refused(
                tensor, f"has the layout {_name(inner.layout)}", "save its parts, or its to_dense()"
            )
        if inner.is_nested:
            raise _refused(tensor, "is nested", "save the tensors in it")
        if inner.is_conj() or inner.is_neg() or is_zero_tensor(inner):
            raise _refused(tensor, "is a lazy view", "save its resolve_conj().resolve_neg()")
        require_storage(inner)
        return inner


def require_apart(tensor: Tensor) -> None:
    """Raise ``ReplayError`` if elements of a tensor may share memory:
    saved bits could not be restored.
    """
    extent = 1
    inner = plain(tensor)
    for step, length in sorted(zip(inner.stride(), inner.shape, strict=True)):
        if length > 1 and step < extent:
            layout = f"(shape {list(inner.shape)}, strides {list(inner.stride())})"
            raise _refused(
                tensor, f"has elements that share memory {layout}", "save a clone() of it"
            )
        extent += max(length - 1, 0) * step


class TensorBudget:
    """Copies tensors for replay, up to so many MiB per step and process."""

    def __init__(self, mib: float = TENSOR_BUDGET_MIB) -> None:
        self._mib = mib
        self.num_bytes = 0  # copied in the current step

    def copy(self, tensor: Tensor, op: str, deferred: DeferredSites | None) -> SavedTensor:
        """Return a copy of a tensor of an op; raise ``ReplayError`` if it exceeds the budget.

        See ``copy_bits``.
        """
        num_bytes = self.num_bytes + plain(tensor).nbytes
        if num_bytes > self._mib * MIB:
            raise ReplayError(
                f"This step would save {num_bytes / MIB:.3g} MiB with {op}, and tensor_budget_mib "
                f"is {self._mib:g}. Save fewer tensors, or give a larger tensor_budget_mib."
            )
        saved = copy_bits(tensor, deferred)
        self.num_bytes = num_bytes
        return saved


def check_budget(value: object) -> float:
    """Return a valid ``tensor_budget_mib``; raise ``SelectionError`` for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SelectionError(f"tensor_budget_mib must be a number of MiB above 0; got {value!r}.")
    return value


def require_room(path: Path, budget_mib: float) -> None:
    """Raise ``ReplayError`` if the disk of a run has less space than one step may save."""
    folder = next(
        folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir()
    )
    free_mib = shutil.disk_usage(folder).free / MIB
    if free_mib < budget_mib + _RESERVED_MIB:
        raise ReplayError(
            f"Nothing was recorded: with this tensor_budget_mib a step may save {budget_mib:.3g} "
            f"MiB, and the disk of {folder} has {free_mib:.3g} MiB free ({_RESERVED_MIB} MiB are "
            "left for the rest of the run). Free some space, record to another disk, or pass a "
            "smaller tensor_budget_mib."
        )


def copy_bits(
    tensor: Tensor, deferred: DeferredSites | None, *, first: int = 0, every: int = 1
) -> SavedTensor:
    """Return a copy of the bits of a plain tensor, of every n-th element in row-major order.

    The bits of a tensor on a device arrive when ``deferred`` is settled.
    """
    with unobserved():
        inner = plain(tensor)
        memory = memory_of(inner) if every == 1 else memory_of(inner).reshape(-1)[first::every]
        if deferred is not None and deferred.is_deferred(inner):
            bits = deferred.fetch(memory)
        elif inner.is_cpu and inner.is_contiguous() and every == 1:
            # torch's copy waits for its thread pool: on a busy machine,
            # 8 instead of 0.3 ms for 10 MiB
            bits = torch.empty(inner.nbytes, dtype=torch.uint8)
            memmove(bits.data_ptr(), inner.data_ptr(), inner.nbytes)
        else:
            bits = memory.clone(memory_format=torch.contiguous_format).cpu()
        flat = bits.reshape(-1)
        # a single element may have any stride, which ``view`` refuses
        flat = flat.as_strided(flat.shape, (1,))
        content = np.asarray(flat.view(torch.uint8))
        shape = tuple(inner.shape)
        return SavedTensor(
            dtype=_name(inner.dtype), shape=shape, bits=content, first=first, every=every
        )


def statistics_of(tensor: Tensor, deferred: DeferredSites) -> Tensor:
    """Return ``STATISTICS`` of a plain tensor as float64; those of a device tensor
    arrive with ``deferred``.
    """
    with unobserved(), torch.no_grad():
        inner = plain(tensor)
        values = (torch.view_as_real(inner) if inner.is_complex() else inner).reshape(-1)
        found = torch.zeros(3, dtype=torch.float64, device=inner.device)
        for part in values.split(_CHUNK_ELEMENTS) if len(values) else ():
            wide = part.to(torch.float64)
            finite = wide.nan_to_num(0, 0, 0)
            found = found + torch.stack(
                [finite.square().sum(), wide.isnan().sum(), wide.isinf().sum()]
            )
        return deferred.fetch(found) if deferred.is_deferred(inner) else found.cpu()


def write_bits(saved: SavedTensor, live: Tensor, deferred: DeferredSites | None = None) -> None:
    """Write saved bits into the memory of a live tensor, so that what autograd
    saved of it has them too.
    """
    with unobserved():
        inner = plain(live)
        if not inner.numel():
            return
        memory = memory_of(inner)
        bits = torch.from_numpy(saved.bits).view(memory.dtype).reshape(memory.shape)
        if deferred is not None and deferred.is_deferred(inner):
            deferred.before_writes((inner,))
            deferred.send(bits, memory)
        elif inner.is_cpu and inner.is_contiguous():
            memmove(inner.data_ptr(), bits.data_ptr(), inner.nbytes)
        else:
            memory.copy_(bits)


def misfit(saved: SavedTensor, live: Tensor) -> str:
    """Return why saved bits do not fit a live tensor; "" if they do."""
    inner = plain(live)
    known, shown = f"{saved.dtype} {list(saved.shape)}", f"{_name(inner.dtype)} {list(inner.shape)}"
    return "" if known == shown else f"it is {known} and the live tensor is {shown}"


def memory_of(tensor: Tensor) -> Tensor:
    """Return an integer tensor on the memory of a plain tensor, with the same shape."""
    integers = torch.empty(0, dtype=_INTEGERS[tensor.element_size()], device=tensor.device)
    return integers.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _refused(tensor: Tensor, what: str, instead: str) -> ReplayError:
    name = f"A {type(tensor).__qualname__} of {_name(tensor.dtype)}"
    return ReplayError(f"{name} {what}, so its bits cannot be saved and restored; {instead}.")


class Perturbation:
    """Changes the last bit of each number in the first step's batch, once; zeros,
    infinities and NaN stay.

    If the batch is unknown or has no floating-point numbers, it changes those that the first op of
    the forward pass returns, such as the embeddings of tokens.
    """

    needs_rows = True

    def __init__(self) -> None:
        self._is_begun = self.is_done = False

    def begin(self, batch: Any) -> None:
        """Change the batch of the first step."""
        if not self._is_begun:
            tensors = [
                leaf
                for _, leaf in leaves(batch, "batch", is_whole=True)
                if isinstance(leaf, Tensor)
            ]
            self.is_done = sum(map(_change_last_bits, tensors)) > 0
        self._is_begun = True

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether to change the outputs of an op."""
        return self._is_begun and not self.is_done and phase == "forward"

    def exchange(
        self,
        phase: str,
        module: str,
        op: str,
        outputs: Sequence[Any],
        position: int,
        deferred: DeferredSites,
    ) -> Sequence[Any]:
        """Change the outputs of an op; see ``OutputHook``."""
        tensors = [out for out in outputs if isinstance(out, Tensor) and holds_data(out)]
        for tensor in tensors:
            deferred.before_writes((plain(tensor),))
        self.is_done = sum(map(_change_last_bits, tensors)) > 0
        return outputs

    def end_step(self) -> None:
        """Raise ``SelectionError`` if the first step had no number to change."""
        if self._is_begun and not self.is_done:
            raise SelectionError(
                "No floating-point number goes into the first step, and no op of its forward pass "
                'returns one at level "op", so what rounding does to it cannot be measured.'
            )


def _change_last_bits(tensor: Tensor) -> bool:
    """Change the last bit of each number of a tensor; return whether there was one to change."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    try:
        require_apart(tensor)
        inner = plain(tensor)
    except ReplayError:  # not a plain tensor
        return False
    with unobserved(), torch.no_grad():
        real = torch.view_as_real(inner) if inner.is_complex() else inner
        wide = real.to(torch.float64)
        is_number = wide.isfinite() & (wide != 0)
        memory = memory_of(real)
        memory.bitwise_xor_(is_number.to(memory.dtype))
        return bool(is_number.any())
