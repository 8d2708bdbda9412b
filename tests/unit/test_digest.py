"""Digests of tensors: every dtype, layout and kind, what has no data,
and that nothing notices that one was taken.
"""

import copy
import pickle
import random
import struct
import threading

import numpy as np
import pytest
import torch
from beta_tensors import BETA_DTYPES, BETA_TENSORS
from device_cases import DTYPES, UNCONJUGATED, of_bits
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor  # looked at in torch 2.13
from torch.utils._python_dispatch import TorchDispatchMode

from det_callbacks import digest_state
from det_callbacks.digest import components, host
from det_callbacks.digest.components import digest_output, digest_tensor, digest_tensors
from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.errors import DetCallbacksError

pytestmark = [BETA_TENSORS, BETA_DTYPES]

MIB = 1 << 20


def digest_every_way(tensor: Tensor) -> list[int]:
    return [digest_tensor(tensor), digest_output(tensor), *digest_tensors([tensor, tensor])]


def refuse_every_way(tensor: object, error: type[Exception], message: str) -> None:
    for digest in (
        digest_tensor,
        digest_output,
        lambda value: digest_tensors([torch.ones(1), value]),
    ):
        with pytest.raises(error, match=message):
            digest(tensor)


def stored_bytes(tensor: Tensor) -> bytes:
    elements = [tensor[index].reshape(1).view(torch.uint8) for index in np.ndindex(*tensor.shape)]
    return b"".join(element.numpy().tobytes() for element in elements)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_its_stored_bytes_in_row_major_order(dtype):
    tensor = of_bits(dtype, 6, 5)
    assert digest_output(tensor) == digest_bytes(stored_bytes(tensor))
    base = of_bits(dtype, 6, 10)
    views = [
        base.t(),
        base[:, ::2],
        base[1:, 3:],
        base[:1].expand(4, 10),
        base[2],
        base.t()[3:, ::2],
        base[0, 1],
    ]
    for view in (tensor, *views):
        expected = digest_bytes(stored_bytes(view))
        assert digest_tensor(view) == expected
        assert digest_tensors([view, view]) == [expected] * 2
    for empty in (
        of_bits(dtype, 0),
        of_bits(dtype, 3, 0, 2),
        of_bits(dtype, 4, 4)[:, 4:],
        of_bits(dtype, 2, 0).t(),
    ):
        assert {*digest_every_way(empty)} == {digest_bytes(b"")}


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if dtype.is_complex and dtype not in UNCONJUGATED], ids=str
)
def test_conjugate_and_negative_views_are_what_they_mean(dtype):
    tensor = torch.complex(torch.arange(6.0), torch.arange(1.0, 7.0)).to(dtype).reshape(2, 3)
    conjugate, numbers = tensor.conj(), torch.arange(1.0, 7.0)
    for view, meant in (
        (conjugate, conjugate.resolve_conj()),
        (conjugate.t(), conjugate.resolve_conj().t().contiguous()),
        (conjugate.imag, (-tensor.imag).contiguous()),
        (torch._neg_view(numbers), -numbers),
        (
            torch._neg_view(tensor.to(torch.complex64).conj()),
            torch.complex(-tensor.real.float(), tensor.imag.float()),
        ),
    ):
        assert view.is_conj() or view.is_neg()
        assert digest_tensor(view) == digest_tensor(meant)
        in_memory_order = conjugate.resolve_conj() if view.shape == (3, 2) else meant
        assert digest_output(view) == digest_tensor(in_memory_order)


def test_a_conjugate_view_that_torch_cannot_compute_is_an_error():
    for dtype in set(DTYPES) & UNCONJUGATED:
        view = of_bits(dtype, 3).conj()
        for digest in (digest_tensor, digest_output, lambda one: digest_tensors([one])):
            with pytest.raises(NotImplementedError, match="not implemented for 'BComplex32'"):
                digest(view)


def test_outputs_are_read_in_memory_order_where_they_are_dense_and_else_in_row_major_order():
    tensor = torch.randn(2, 3, 4, 5)
    for order in ((0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 2, 3)):
        permuted = tensor.permute(order)
        assert digest_output(permuted) == digest_tensor(tensor)
        assert (
            digest_tensor(permuted) == digest_tensor(permuted.contiguous()) != digest_tensor(tensor)
        )
    memory = torch.randn(12)
    size_of_one = memory.as_strided((3, 1, 4), (1, 99, 3))
    assert digest_output(size_of_one) == digest_tensor(memory) != digest_tensor(size_of_one)
    gaps = torch.randn(6, 10)
    for view in (
        gaps[:, ::2],
        gaps.t()[::2],
        gaps[:1].expand(4, 10),
        gaps.as_strided((3, 3), (1, 1)),
    ):
        assert digest_output(view) == digest_tensor(view.contiguous())


def test_what_lies_in_order_is_not_copied(monkeypatch):
    monkeypatch.setattr(
        components, "_digest", lambda tensor, memory_order: pytest.fail("took the way of copies")
    )
    tensor = torch.randn(2, 3, 4, 5)
    for plain in (tensor, tensor[1], nn.Parameter(tensor), torch.tensor(1.0), torch.empty(0, 3)):
        digest_every_way(plain)
    for dense in (tensor.permute(3, 0, 2, 1), tensor[1].mT):
        digest_output(dense)


def test_tensors_that_share_memory_or_have_none_are_their_elements():
    tensor = torch.randn(4)
    lazy = torch._lazy_clone(tensor)
    assert digest_tensor(lazy) == digest_tensor(tensor)
    assert torch._C._is_cow_tensor(lazy), "it was not copied for that"
    zeros = torch._efficientzerotensor(5)
    for zero in (
        zeros,
        zeros[1:],
        torch._efficientzerotensor(4, 5).t(),
        torch._neg_view(torch.empty(0)),
    ):
        assert {*digest_every_way(zero)} == {digest_tensor(torch.zeros(zero.shape))}


def test_a_storage_that_is_freed_or_too_short_is_an_error_and_no_crash():
    for tensor in (
        torch.randn(1000),
        torch.randn(1000)[500:],
        torch.randn(40, 25).t(),
        torch.randn(100, 10)[:, ::3],
    ):
        for num_bytes in (3995, 0):
            tensor.untyped_storage().resize_(num_bytes)
            refuse_every_way(
                tensor, DetCallbacksError, rf"\d+ bytes of storage, which has {num_bytes}"
            )


# Tensors that are made of other tensors.


def combined(*components: Tensor | int) -> int:
    digests = [
        part if isinstance(part, int) else digest_tensor(part.contiguous()) for part in components
    ]
    return digest_bytes(struct.pack(f"<{len(digests) + 1}Q", len(digests), *digests))


def assert_digest(tensor: Tensor, expected: int) -> None:
    assert digest_every_way(tensor) == [expected] * 4


def test_mkldnn_and_nested_tensors_are_what_they_are_made_of():
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    assert_digest(parts[0].to_mkldnn(), digest_tensor(parts[0]))
    tensor = torch.nested.nested_tensor(parts, requires_grad=True)
    assert_digest(tensor.transpose(1, 2), combined(*(part.t() for part in parts)))
    assert digest_tensor(torch.nested.nested_tensor(parts[:1])) == digest_tensor(parts[0]), (
        "one stands for itself"
    )
    assert digest_tensor(torch.nested.nested_tensor([])) == digest_bytes(bytes(8)), (
        "none is not nothing"
    )
    values, offsets, lengths = torch.randn(6, 3), torch.tensor([0, 2, 6]), torch.tensor([1, 3])
    cached = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=2, max_seqlen=4)
    assert_digest(cached, combined(values, offsets))
    assert_digest(
        torch.nested.nested_tensor_from_jagged(values, offsets, lengths),
        combined(values, offsets, lengths),
    )


def test_a_wrapper_subclass_is_its_inner_tensors_recursively():
    left, right = torch.randn(3, 4), torch.randn(3, 4)
    pair = TwoTensor(left, right)
    assert_digest(pair, combined(left, right))
    assert_digest(
        TwoTensor(pair, TwoTensor(right, left)),
        combined(combined(left, right), combined(right, left)),
    )
    assert_digest(pair.t(), combined(left.t(), right.t()))


def test_what_a_collective_has_not_delivered_yet_is_waited_for():
    from torch.distributed import _functional_collectives as collectives

    class LateWork(torch.distributed.Work):
        def wait(self, timeout: object = None) -> bool:
            buffer.fill_(7)
            return True

    for digest in (digest_tensor, digest_output, lambda value: digest_tensors([value])[0]):
        buffer = torch.zeros(5)
        torch._C._distributed_c10d._register_work(buffer, LateWork())
        assert digest(collectives.AsyncCollectiveTensor(buffer)) == digest_tensor(
            torch.full((5,), 7.0)
        )


class Silent(torch.Tensor):
    """A wrapper subclass without ``__tensor_flatten__``."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Silent":
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> None:
        raise AssertionError(f"{func} was called")


Hollow = type("Hollow", (TwoTensor,), {"__tensor_flatten__": lambda self: (["shape"], None)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2, device="meta").weight, "a meta tensor is not data"),
        (lambda: FakeTensorMode().from_tensor(torch.empty(3)), "a fake tensor is not data"),
        (lambda: torch._to_functional_tensor(torch.randn(3)), "a functional tensor is not data"),
        (lambda: nn.LazyLinear(3).weight, "a uninitialised tensor is not data"),
        (
            lambda: Silent(torch.randn(3)),
            "cannot digest a Silent: it has no storage, and no __tensor_flatten__",
        ),
        (
            lambda: Hollow(*[torch.ones(1)] * 2),
            "cannot digest a Hollow: its __tensor_flatten__ names no tensor",
        ),
        (lambda: None, "cannot digest a NoneType: it is not a tensor"),
        (lambda: [torch.ones(1)], "cannot digest a list: it is not a tensor"),
    ],
)
def test_what_has_no_data_and_what_is_no_tensor_are_refused(make, message):
    refuse_every_way(make(), TypeError, message)


def test_in_a_gradient_transform_the_data_is_digested_and_a_batched_tensor_is_refused():
    data = torch.randn(3, 4)
    seen = []

    def loss(value: Tensor) -> Tensor:
        seen.append((digest_tensor(value), digest_tensor(value.t()), digest_output(value.t())))
        return (value * value).sum()

    def batched(value: Tensor) -> Tensor:
        refuse_every_way(value, TypeError, r"a batched \(vmap\) tensor is not data")
        return value

    gradient = torch.func.grad(loss)(data)
    torch.func.grad(lambda value: torch.func.grad(loss)(value).sum())(data)
    assert torch.equal(gradient, 2 * data)
    assert seen == [(digest_tensor(data), digest_tensor(data.t()), digest_tensor(data))] * 2
    torch.vmap(batched)(data)


# Taking a digest has no effect: nothing is dispatched, recorded, drawn or left behind.


class Counting:
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def note(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class CountingDispatch(Counting, TorchDispatchMode):
    __torch_dispatch__ = Counting.note


class CountingFunction(Counting, TorchFunctionMode):
    __torch_function__ = Counting.note


def tensors_of_every_kind() -> dict[str, Tensor]:
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
        "jagged": torch.nested.nested_tensor(
            [dense, dense[:2]], layout=torch.jagged, requires_grad=True
        ),
        "wrapper": TwoTensor(dense, dense.clone()),
        "large": torch.ones(300_000),
    }


def next_sequence_number() -> int:
    return (torch.ones(1, requires_grad=True) * 1).grad_fn._sequence_nr()


def test_no_mode_no_autograd_and_no_generator_notices_anything():
    tensors, saved = tensors_of_every_kind(), []
    states = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
    for kind, tensor in tensors.items():
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
        assert (tensor._version, next_sequence_number()) == (version, sequence + 1), kind
    assert not saved
    assert (
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),
        random.getstate(),
    ) == states
    leaf, product = tensors["leaf"], tensors["non-leaf"]
    product.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2))


# Memory of the host: at the borders, and in threads.


def test_a_third_level_is_the_digest_of_the_hashes_below_it():
    # Three levels need 8 GiB: feed the join with as many leaf hashes as those would have.
    hashes = [value * 0x9E3779B97F4A7C15 % 2**64 for value in range(32769)]
    packed = np.asarray(hashes, dtype="<u8").tobytes()
    assert len(packed) > 256 * 1024
    assert host._join_leaves(hashes) == digest_bytes(packed)


def test_every_contiguous_buffer_is_taken_and_nothing_else():
    array = np.array([[1, 2], [3, 4]], dtype=np.uint8)
    for buffer in (
        bytearray(b"\1\2\3\4"),
        memoryview(b"\0\1\2\3\4")[1:],
        array,
        array.reshape(-1).view("<u4"),
    ):
        assert digest_bytes(buffer) == digest_bytes(b"\1\2\3\4")
    for buffer in (np.arange(10)[::2], np.zeros((600, 600))[:, 1:]):
        with pytest.raises(ValueError, match="C-contiguous"):
            digest_bytes(buffer)
    for value in ("text", 5, None):
        with pytest.raises(TypeError, match="bytes-like"):
            digest_bytes(value)


def test_many_spans_are_hashed_by_two_threads(monkeypatch):
    seen: set[int] = set()
    both_started = threading.Barrier(2, timeout=60)
    leaf_hashes = host._leaf_hashes

    def noted(piece: tuple[int, int]) -> list[int]:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            both_started.wait()
        return leaf_hashes(piece)

    sizes = [0, 1, 1024, 5 * MIB + 3, 0, 300_000, 12 * MIB, 17]
    arrays = [np.frombuffer(random.randbytes(size), dtype=np.uint8) for size in sizes]
    expected, before = [digest_bytes(array.tobytes()) for array in arrays], threading.enumerate()
    monkeypatch.setattr(host, "_leaf_hashes", noted)
    assert host.digest_spans([(array.ctypes.data, array.nbytes) for array in arrays]) == expected
    assert (len(seen), threading.enumerate()) == (2, before), "they have ended"


def test_where_no_thread_can_be_started_the_digest_is_the_same(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    data = random.randbytes(17 * MIB)
    expected = digest_bytes(data)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert digest_bytes(data) == expected


# digest_state: which weights these are, by name.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.again = nn.Linear(3, 4)
        self.again.weight = self.first.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)


def test_a_module_has_its_state_dicts_names_and_what_is_not_persistent():
    net = Net()
    found = digest_state(net)
    assert set(found.tensors) == {*net.state_dict(), "mask"}
    weight = format_digest(digest_tensor(net.first.weight))
    assert found.tensors["first.weight"] == found.tensors["again.weight"] == weight
    assert found.layouts["first.weight"] == "float32 [4, 3]"
    assert found.differing(digest_state(net.state_dict())) == ("mask",)
    net.mask = None
    assert digest_state(net) == digest_state(net.state_dict())


def test_a_flipped_bit_and_what_one_side_lacks_are_named_and_the_order_is_no_difference():
    net = Net()
    other = copy.deepcopy(net)
    found = digest_state(net)
    assert pickle.loads(pickle.dumps(found)) == found == digest_state(other) != digest_state({})
    other.norm.weight.data.view(torch.int32)[2] ^= 1
    changed = digest_state(other)
    assert found.digest != changed.digest
    assert found.differing(changed) == changed.differing(found) == ("norm.weight",)
    tensors = {"a": torch.ones(2), "b": torch.zeros(2)}
    assert digest_state(tensors) == digest_state(dict(reversed(tensors.items())))
    assert digest_state(tensors).differing(
        digest_state({"b": tensors["b"], "c": tensors["a"]})
    ) == ("a", "c")
    zeros = (
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.int32),
        0,
        0.0,
        False,
        2,
        torch.tensor(0),
    )
    assert len({digest_state({"a": value}) for value in zeros}) == len(zeros)


def test_an_optimizers_state_has_names_and_numbers():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = digest_state(optimizer.state_dict())
    assert {
        "state.0.exp_avg",
        "state.1.exp_avg_sq",
        "param_groups.0.betas.1",
    } <= before.tensors.keys()
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.state[net.bias]["exp_avg"][0] += 1
    assert digest_state(optimizer.state_dict()).differing(before) == (
        "state.1.exp_avg",
        "param_groups.0.lr",
    )


DEEP: dict[str, object] = {"x": torch.ones(1)}
for _ in range(30):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"net.weight": torch.empty(2, device="meta")}, TypeError, r"net\.weight: "),
        (torch.ones(2), TypeError, "takes a module or a mapping such as a state_dict; got Tensor"),
        ({"a": {"b": 1}, "a.b": 2}, DetCallbacksError, r"'a\.b'"),
        (DEEP, DetCallbacksError, "more than 20 levels"),
    ],
)
def test_what_cannot_be_digested_is_named(state, error, message):
    with pytest.raises(error, match=message):
        digest_state(state)
