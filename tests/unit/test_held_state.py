"""What a step changes is put back, by kind; what cannot be is named."""

import array
import collections
import functools
import io
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from det_callbacks.audit import HeldState
from det_callbacks.errors import StepNotRepeatableError


class Slotted:
    __slots__ = ("count", "tensor")

    def __init__(self) -> None:
        self.count = 1
        self.tensor = torch.ones(2)

    def add(self) -> None:
        self.count += 1


def replace(name: str, value: Any) -> Callable[[Any], object]:
    return lambda owner: setattr(owner, name, value)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "attribute": (lambda: SimpleNamespace(x=1), replace("x", 2), lambda it: it.x),
    "new attribute": (lambda: SimpleNamespace(x=1), replace("y", 2), lambda it: sorted(vars(it))),
    "deleted attribute": (lambda: SimpleNamespace(x=1), lambda it: delattr(it, "x"), lambda it: it.x),
    "slot": (Slotted, replace("count", 5), lambda it: it.count),
    "list": (lambda: [1, [2]], lambda it: it[1].append(3), lambda it: [it[0], list(it[1])]),
    "list emptied": (lambda: [1, 2], lambda it: it.clear(), list),
    "dict": (lambda: {"a": {"b": 1}}, lambda it: it["a"].update(c=2), lambda it: dict(it["a"])),
    "order of a dict": (lambda: {"a": 1, "b": 2}, lambda it: it.update(a=it.pop("a")), list),
    "ordered dict": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda it: it.move_to_end("a"),
        lambda it: [*it, *reversed(it)],
    ),
    "default dict": (lambda: collections.defaultdict(list), lambda it: it["new"].append(1), dict),
    "counter": (lambda: collections.Counter("aab"), lambda it: it.update("b"), dict),
    "set": (lambda: {1, 2}, lambda it: it.add(3), sorted),
    "deque": (lambda: collections.deque([1, 2, 3], maxlen=3), lambda it: it.append(4), list),
    "bytearray": (lambda: bytearray(b"abc"), lambda it: it.extend(b"d"), bytes),
    "array": (lambda: array.array("d", [1.0]), lambda it: it.append(2.0), list),
    "numpy array": (lambda: np.arange(3.0), lambda it: it.__setitem__(0, np.nan), lambda it: it.tolist()),
    "array of objects": (
        lambda: np.array([[1], "a"], dtype=object),
        lambda it: it.__setitem__(1, "b"),
        lambda it: it.tolist(),
    ),
    "random.Random": (lambda: random.Random(1), lambda it: it.random(), lambda it: it.getstate()),
    "numpy generator": (
        lambda: np.random.default_rng(1),
        lambda it: it.random(),
        lambda it: str(it.bit_generator.state),
    ),
    "numpy random state": (lambda: np.random.RandomState(1), lambda it: it.rand(), lambda it: str(it.get_state())),
    "torch generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda it: torch.rand(1, generator=it),
        lambda it: it.get_state().tolist(),
    ),
    "tensor": (lambda: torch.zeros(2), lambda it: it.add_(1), lambda it: it.tolist()),
    "signed zero": (lambda: torch.zeros(2), lambda it: it.neg_(), lambda it: it.signbit().tolist()),
    "view": (lambda: torch.zeros(2, 3)[:, 1:].t(), lambda it: it.add_(1), lambda it: [it.tolist(), it.stride()]),
    "resized tensor": (lambda: torch.ones(2), lambda it: it.resize_(5), lambda it: it.tolist()),
    "data of a tensor": (
        lambda: nn.Parameter(torch.ones(2)),
        replace("data", torch.zeros(3)),
        lambda it: it.tolist(),
    ),
    "gradient": (
        lambda: nn.Parameter(torch.ones(2)),
        lambda it: it.sum().backward(),
        lambda it: None if it.grad is None else it.grad.tolist(),
    ),
    "sparse tensor": (
        lambda: torch.ones(2, 2).to_sparse(),
        lambda it: it.mul_(2),
        lambda it: it.to_dense().tolist(),
    ),
    "buffer": (lambda: nn.BatchNorm1d(2), replace("running_mean", torch.ones(2)), lambda it: str(it.running_mean)),
    "hook of a module": (
        lambda: nn.Linear(1, 1),
        lambda it: it.register_forward_hook(print),
        lambda it: len(it._forward_hooks),
    ),
    "closure": (lambda: counter(), lambda it: it(), lambda it: it.__closure__[0].cell_contents),
    "partial": (lambda: functools.partial(print, [1]), lambda it: it.args[0].append(2), lambda it: it.args[0][:]),
    "method": (lambda: Slotted().add, lambda it: it(), lambda it: it.__self__.count),
    "optimizer": (
        lambda: stepped(),
        lambda it: (it.step(), it.param_groups[0].update(lr=5.0)),
        lambda it: str(it.state_dict()),
    ),
}


def counter() -> Callable[[], int]:
    count = 0

    def add() -> int:
        nonlocal count
        count += 1
        return count

    return add


def stepped() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.AdamW([parameter])


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_put_back_and_named(kind: str) -> None:
    make, change, read = CHANGES[kind]
    value = make()
    owner = SimpleNamespace(value=value)
    before = read(value)
    held = HeldState({"owner": owner})
    assert held.put_back() == []
    change(value)
    changed = held.put_back()
    assert changed
    assert all("owner" in name for name in changed)
    assert owner.value is value
    assert read(value) == before
    assert held.put_back() == []


def test_the_process_generators_are_put_back() -> None:
    held = HeldState({})
    draws = [(random.random(), np.random.rand(), torch.rand(1).item()) for _ in range(1)]
    assert held.put_back() == ["Python's generator", "NumPy's generator", "torch's CPU generator"]
    assert [(random.random(), np.random.rand(), torch.rand(1).item())] == draws


@pytest.mark.parametrize(
    ("make", "move", "name"),
    [
        (lambda: (number for number in range(9)), next, "a Python generator"),
        (lambda: iter([1, 2, 3]), next, "an iterator"),
        (lambda: zip([1, 2], [3, 4], strict=True), next, "an iterator"),
        (lambda: io.StringIO("abc"), lambda it: it.read(1), "a file"),
        (lambda: nn.Parameter(torch.ones(1)), lambda it: it.register_hook(print), "hooks on a tensor"),
    ],
)
def test_what_cannot_be_put_back_is_named(make: Any, move: Any, name: str) -> None:
    owner = SimpleNamespace(thing=make(), count=1)
    held = HeldState({"model": owner})
    assert held.put_back() == []
    move(owner.thing)
    owner.count = 2
    with pytest.raises(StepNotRepeatableError, match=rf"model\.thing \({name}\)"):
        held.put_back()
    assert owner.count == 1


def test_cycles_shared_objects_and_what_is_left_alone() -> None:
    class Left:
        count = 0

    left, shared = Left(), [1]
    owner = SimpleNamespace(left=left, one=shared, other=shared)
    owner.itself = owner
    held = HeldState({"owner": owner}, left=(Left,))
    left.count = 3
    shared.append(2)
    assert held.put_back() == ["owner.one"]
    assert left.count == 3
    assert owner.other is shared


def test_nothing_of_it_is_seen_by_modes_or_autograd() -> None:
    model = nn.Linear(2, 2)
    saved = model(torch.ones(1, 2)).exp()
    held = HeldState({"model": model, "saved": saved})
    saved.data.zero_()
    held.put_back()
    assert saved._version == 0
    saved.sum().backward()
    assert model.bias.grad is not None
    assert torch.equal(model.bias.grad, saved.detach()[0])
