"""Regions of ops: nested, repeated, among other modes and closed out of order."""

from pathlib import Path
from typing import Any

import pytest
import torch
from observing import sites
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from det_callbacks import (
    CoverageWarning,
    HashMode,
    ObserverContext,
    TraceError,
    disable_hash_mode,
    enable_hash_mode,
    observe,
    observe_non_deterministic,
)
from det_callbacks.observers.registry import REGISTRY


@pytest.fixture(autouse=True)
def _no_observer_is_left() -> Any:
    yield
    assert not is_in_torch_dispatch_mode()
    assert REGISTRY.sink is None


def test_ops_are_sites_only_inside_regions(tmp_path: Path) -> None:
    x = torch.ones(2)
    with ObserverContext(tmp_path, "run") as observer:
        x + 1
        observer.enable_mode()
        x * 2
        with enable_hash_mode():
            x * 3
        disable_hash_mode()
        observe("between", x - 1)
        with enable_hash_mode():
            x / 2
    ops = [site.op or site.name for site in sites(observer.path) if site.op or site.name]
    assert ops == ["aten.mul.Tensor", "aten.mul.Tensor", "between", "aten.div.Tensor"]


def test_a_region_too_many_is_an_error(tmp_path: Path) -> None:
    with ObserverContext(tmp_path, "run"):
        observe("x", 1)
        with pytest.raises(TraceError, match="more often"):
            disable_hash_mode()


@pytest.mark.parametrize("mode", [lambda: FlopCounterMode(display=False), DebugMode])
def test_a_region_inside_another_mode(tmp_path: Path, mode: Any) -> None:
    x = torch.ones(2, 2)
    with mode(), ObserverContext(tmp_path, "run") as observer, enable_hash_mode():
        x @ x
    assert [site.op for site in sites(observer.path) if site.op] == ["aten.mm.default"]


@pytest.mark.parametrize("mode", [lambda: FlopCounterMode(display=False), DebugMode])
def test_a_mode_opened_in_a_region_and_closed_after_it(tmp_path: Path, mode: Any) -> None:
    x = torch.ones(2, 2)
    with ObserverContext(tmp_path, "run") as observer:
        enable_hash_mode()
        other = mode()
        other.__enter__()
        x @ x
        disable_hash_mode()
        x * x
        enable_hash_mode()
        x / x
        disable_hash_mode()
        other.__exit__(None, None, None)
        observe("x", x)
        with enable_hash_mode():
            x - x
        assert _get_current_dispatch_mode_stack() == []
    assert [site.op for site in sites(observer.path) if site.op] == [
        "aten.mm.default",
        "aten.div.Tensor",
        "aten.sub.Tensor",
    ]


def test_a_mode_opened_before_a_region_and_closed_in_it(tmp_path: Path) -> None:
    x = torch.ones(2, 2)
    with ObserverContext(tmp_path, "run") as observer:
        other = FlopCounterMode(display=False)
        other.__enter__()
        enable_hash_mode()
        x @ x
        other.__exit__(None, None, None)
        with pytest.warns(CoverageWarning, match="Close the region first"):
            disable_hash_mode()
        assert _get_current_dispatch_mode_stack() == []
        with enable_hash_mode():
            x - x
    assert [site.op for site in sites(observer.path) if site.op] == ["aten.mm.default", "aten.sub.Tensor"]


def test_a_mode_left_open_above_a_region(tmp_path: Path) -> None:
    other = FlopCounterMode(display=False)
    with ObserverContext(tmp_path, "run"):
        enable_hash_mode()
        torch.ones(2)
        other.__enter__()
    assert len(_get_current_dispatch_mode_stack()) == 1
    other.__exit__(None, None, None)
    assert _get_current_dispatch_mode_stack() == []
    assert not is_in_torch_dispatch_mode()


def test_hash_mode_inside_a_region(tmp_path: Path) -> None:
    x = torch.ones(2)
    with ObserverContext(tmp_path, "run") as observer, enable_hash_mode():
        with HashMode() as mode:
            x * 2
        x * 3
    assert mode.trace is not None
    assert [site.op for site in mode.trace.program.sites if site.op] == ["aten.mul.Tensor"]
    assert len([site for site in sites(observer.path) if site.op == "aten.mul.Tensor"]) == 2


def test_what_was_written_between_regions_is_an_input_of_the_next(tmp_path: Path) -> None:
    x = torch.ones(2)
    with ObserverContext(tmp_path, "run") as observer:
        with enable_hash_mode():
            y = x * 2
        y.add_(1)
        with enable_hash_mode():
            y / 2
    found = sites(observer.path)
    assert [site.op or site.role for site in found] == ["input", "aten.mul.Tensor", "input", "aten.div.Tensor"]
    assert found[3].inputs == (2,)


def test_what_was_put_back_is_what_later_ops_read(tmp_path: Path) -> None:
    x = torch.ones(2)
    with ObserverContext(tmp_path, "run") as observer, enable_hash_mode():
        y = x * 2
        observe("seen", y)
        y + 1
        observe_non_deterministic("put back", y)
        y / 2
    inputs = {site.name or site.op: site.inputs for site in sites(observer.path)[1:]}
    assert inputs == {
        "aten.mul.Tensor": (0,),
        "seen": (1,),
        "aten.add.Tensor": (1,),
        "put back": (1,),
        "aten.div.Tensor": (4,),
    }
