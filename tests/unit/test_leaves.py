"""What is found in structures of all kinds, and by which names."""

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from det_callbacks.trace.leaves import MAX_DEPTH, flatten, leaves


class Graph:
    """Shows what its storage holds as attributes, as torch_geometric's data does."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["_store"] = UserDict(values)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("no code of the class runs")

    num_nodes = property(lambda self: self.nowhere)


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


class Unread(Mapping[str, Any]):
    """Holds its entries in one dictionary, and counts what is read of it as an error."""

    def __init__(self, entries: dict[str, Any], **others: Any) -> None:
        self.entries = entries
        vars(self).update(others)

    def _fail(self, *_: Any) -> Any:
        raise AssertionError("no code of the class runs")

    __getitem__ = __iter__ = __len__ = __bool__ = __eq__ = __hash__ = __repr__ = _fail  # type: ignore[assignment]


class UnreadDict(dict[str, Any]):
    __getitem__ = __iter__ = __len__ = items = values = keys = get = Unread._fail  # type: ignore[assignment]


class UnreadList(list[Any]):
    __getitem__ = __iter__ = __len__ = Unread._fail  # type: ignore[assignment]


class UnreadPoint(Point):
    __slots__ = ()
    __getitem__ = __iter__ = __len__ = Unread._fail  # type: ignore[assignment]


class Key:
    __repr__ = Unread._fail


def with_attributes(container: Any, **attributes: Any) -> Any:
    vars(container).update(attributes)
    return container


ONE, TWO = torch.ones(1), torch.zeros(2)


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ([ONE, (TWO, 1)], ["[0]", "[1][0]", "[1][1]"]),
        (UserDict({"input_ids": ONE, "mask": [TWO]}), ["['input_ids']", "['mask'][0]"]),
        (Point(ONE, {"a": 1.5}), [".x", ".y['a']"]),
        (Sample(ONE, rest={"k": True}), [".image", "._label", ".rest['k']"]),
        (
            Graph(**{"x": ONE, "not a name": TWO, "_store": 1}),
            [".x", "['_store']", "['not a name']"],
        ),
        (Slotted(ONE, TWO), ["._hidden", ".shown"]),
        (Plain(tensors=[ONE], _private=TWO), [".tensors[0]", "._private"]),
        ([Plain(), ONE], ["[1]"]),
        (Unread({"a": ONE}, extra=TWO), ["['a']", ".extra"]),
        (Unread({"a": ONE}, others={"b": TWO}), [".entries['a']", ".others['b']"]),
        (with_attributes(UnreadDict(a=ONE), a=ONE, extra=TWO), ["['a']", ".extra"]),
        (with_attributes(UnreadList([ONE]), extra=TWO), ["[0]", ".extra"]),
        (UnreadPoint(ONE, TWO), [".x", ".y"]),
        ({Key(): ONE, (1, "a"): TWO, True: 1}, ["[(1, 'a')]", "[Key]", "[True]"]),
        (MappingProxyType({"b": TWO, "a": ONE}), ["['a']", "['b']"]),
        # the same object as an entry
        (with_attributes(UnreadDict(x=3, y=4), k=3), ["['x']", "['y']", ".k"]),
        (ONE, [""]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_and_numbers_are_named_by_their_path(tree, names):
    assert [name for name, _ in flatten(tree, "", is_whole=True)] == names
    # private attributes are left out otherwise, unless a class shows them
    is_hidden = {"._hidden", "._private"}
    assert [name for name, _ in flatten(tree, "")] == [
        name for name in names if name not in is_hidden
    ]


def test_what_contains_itself_is_listed_once_and_what_is_nested_too_deeply_is_a_leaf():
    around: list[Any] = [ONE]
    around += [around, around]
    parent, child = Plain(value=ONE), Plain(value=TWO)
    parent.children, child.parent = [child, child], parent
    assert [name for name, _ in leaves(around, "b")] == ["b[0]"]
    assert [name for name, _ in leaves(parent, "b")] == ["b.value", "b.children[0].value"]
    deep: Any = ONE
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    assert [*leaves(deep, "b")] == [("b" + "[0]" * MAX_DEPTH, [ONE])]


@pytest.mark.parametrize(
    "leaf", [None, "text", torch.float32, Tensor, len, {1}, np.ones(2), torch.Generator()]
)
def test_what_cannot_be_looked_into_is_a_leaf(leaf):
    assert [name for name, _ in leaves([leaf], "b")] == ["b[0]"]
    assert not list(flatten([leaf], "b"))


@pytest.mark.parametrize(
    "wrap",
    [dict, UserDict, lambda pairs: [{"inner": dict(pairs)}], lambda pairs: Graph(**dict(pairs))],
)
def test_the_order_of_a_mapping_does_not_matter(wrap):
    pairs = [("b", ONE), ("a", [TWO, ONE]), ("c", {"z": 1, "y": 2})]
    first, second = ([*leaves(wrap(order), "t", is_whole=True)] for order in (pairs, pairs[::-1]))
    assert [name for name, _ in first] == [name for name, _ in second]
    assert all(value is other for (_, value), (_, other) in zip(first, second, strict=True))
