"""Torch's alerts caught below the callback: by the watch outside traced steps, and by what both it and a trace use."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from det_callbacks.errors import NondeterministicOpError, NondeterministicOpWarning
from det_callbacks.runs.evidence import NondeterministicOp
from det_callbacks.settings import enforce_determinism
from det_callbacks.trace.dispatch import DispatchMode
from det_callbacks.trace.nondeterministic_ops import NondeterministicOps, NondeterministicOpWatch

PUT = "aten.put_.default"
UNPOOL = "aten.max_unpool2d.default"


def put(values: Tensor) -> Tensor:
    return values.put_(torch.tensor([0]), torch.ones(1))


def unpool(values: Tensor) -> Tensor:
    return torch.nn.functional.max_unpool2d(values.view(1, 2, 2), torch.tensor([[[0, 1], [2, 3]]]), 1)


class Calling(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, values: Tensor) -> Tensor:
        return self.call(values)


def watch(call: Callable[[Tensor], Tensor], *allow: str, num_calls: int = 1) -> tuple[NondeterministicOps, Tensor]:
    """Call a function in a watched model, as often as asked; the flags must be what they were."""
    flags, filters = torch.get_deterministic_debug_mode(), list(warnings.filters)
    alerts, model = NondeterministicOps(allow), nn.Sequential(OrderedDict(body=Calling(call)))
    watching = NondeterministicOpWatch(alerts, model)
    watching.open()
    try:
        for _ in range(num_calls):
            output = model(torch.arange(4.0))
            assert torch.get_deterministic_debug_mode() == flags
    finally:
        watching.close()
        alerts.close()
        assert torch.get_deterministic_debug_mode() == flags
        assert list(warnings.filters) == filters
    return alerts, output


@pytest.fixture
def heard() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@pytest.mark.parametrize(("call", "op"), [(put, PUT), (unpool, UNPOOL)])
def test_it_is_refused_let_through_or_warned_of(call: Any, op: str, heard: list[warnings.WarningMessage]) -> None:
    line = f"tests/unit/test_alerts.py:{call.__code__.co_firstlineno + 1} in {call.__name__}"
    with enforce_determinism({}):
        with pytest.raises(NondeterministicOpError) as refused:
            watch(call)
        assert (refused.value.op, refused.value.module) == (op, "body")
        assert line in str(refused.value)
        allowed, allowed_output = watch(call, f"forward/body:{op}", num_calls=3)
    assert heard == []
    with enforce_determinism({"deterministic_algorithms": "warn"}):
        warned, warned_output = watch(call, num_calls=3)
    (warning,) = heard
    assert warning.category is NondeterministicOpWarning
    assert str(warning.message).startswith(f"{op} in body at {line}")
    for alerts, output, is_allowed in ((allowed, allowed_output, True), (warned, warned_output, False)):
        (found,) = alerts.found
        assert (found.op, found.is_allowed, found.num_calls) == (op, is_allowed, 3)
        with enforce_determinism({"deterministic_algorithms": "disabled"}):
            assert torch.equal(output, call(torch.arange(4.0)))


def test_each_place_is_found_and_told_once(heard: list[warnings.WarningMessage]) -> None:
    def twice(values: Tensor) -> Tensor:
        put(values)
        return put(values)

    with enforce_determinism({"deterministic_algorithms": "warn"}):
        alerts, _ = watch(twice, num_calls=2)
    assert [found.source[1].rpartition(" ")[2] for found in alerts.found] == ["twice", "twice"]
    assert [found.num_calls for found in alerts.found] == [2, 2]
    assert len(heard) == 2


@pytest.mark.parametrize("algorithms", ["error", "warn"])
def test_other_errors_pass_as_they_are_and_the_flags_go_back(algorithms: str) -> None:
    def wrong(values: Tensor) -> Tensor:
        return values.put_(torch.tensor([99]), torch.ones(1), accumulate=True)

    with enforce_determinism({"deterministic_algorithms": algorithms}):
        with pytest.raises(IndexError):
            watch(wrong)
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
            watch(lambda values: values.view(2, 2) @ torch.ones(3, 3))


def test_nothing_is_watched_before_opening_and_after_closing(heard: list[warnings.WarningMessage]) -> None:
    alerts = NondeterministicOps()
    watching = NondeterministicOpWatch(alerts, nn.Identity())
    with enforce_determinism({"deterministic_algorithms": "warn"}):
        put(torch.zeros(2))
        watching.open()
        watching.open()
        watching.close()
        watching.close()
        put(torch.zeros(2))
    assert alerts.found == ()
    assert [item.category for item in heard] == [UserWarning, UserWarning]


class Other(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_closing_below_another_mode_pops_no_stranger() -> None:
    alerts = NondeterministicOps()
    watching = NondeterministicOpWatch(alerts, nn.Identity())
    other = Other()
    watching.open()
    other.__enter__()
    watching.close()
    assert other.is_on_top
    with enforce_determinism({}), pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        put(torch.zeros(2))
    assert alerts.found == ()
    other.__exit__(None, None, None)
    torch.utils._python_dispatch._get_current_dispatch_mode().__exit__(None, None, None)  # the one left below


def test_a_place_in_words() -> None:
    found = NondeterministicOp(op=PUT, phase="forward", module="", source=("a.py:1 in f",), message="", is_allowed=True)
    assert found.place == f"{PUT} outside any module at a.py:1 in f (forward)"
    assert replace(found, module="?", source=()).place == f"{PUT} in an unknown module (forward)"
