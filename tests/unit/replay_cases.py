"""What tests of saving tensors and putting them back have in common."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from det_callbacks.replay import SavedStep, SavedTensors
from det_callbacks.replay.files import StepPlace, replay_path

PLACE = StepPlace(run_id="run", rank=0, segment=0, step=12)


def saver(folder: Path, **options: float) -> SavedTensors:
    (folder / "rank-00000").mkdir(exist_ok=True)
    return SavedTensors(folder / "rank-00000" / "attempt-000.arrows", run_id="run", **options)


def reader(folder: Path, step: int = 12) -> SavedStep:
    return SavedStep(replay_path(folder / "rank-00000" / "attempt-000.arrows", step), PLACE)


def of_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int, *, is_finite: bool) -> Tensor:
    """Return a tensor of any bits at all, NaNs with payloads among them unless they are to be finite."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape, dtype=np.int64))
    limit = 2 if dtype is torch.bool else 256
    content = np.random.default_rng(seed).integers(0, limit, count * size, dtype=np.uint8)
    if is_finite:
        content &= 0x3F
    flat = torch.empty(count * size, dtype=torch.uint8)
    flat.copy_(torch.from_numpy(content))
    return flat.view(dtype).reshape(shape)


DTYPES = [
    getattr(torch, name)
    for names in (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 uint1 uint4 uint7 int2 int4 bits8 bits16",
        "float16 bfloat16 float32 float64 complex32 complex64 complex128 float4_e2m1fn_x2",
        "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
    )
    for name in names.split()
]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1) if tensor.dim() else tensor,
    "offset": lambda tensor: tensor[1:] if tensor.dim() else tensor,
    "strided": lambda tensor: tensor[..., ::2] if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor.unsqueeze(0).expand(3, *tensor.shape),
    "windows": lambda tensor: tensor.as_strided((2, 2), (1, 1)) if tensor.numel() >= 3 else tensor,
}

OTHERS: dict[str, Callable[[], Tensor]] = {
    "quantised": lambda: torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 3, torch.quint8),
    "another scale": lambda: torch.quantize_per_tensor(torch.randn(4, 3), float(torch.rand(1)), 3, torch.qint32),
    "quantised by channel": lambda: torch.quantize_per_channel(
        torch.randn(4, 3), torch.rand(4).double(), torch.randint(0, 3, (4,)), 0, torch.qint8
    ),
    "four bits": lambda: torch.quantize_per_channel(
        torch.randn(2, 8), torch.rand(2), torch.zeros(2), 0, torch.quint4x2
    ),
    "coo": lambda: torch.sparse_coo_tensor(torch.randint(0, 3, (2, 4)), torch.randn(4), (3, 3)),
    "coo, coalesced or not": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 1], [1, 0]]), torch.randn(2), (2, 2), is_coalesced=bool(torch.rand(1) > 0.5)
    ),
    "csr": lambda: (torch.eye(3) * torch.rand(1)).to_sparse_csr(),
    "csc": lambda: (torch.eye(3) * torch.rand(1)).to_sparse_csc(),
    "bsr": lambda: torch.randn(4, 4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged),
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.empty(0, 4),
}


def of_kind(dtype: torch.dtype, shape: tuple[int, ...], layout: str, lazy: str, seed: int) -> Tensor:
    """Return a tensor of any bits; ``lazy`` is "", "conj", "neg" or "both"."""
    # Some of torch's kernels that resolve a lazy negation change the payload of a NaN, so bits of what is resolved
    # would not be those of what is not.
    tensor = LAYOUTS[layout](of_bytes(dtype, shape, seed, is_finite=bool(lazy)))
    if lazy in ("conj", "both") and dtype.is_complex:
        tensor = tensor.conj()
    if lazy in ("neg", "both") and (dtype.is_complex or dtype in (torch.float32, torch.float64, torch.int32)):
        tensor = torch._neg_view(tensor)
    return tensor


OF_ANY_KIND = given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    layout=st.sampled_from(sorted(LAYOUTS)),
    lazy=st.sampled_from(("", "conj", "neg", "both")),
    seed=st.integers(0, 1000),
)
"""Draws the arguments of ``of_kind``."""
