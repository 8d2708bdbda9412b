"""Taking a digest has no effect: nothing is dispatched, recorded, drawn or left behind."""

import random

import numpy as np
import torch
from beta_tensors import BETA_TENSORS
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor  # looked at in torch 2.13
from torch.utils._python_dispatch import TorchDispatchMode

from det_callbacks.digest import digest_output, digest_tensor, digest_tensors

pytestmark = BETA_TENSORS


class CountingDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class CountingFunction(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def tensors_of_every_kind() -> dict[str, torch.Tensor]:
    dense = torch.randn(4, 6)
    leaf = torch.randn(4, 6, requires_grad=True)
    return {
        "contiguous": dense,
        "transposed": dense.t(),
        "strided": dense[:, ::2],
        "expanded": dense[:1].expand(5, 6),
        "leaf": leaf,
        "non-leaf": (leaf * 2).t(),
        "conjugate": torch.randn(3, 2, dtype=torch.complex64).t().conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "zero": torch._efficientzerotensor(3),
        "coo": dense.relu().to_sparse().requires_grad_(),
        "csr": dense.relu().to_sparse_csr(),
        "mkldnn": dense.to_mkldnn(),
        "quantised": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8).t(),
        "nested": torch.nested.nested_tensor([dense, dense[:2]], requires_grad=True),
        "jagged": torch.nested.nested_tensor([dense, dense[:2]], layout=torch.jagged, requires_grad=True),
        "wrapper": TwoTensor(dense, dense.clone()),
        "large": torch.ones(300_000),
    }


def digest_every_way(tensor: torch.Tensor) -> list[int]:
    return [digest_tensor(tensor), digest_output(tensor), *digest_tensors([tensor, tensor])]


def test_no_mode_no_autograd_and_no_generator_notices_anything() -> None:
    tensors, saved = tensors_of_every_kind(), []
    states = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
    for kind, tensor in tensors.items():
        is_plain = tensor.layout is torch.strided and not tensor.is_nested and kind not in ("zero", "wrapper")
        bits = tensor.detach().clone() if is_plain else None
        facts = (tensor.stride(), tensor.storage_offset(), tensor.data_ptr()) if is_plain else ()
        expected = digest_every_way(tensor)
        node, version, sequence = tensor.grad_fn, tensor._version, next_sequence_number()
        with (
            CountingDispatch() as below,
            CountingFunction() as function,
            CountingDispatch() as above,
            torch.autograd.graph.saved_tensors_hooks(saved.append, lambda packed: packed),
        ):
            torch.ones(1)
            digests = digest_every_way(tensor)
            torch.ones(1)
        assert [len(mode.seen) for mode in (below, function, above)] == [2, 2, 2], kind
        assert digests == expected, kind
        assert tensor.grad_fn is node, kind
        assert tensor._version == version, kind
        assert next_sequence_number() == sequence + 1, kind
        if bits is not None:
            assert (tensor.stride(), tensor.storage_offset(), tensor.data_ptr()) == facts, kind
            assert torch.equal(bits, tensor), kind
    assert not saved
    assert torch.is_grad_enabled()
    assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == states
    leaf, product = tensors["leaf"], tensors["non-leaf"]
    product.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2))


def next_sequence_number() -> int:
    """Return the number that autograd gives to the next node, which every node that is made increases."""
    return (torch.ones(1, requires_grad=True) * 1).grad_fn._sequence_nr()
