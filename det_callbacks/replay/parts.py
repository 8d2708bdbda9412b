"""Any tensor as the strided tensors that hold its bits: copied at once, and put back into the same memory later."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass  # torch 2.13

from det_callbacks.digest import digest_tensor, inner_tensors, unobserved
from det_callbacks.errors import ReplayError
from det_callbacks.replay.memory import alias, read_bits, write_bits
from det_callbacks.trace.components import holds_data, unwrapped
from det_callbacks.trace.late_sites import LateSites

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """One strided tensor's bits.

    Attributes:
        name: "" for a tensor that is one part, else "indices", "values", "local" and so on.
        dtype: of the elements.
        shape: sizes in elements.
        bits: its bytes, row-major: uint8 on the host, not shared with anything.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedTensor:
    """The bits of a tensor at one moment.

    Attributes:
        dtype: "float32".
        shape: sizes in elements; those of the whole tensor for a DTensor, -1 for a ragged size.
        layout: "strided", "sparse_coo", ...
        digest: ``digest_tensor`` of it, row-major.
        parts: the strided tensors that hold it.
        options: what is no tensor: the coalesced flag, a quantiser's scale; JSON-able.
        place: file and key it was read from, "" for one that was just copied.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str
    digest: int
    parts: tuple[Part, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.bits.numel() for part in self.parts)


def describe(tensor: Tensor) -> dict[str, Any]:
    """Return dtype, shape and layout of a tensor as ``SavedTensor`` has them."""
    if tensor.is_nested and tensor.layout is torch.strided:  # it has no shape; those of its parts are compared
        return {"dtype": _name(tensor.dtype), "shape": (), "layout": "nested"}
    return {
        "dtype": _name(tensor.dtype),
        "shape": tuple(size if isinstance(size, int) else -1 for size in tensor.shape),
        "layout": _name(tensor.layout),
    }


def num_bytes(tensor: Tensor) -> int:
    """Return how many bytes ``copy_bits`` would copy."""
    with unobserved():
        parts, _ = _split(tensor)
        return sum(part.numel() * part.element_size() for _, _, part in parts)


def copy_bits(tensor: Tensor) -> SavedTensor:
    """Return a copy of a tensor's bits, taken now; no dispatch mode and no autograd sees it.

    Costs one pass for the copy and one for the digest.

    Raises:
        TypeError: it is no tensor, or one without data (meta, fake, functional, batched).
        ReplayError: its bits cannot be put back later (mkldnn).
    """
    tensor = unwrapped(tensor) if isinstance(tensor, Tensor) else tensor
    return gather(tensor, digest=digest_tensor(tensor))


def gather(tensor: Tensor, *, digest: int, fetch: Callable[[Tensor], Tensor] | None = None) -> SavedTensor:
    """Return a copy of the bits of a tensor whose digest is known; see ``read_bits`` for ``fetch``."""
    with unobserved():
        parts, options = _split(tensor)
        return SavedTensor(
            **describe(tensor),
            digest=digest,
            parts=tuple(
                Part(name=name, dtype=dtype, shape=tuple(part.shape), bits=read_bits(part, fetch))
                for name, dtype, part in parts
            ),
            options=options,
        )


def put_back(saved: SavedTensor, live: Tensor) -> bool:
    """Put saved bits into the memory of a live tensor; return whether other bits were there.

    Device, dtype, strides, aliases, ``requires_grad``, graph and version counter stay: whatever shares the memory sees
    the saved bits too, and so does what autograd saved for the backward pass. No dispatch mode sees it. Where the bits
    are there already, nothing is written.

    Args:
        saved: from ``copy_bits`` or ``SavedStep.take``.
        live: of the same dtype, shape and layout.

    Raises:
        ReplayError: the live tensor is made otherwise, or elements that share memory would have to differ.
    """
    live = unwrapped(live)
    require_fit(saved, live)
    if digest_tensor(live) == saved.digest:
        return False
    write_parts(saved, live)
    return True


def write_parts(saved: SavedTensor, live: Tensor, late: LateSites | None = None) -> None:
    """Put saved bits into the memory of a live tensor that they fit, whether or not they are there already.

    Args:
        saved: the bits.
        live: not wrapped.
        late: of the step, where the tensor is on a device that computes digests: nothing is waited for then.

    Raises:
        ReplayError: elements that share memory would have to differ.
    """
    with unobserved():
        parts, options = _split(live)
        if late is not None:
            late.before_write(part for _, _, part in parts)
        if options != saved.options:
            _set_options(live, saved)
            parts, _ = _split(live)
        for (name, _, part), kept in zip(parts, saved.parts, strict=True):
            if not write_bits(part, kept.bits, None if late is None else late.send):
                raise ReplayError(
                    f"{saved.place or 'Saved bits'} cannot be put back: elements of the live tensor{_of(name)} share "
                    f"memory (shape {list(part.shape)}, strides {list(part.stride())}), and the saved bits differ "
                    "there. What was saved was laid out otherwise; put back a tensor that is not expanded."
                )


def new_tensor(saved: SavedTensor, like: Tensor, late: LateSites | None = None) -> Tensor:
    """Return a new tensor with the saved bits and everything else as another one has it, without history.

    Args:
        saved: the bits.
        like: the other tensor.
        late: as for ``write_parts``.

    Raises:
        ReplayError: as ``put_back`` does.
    """
    like = unwrapped(like)
    require_fit(saved, like)
    send = None if late is None else late.send
    if like.layout is torch.strided and not (
        like.is_nested or like.is_quantized or is_traceable_wrapper_subclass(like) or torch._is_zerotensor(like)
    ):
        with unobserved():
            copy = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            if not write_bits(copy, saved.parts[0].bits, send):  # expanded, and the saved bits are not
                copy = torch.empty(like.shape, dtype=like.dtype, device=like.device)
                write_bits(copy, saved.parts[0].bits, send)
        return copy
    with _disable_current_modes(), torch.no_grad():
        copy = like.detach().clone()
    require_fit(saved, copy)
    write_parts(saved, copy, late)
    return copy


def misfit(saved: SavedTensor, live: Tensor) -> str:
    """Return why saved bits do not fit a live tensor, "" when they do."""
    if not isinstance(live, Tensor):
        return f"the live value is no tensor but a {type(live).__qualname__}"
    live = unwrapped(live)
    if not holds_data(live):
        return "the live tensor holds no data"
    form = describe(live)
    kept = {"dtype": saved.dtype, "shape": saved.shape, "layout": saved.layout}
    if form != kept:
        return f"it is {_shown(kept)} and the live tensor is {_shown(form)}"
    with unobserved():
        parts, options = _split(live)
        ours = [(part.name, part.dtype, part.shape) for part in saved.parts]
        theirs = [(name, dtype, tuple(part.shape)) for name, dtype, part in parts]
    if ours != theirs:
        pairs = zip(ours, theirs, strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), (f"{len(ours)} parts", f"{len(theirs)} parts"))
        return f"it is made of {first[0]} and the live tensor of {first[1]}"
    fixed = ("qscheme", "axis")
    if any(options.get(name) != saved.options.get(name) for name in fixed):
        return f"it is quantised with {dict(saved.options)} and the live tensor with {options}"
    return ""


def require_fit(saved: SavedTensor, live: Tensor) -> None:
    """Raise ``ReplayError`` where saved bits do not fit a live tensor."""
    problem = misfit(saved, live)
    if problem:
        raise ReplayError(f"{saved.place or 'Saved bits'} cannot be put back: {problem}. The live tensor is unchanged.")


_Parts = list[tuple[str, torch.dtype, Tensor]]


def _split(tensor: Tensor) -> tuple[_Parts, dict[str, Any]]:
    """Return the strided tensors that hold a tensor's bits, with name and dtype, and what else belongs to it."""
    options: dict[str, Any] = {}
    if is_traceable_wrapper_subclass(tensor):
        parts: _Parts = []
        for index, inner in enumerate(inner_tensors(tensor)):
            found, inner_options = _split(inner)
            options.update({f"{index}.{name}": value for name, value in inner_options.items()})
            parts += [(f"{index}.{name}" if name else str(index), dtype, part) for name, dtype, part in found]
        return parts, options
    if tensor.is_quantized:
        return _split_quantised(tensor)
    if tensor.layout is torch.strided:
        if tensor.is_nested:
            return [(str(index), part.dtype, part) for index, part in enumerate(tensor.unbind())], options
        return [("", tensor.dtype, tensor)], options
    if tensor.layout is torch.sparse_coo:
        options["is_coalesced"] = tensor.is_coalesced()
        named: Sequence[tuple[str, Tensor]] = [("indices", tensor._indices()), ("values", tensor._values())]
    elif tensor.layout in _COMPRESSED:
        named = [(name, getattr(tensor, name)()) for name in (*_COMPRESSED[tensor.layout], "values")]
    else:
        raise ReplayError(
            f"A tensor of layout {_name(tensor.layout)} cannot be saved: its memory cannot be reached, so its bits "
            "could not be put back. Save what it was made from, or its to_dense()."
        )
    return [(name, part.dtype, part) for name, part in named], options


def _split_quantised(tensor: Tensor) -> tuple[_Parts, dict[str, Any]]:
    parts: _Parts = [("integers", tensor.dtype, alias(tensor))]
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        scale = float(tensor.q_scale()).hex()
        return parts, {"qscheme": str(tensor.qscheme()), "scale": scale, "zero_point": tensor.q_zero_point()}
    for name, part in (("scales", tensor.q_per_channel_scales()), ("zero_points", tensor.q_per_channel_zero_points())):
        parts.append((name, part.dtype, part))
    return parts, {"qscheme": str(tensor.qscheme()), "axis": tensor.q_per_channel_axis()}


def _set_options(live: Tensor, saved: SavedTensor) -> None:
    for owner, prefix in _owners(live, ""):
        if (is_coalesced := saved.options.get(f"{prefix}is_coalesced")) is not None:
            owner._coalesced_(is_coalesced)
        scale, zero_point = saved.options.get(f"{prefix}scale"), saved.options.get(f"{prefix}zero_point")
        if scale is None or zero_point is None:
            continue
        if (float(owner.q_scale()).hex(), owner.q_zero_point()) != (scale, zero_point):
            # A quantiser cannot be changed in place; this exchanges it, and the memory of the integers with it.
            owner.data = torch._make_per_tensor_quantized_tensor(owner.int_repr(), float.fromhex(scale), zero_point)


def _owners(tensor: Tensor, prefix: str) -> Iterator[tuple[Tensor, str]]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor, prefix
        return
    for index, inner in enumerate(inner_tensors(tensor)):
        yield from _owners(inner, f"{prefix}{index}.")


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _of(part: str) -> str:
    return f"'s {part}" if part else ""


def _shown(form: Mapping[str, Any]) -> str:
    layout = "" if form["layout"] == "strided" else f" {form['layout']}"
    return f"{form['dtype']} {list(form['shape'])}{layout}"
