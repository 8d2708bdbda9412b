"""Torch's alerts caught below the callback: by the watch outside traced steps, and by what both it and a trace use."""

import warnings
from collections.abc import Callable, Iterator
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


class Net(nn.Module):
    """Calls a function in a module called "body"."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = Body(call)

    def forward(self, values: Tensor) -> Tensor:
        return self.body(values)


class Body(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, values: Tensor) -> Tensor:
        return self.call(values)


def watch(call: Callable[[Tensor], Tensor], *allow: str, num_calls: int = 1) -> tuple[NondeterministicOps, Tensor]:
    """Call a function in a watched model, as often as asked; the flags must be what they were."""
    flags, filters = torch.get_deterministic_debug_mode(), list(warnings.filters)
    alerts, model = NondeterministicOps(allow), Net(call)
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
def test_under_error_it_is_refused_unless_allowed(call: Any, op: str, heard: list[warnings.WarningMessage]) -> None:
    with enforce_determinism({}):
        with pytest.raises(NondeterministicOpError) as refused:
            watch(call)
        assert (refused.value.op, refused.value.module) == (op, "body")
        assert f"tests/unit/test_alerts.py:{call.__code__.co_firstlineno + 1} in {call.__name__}" in str(refused.value)
        alerts, output = watch(call, f"forward/body:{op}", num_calls=3)
    (found,) = alerts.found
    assert (found.op, found.is_allowed, found.num_calls) == (op, True, 3)
    assert heard == []
    with enforce_determinism({"deterministic_algorithms": "disabled"}):
        assert torch.equal(output, call(torch.arange(4.0)))


@pytest.mark.parametrize(("call", "op"), [(put, PUT), (unpool, UNPOOL)])
def test_under_warn_it_is_warned_of_once_and_counted(call: Any, op: str, heard: list[warnings.WarningMessage]) -> None:
    with enforce_determinism({"deterministic_algorithms": "warn"}):
        alerts, output = watch(call, num_calls=3)
    (warning,) = heard
    assert warning.category is NondeterministicOpWarning
    assert str(warning.message).startswith(f"{op} in body at tests/unit/test_alerts.py:")
    (found,) = alerts.found
    assert (found.op, found.is_allowed, found.num_calls) == (op, False, 3)
    with enforce_determinism({"deterministic_algorithms": "disabled"}):
        assert torch.equal(output, call(torch.arange(4.0)))


def test_each_place_is_found_and_told_once(heard: list[warnings.WarningMessage]) -> None:
    def twice(values: Tensor) -> Tensor:
        put(values)
        return put(values)

    def told() -> None:
        num_told.append(len(alerts.found))

    num_told: list[int] = []
    alerts = NondeterministicOps()
    alerts.on_new = told
    watching = NondeterministicOpWatch(alerts, model := Net(twice))
    with enforce_determinism({"deterministic_algorithms": "warn"}):
        watching.open()
        model(torch.arange(4.0))
        model(torch.arange(4.0))
        watching.close()
    alerts.close()
    assert [found.source[1].rpartition(" ")[2] for found in alerts.found] == ["twice", "twice"]
    assert [found.num_calls for found in alerts.found] == [2, 2]
    assert num_told == [1, 2]
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


@pytest.mark.parametrize(
    ("module", "source", "place"),
    [
        ("body", ("a.py:1 in f", "b.py:2 in g"), f"{PUT} in body at a.py:1 in f (forward)"),
        ("", ("a.py:1 in f",), f"{PUT} outside any module at a.py:1 in f (forward)"),
        ("?", (), f"{PUT} in an unknown module (forward)"),
    ],
)
def test_a_place_in_words(module: str, source: tuple[str, ...], place: str) -> None:
    found = NondeterministicOp(op=PUT, phase="forward", module=module, source=source, message="m", is_allowed=True)
    assert found.place == place
