"""What is found in structures of all kinds, and by which names."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from det_callbacks.trace.leaves import MAX_DEPTH, flatten, leaves


class Storage(UserDict[str, Any]):
    """Keeps a graph's values, as torch_geometric's storage does."""


class Graph:
    """Shows what its storage holds as attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["_store"] = Storage(values)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("no code of the class runs")

    @property
    def num_nodes(self) -> int:
        raise AssertionError("no code of the class runs")


class Slotted:
    __slots__ = ("_hidden", "shown", "unset")

    def __init__(self, shown: Any, hidden: Any) -> None:
        self.shown, self._hidden = shown, hidden


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Sample:
    image: Any
    _label: Any = 3
    rest: dict[str, Any] = field(default_factory=dict)


class Plain:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


ONE, TWO = torch.ones(1), torch.zeros(2)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: [ONE, (TWO, 1)], ["batch[0]", "batch[1][0]", "batch[1][1]"]),
        (lambda: UserDict({"input_ids": ONE, "mask": [TWO]}), ["batch['input_ids']", "batch['mask'][0]"]),
        (lambda: Point(ONE, {"a": 1.5}), ["batch.x", "batch.y['a']"]),
        (lambda: Sample(ONE, rest={"k": True}), ["batch.image", "batch._label", "batch.rest['k']"]),
        (lambda: Graph(x=ONE, edge_index=TWO), ["batch.x", "batch.edge_index"]),
        (
            lambda: Graph(**{"x": ONE, "not a name": TWO, "_store": 1}),
            ["batch.x", "batch['not a name']", "batch['_store']"],
        ),
        (lambda: Slotted(ONE, TWO), ["batch._hidden", "batch.shown"]),
        (lambda: Plain(tensors=[ONE], _private=TWO), ["batch.tensors[0]", "batch._private"]),
        (lambda: ONE, ["batch"]),
    ],
)
def test_tensors_and_numbers_are_named_by_their_path(make: Callable[[], Any], names: list[str]) -> None:
    assert [name for name, _ in flatten(make(), "batch", is_whole=True)] == names


def test_private_attributes_are_left_out_unless_a_class_shows_them() -> None:
    tree = [Plain(shown=ONE, _private=TWO), Graph(x=ONE), Sample(ONE)]
    assert [name for name, _ in flatten(tree, "out")] == [
        "out[0].shown",
        "out[1].x",
        "out[2].image",
        "out[2]._label",
    ]


def test_what_contains_itself_is_listed_once() -> None:
    around: list[Any] = [ONE]
    around += [around, around]
    parent, child = Plain(value=ONE), Plain(value=TWO)
    parent.children, child.parent = [child, child], parent
    assert [name for name, _ in leaves(around, "b")] == ["b[0]"]
    assert [name for name, _ in leaves(parent, "b")] == ["b.value", "b.children[0].value"]


def test_what_is_nested_too_deeply_is_a_leaf() -> None:
    tree: Any = ONE
    for _ in range(MAX_DEPTH + 1):
        tree = [tree]
    ((name, leaf),) = leaves(tree, "b")
    assert (name, leaf) == ("b" + "[0]" * MAX_DEPTH, [ONE])


class Samples(np.ndarray[Any, Any]):
    """An array with attributes, and elements besides."""


@pytest.mark.parametrize(
    "leaf", [None, "text", torch.float32, Tensor, len, {1}, np.ones(2), torch.Generator(), np.ones(1).view(Samples)]
)
def test_what_cannot_be_looked_into_is_a_leaf(leaf: Any) -> None:
    assert [name for name, _ in leaves([leaf], "b")] == ["b[0]"]
    assert not list(flatten([leaf], "b"))
