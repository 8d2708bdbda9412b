"""Tensor -> 64 bits, for any kind of tensor (``docs/explanation/digest.md``),
without the program noticing.
"""

import dataclasses
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, is_lazy

from det_callbacks.digest.deferred import Bits, DeferredDigests, derived, value_of
from det_callbacks.digest.host import digest_bytes, digest_memory, digest_spans, format_digest
from det_callbacks.digest.numbers import Measure, measure
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.errors import DetCallbacksError
from det_callbacks.internals.torch import (
    COO_PARTS,
    JAGGED_CACHES,
    AsyncCollectiveTensor,
    FakeTensor,
    FunctionalTensor,
    is_functional,
    is_grad_tracking,
    is_transformed,
    is_wrapper,
    is_zero_tensor,
    memory_address,
    num_function_modes,
    untransformed,
)

_PLAIN_TYPES = frozenset({torch.Tensor, Parameter})

_BY_ROWS, _BY_COLUMNS = (
    ("crow_indices", "col_indices", "values"),
    ("ccol_indices", "row_indices", "values"),
)
SPARSE_PARTS: Mapping[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: COO_PARTS,
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _BY_ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _BY_COLUMNS),
}

# Copied as integers, because float8, sub-byte and bits dtypes have few ops, and to preserve NaNs.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

MAX_DEPTH = 20

_Entry = tuple[str, Tensor | bool | int | float]


def digest_tensor(tensor: torch.Tensor) -> int:
    """Return the 64-bit digest of a tensor's elements in row-major order.

    Equal tensors of one dtype and shape have equal digests on every device and with any strides.
    It reads contiguous host tensors in place (1 microsecond, or memory speed), and copies others,
    device tensors to the host.

    Args:
        tensor: of any shape, dtype, layout and device; a sparse or quantised tensor has a
            digest of its components.

    Raises:
        TypeError: not a tensor, or a tensor without data (meta, fake, functional, batched,
            uninitialised).
        DetCallbacksError: the storage is freed, or too small for the tensor.

    Examples:
        >>> weight = torch.arange(6.0).reshape(2, 3)
        >>> digest_tensor(weight) == digest_tensor(weight.t().contiguous().t())
        True
    """
    return value_of(tensor_bits(tensor, None), {})


def digest_output(tensor: torch.Tensor) -> int:
    """Return the digest of a dense tensor's elements in memory order; of other tensors, that of
    ``digest_tensor``. A copy in row-major order would take as long as five digests.
    """
    return value_of(tensor_bits(tensor, None, memory_order=True), {})


def tensor_bits(
    tensor: torch.Tensor, deferred: DeferredDigests | None, *, memory_order: bool = False
) -> Bits:
    """Return ``digest_tensor`` or ``digest_output``, queued in
    ``deferred`` if a device computes it.
    """
    span = None if num_function_modes() else _span(tensor, memory_order)
    if span is not None:
        return digest_memory(*span)
    with unobserved():
        return _digest(tensor, deferred, memory_order=memory_order)


def digest_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return ``digest_tensor`` of each; fetches device tensors together,
    digests large host tensors in two threads.
    """
    deferred = DeferredDigests()
    with unobserved():
        spans_or_bits = [
            _span(tensor, False) or _digest(tensor, deferred, memory_order=False)
            for tensor in tensors
        ]
    in_place = iter(digest_spans([each for each in spans_or_bits if isinstance(each, tuple)]))
    known = deferred.finish()
    return [
        next(in_place) if isinstance(each, tuple) else value_of(each, known)
        for each in spans_or_bits
    ]


def _span(tensor: torch.Tensor, memory_order: bool) -> tuple[int, int] | None:
    """Return (address, number of bytes) of a plain host tensor stored in the
    requested order, else None.
    """
    if (
        type(tensor) not in _PLAIN_TYPES
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or not (
            tensor.is_contiguous() or (memory_order and is_dense(tensor.shape, tensor.stride()))
        )
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return None
    nbytes = tensor.nbytes
    if not nbytes:
        return 0, 0
    try:
        base = memory_address(tensor)
    except NotImplementedError:  # wrapped by a transform (vmap, grad)
        return None
    start = tensor.storage_offset() * tensor.element_size()
    if not base or tensor.untyped_storage().nbytes() < start + nbytes:
        return None
    return base + start, nbytes


def _digest(tensor: torch.Tensor, deferred: DeferredDigests | None, *, memory_order: bool) -> Bits:
    span = _span(tensor, memory_order)
    if span is not None:
        return digest_memory(*span)
    _require_data(tensor)
    if is_grad_tracking(tensor):
        return _digest(untransformed(tensor), deferred, memory_order=memory_order)
    components = _components(tensor, deferred)
    if components is not None:
        return _combine(components)
    plain = _plain(tensor, memory_order)
    if not tensor.is_cpu:
        first = int(plain.storage_offset()) * plain.element_size()
        bits = (
            None if deferred is None else deferred.add(plain.untyped_storage(), first, plain.nbytes)
        )
        if bits is not None:
            return bits
        plain = _as_integers(plain).cpu()  # a device has no op for some dtypes
    return digest_memory(
        memory_address(plain) + plain.storage_offset() * plain.element_size(), plain.nbytes
    )


def _plain(tensor: torch.Tensor, memory_order: bool) -> torch.Tensor:
    """Return a strided tensor whose memory holds the elements in the requested order."""
    if is_zero_tensor(tensor):
        plain = tensor.clone()
    else:
        require_storage(tensor)
        plain = tensor.resolve_conj().resolve_neg()
    if memory_order and is_dense(plain.shape, plain.stride()):
        return plain
    return _as_integers(plain).contiguous()


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.element_size()
    return tensor.view(INTEGERS[size]) if size in INTEGERS else tensor


def _components(tensor: torch.Tensor, deferred: DeferredDigests | None) -> list[Bits] | None:
    """Return the digests of what a tensor consists of, or None for an ordinary strided one."""
    parts: Sequence[torch.Tensor]
    ends: list[Bits] = []
    is_plain = type(tensor) in _PLAIN_TYPES
    if not is_plain and is_wrapper(tensor):
        parts = inner_tensors(tensor)
    elif (
        not is_plain
        and tensor.layout is torch.strided
        and tensor.nbytes
        and not memory_address(tensor)
    ):
        raise TypeError(
            f"cannot digest a {type(tensor).__qualname__}: it has no storage, and no "
            "__tensor_flatten__ that names its inner tensors; digest the tensors in it, or give "
            "the class a __tensor_flatten__"
        )
    elif tensor.is_quantized and tensor.qscheme() in (
        torch.per_tensor_affine,
        torch.per_tensor_symmetric,
    ):
        parts = [tensor.int_repr()]
        ends = [digest_bytes(struct.pack("<dq", tensor.q_scale(), tensor.q_zero_point()))]
    elif tensor.is_quantized:
        parts = [
            tensor.int_repr(),
            tensor.q_per_channel_scales(),
            tensor.q_per_channel_zero_points(),
        ]
        ends = [digest_bytes(struct.pack("<q", tensor.q_per_channel_axis()))]
    elif tensor.layout is torch.strided:
        if not tensor.is_nested:
            return None
        parts = tensor.unbind()
    elif tensor.layout in SPARSE_PARTS:
        parts = [getattr(tensor, name)() for name in SPARSE_PARTS[tensor.layout]]
        if tensor.layout is torch.sparse_coo:
            ends = [digest_bytes(bytes([tensor.is_coalesced()]))]
    elif tensor.is_mkldnn:
        parts = [tensor.to_dense()]
    else:
        raise TypeError(
            f"cannot digest a tensor of layout {tensor.layout}: strided, sparse, mkldnn and nested "
            "layouts are supported; digest its inner tensors instead"
        )
    return [*(_digest(part, deferred, memory_order=False) for part in parts), *ends]


def inner_tensors(wrapper: torch.Tensor) -> list[torch.Tensor]:
    """Return the inner tensors of a wrapper subclass, once they have arrived."""
    names, _ = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]  # of subclasses only
    if wrapper.layout is torch.jagged:
        names = [name for name in names if name not in JAGGED_CACHES]
    # the list of a DTensor includes its device mesh
    inner = [
        part
        for part in (getattr(wrapper, name) for name in names)
        if isinstance(part, torch.Tensor)
    ]
    if not inner:
        raise TypeError(
            f"cannot digest a {type(wrapper).__qualname__}: its __tensor_flatten__ names no "
            "tensor; digest the tensors that hold its data"
        )
    if isinstance(wrapper, AsyncCollectiveTensor):
        # the wrapper's ``wait`` would suppress the program's later wait, which modes see
        return [torch.ops._c10d_functional.wait_tensor(part) for part in inner]
    return inner


def _combine(components: Sequence[Bits]) -> Bits:
    if len(components) == 1:
        return components[0]
    digests = [bits for bits in components if isinstance(bits, int)]
    if len(digests) < len(components):
        return derived(components, _combined)
    return _combined(digests)


def _combined(components: Sequence[int]) -> int:
    return digest_bytes(struct.pack(f"<{len(components) + 1}Q", len(components), *components))


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether strides describe a permutation of a contiguous tensor,
    without holes or overlap.
    """
    expected = 1
    for step, length in sorted(
        (step, length) for step, length in zip(stride, shape, strict=True) if length != 1
    ):
        if length == 0:
            return True
        if step != expected:
            return False
        expected *= length
    return True


def _require_data(tensor: torch.Tensor) -> None:
    """Raise TypeError for what has no elements to digest."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"cannot digest a {type(tensor).__qualname__}: it is not a tensor")
    is_wrapped = is_transformed(tensor)
    kinds = {
        "fake": isinstance(tensor, FakeTensor),
        "functional": isinstance(tensor, FunctionalTensor) or is_functional(tensor),
        "uninitialised": is_lazy(tensor),
        "meta": tensor.is_meta and not is_wrapper(tensor),
        "batched (vmap)": is_wrapped and not is_grad_tracking(tensor),
    }
    kind = next((kind for kind, is_so in kinds.items() if is_so), None)
    if kind is not None:
        raise TypeError(
            f"a {kind} tensor is not data: it has no elements to digest; take the digest of real "
            "tensors, outside tracing, transforms and deferred initialisation"
        )


def require_storage(tensor: torch.Tensor) -> None:
    """Raise if the tensor extends beyond its storage."""
    if not tensor.numel():
        return
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if held < needed or not memory_address(tensor):
        raise DetCallbacksError(
            f"cannot digest a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}: it "
            f"needs {needed} bytes of storage, which has {held} (a sharded parameter is freed "
            "between its uses); digest it while it is materialised, or digest the local shards"
        )


def measure_tensors(reference: torch.Tensor, current: torch.Tensor) -> Measure:
    """Return by how much two strided tensors of one shape differ; both are copied to the host."""
    if any(
        tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested
        for tensor in (reference, current)
    ):
        raise ValueError("only ordinary strided tensors have numbers; compare the inner tensors")
    if reference.shape != current.shape or reference.dtype != current.dtype:
        raise ValueError("tensors of different dtypes or shapes have no elements in common")
    dtype = str(reference.dtype).removeprefix("torch.")
    return measure(host_bytes(reference), host_bytes(current), (dtype, dtype))


def host_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a strided tensor's elements, row-major, as uint8 on the host."""
    with unobserved():
        plain = _as_integers(tensor.detach().resolve_conj().resolve_neg())
        return plain.contiguous().cpu().numpy().reshape(-1).view(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest:
    """The digests of a state's tensors, by name.

    Two are equal if they have the same names, with the same bits, dtype and shape for each.

    Attributes:
        digest: digest of names, dtypes, shapes and bits; 16 hexadecimal digits.
        tensors: name -> digest of its elements, as ``digest_tensor`` returns it and ``det-callbacks
            show`` prints it.
        layouts: name -> dtype and shape, "float32 [64, 768]"; for a number, its type.

    Examples:
        >>> state = digest_state(torch.nn.Linear(2, 3))
        >>> state.layouts
        {'weight': 'float32 [3, 2]', 'bias': 'float32 [3]'}
        >>> len(state.digest), state == digest_state(torch.nn.Linear(2, 3))  # other weights
        (16, False)
    """

    digest: str
    tensors: Mapping[str, str] = field(hash=False)
    layouts: Mapping[str, str] = field(hash=False)

    def differing(self, other: "StateDigest") -> tuple[str, ...]:
        """Return the names that differ or are in one state only, in the order of this state.

        Examples:
            >>> weights = {"a": torch.zeros(2), "b": torch.ones(2)}
            >>> digest_state(weights).differing(digest_state({**weights, "a": torch.ones(2)}))
            ('a',)
        """
        own = {name: (self.layouts[name], digest) for name, digest in self.tensors.items()}
        others = {name: (other.layouts[name], digest) for name, digest in other.tensors.items()}
        return tuple(name for name in own | others if own.get(name) != others.get(name))


def digest_state(state: nn.Module | Mapping[Any, Any]) -> StateDigest:
    """Return the digests of a module's parameters and buffers,
    or of the tensors and numbers of a nested dict.

    For a module these are its parameters, then all buffers, by their names in ``state_dict``; a
    tied tensor has an entry for each name. In a mapping, such as the ``state_dict`` of an
    optimizer, it searches mappings, lists, tuples and dataclasses up to 20 levels deep, joins names
    by dots ("state.0.exp_avg"), and skips strings and other objects.

    It costs one pass over the memory, with two threads for large states. It copies device tensors
    to the host, one at a time. For a DTensor it digests this rank's shard.

    Args:
        state: a module, or a mapping whose tensors have any shape, dtype, layout and device.

    Raises:
        TypeError: ``state`` is neither, or a tensor in it, which the message names, has no data
            (meta, fake, uninitialised).
        DetCallbacksError: a tensor's storage is freed, or two entries have the same name.

    Examples:
        >>> model = torch.nn.Linear(2, 3)
        >>> digest_state(model) == digest_state(model.state_dict())
        True
        >>> list(digest_state(model).tensors)
        ['weight', 'bias']
    """
    entries: list[_Entry]
    if isinstance(state, nn.Module):
        tables = (
            state.named_parameters(remove_duplicate=False),
            state.named_buffers(remove_duplicate=False),
        )
        entries = [entry for table in tables for entry in table]
    elif isinstance(state, Mapping):
        entries = list(_of_mapping(state))
    else:
        raise TypeError(
            "digest_state takes a module or a mapping such as a state_dict; got "
            f"{type(state).__name__}."
        )
    tensors: dict[str, str] = {}
    layouts: dict[str, str] = {}
    for (name, value), digest in zip(entries, _digests(entries), strict=True):
        if name in tensors:
            raise DetCallbacksError(f"Two entries of the state have the name {name!r}. Rename one.")
        tensors[name] = format_digest(digest)
        layouts[name] = type(value).__name__
        if isinstance(value, Tensor):
            layouts[name] = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    lines = sorted([name, layouts[name], tensors[name]] for name in tensors)
    whole = digest_bytes(json.dumps(lines, separators=(",", ":")).encode())
    return StateDigest(digest=format_digest(whole), tensors=tensors, layouts=layouts)


def _digests(entries: list[_Entry]) -> list[int]:
    deferred = DeferredDigests()
    digests: list[Bits] = []
    for name, value in entries:
        try:
            digests.append(
                tensor_bits(value, deferred) if isinstance(value, Tensor) else _digest_number(value)
            )
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from error
    known = deferred.finish()
    return [value_of(bits, known) for bits in digests]


def _digest_number(value: bool | int | float) -> int:
    return digest_bytes(
        struct.pack("<d", value) if isinstance(value, float) else str(int(value)).encode()
    )


def _of_mapping(tree: Any, name: str = "", depth: int = 0) -> Iterator[_Entry]:
    """Yield the tensors and numbers of a nested structure; see ``digest_state``."""
    if isinstance(tree, Tensor | bool | int | float):
        yield name, tree
        return
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        items = [(str(index), value) for index, value in enumerate(tree)]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        items = [(entry.name, getattr(tree, entry.name)) for entry in dataclasses.fields(tree)]
    else:
        return
    if depth == MAX_DEPTH:
        raise DetCallbacksError(
            f"{name} is nested more than {MAX_DEPTH} levels deep; pass the part with tensors."
        )
    for key, value in items:
        yield from _of_mapping(value, f"{name}.{key}" if name else key, depth + 1)
