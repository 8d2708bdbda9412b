"""Observations: names, values and what is replayed."""

import dataclasses
import gc
import sys
import weakref
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from observing import mismatches, names, record, sites
from torch import Tensor, nn

from det_callbacks import (
    CoverageWarning,
    DivergenceWarning,
    ObserverContext,
    disable_hash_mode,
    enable_hash_mode,
    observe,
    observe_grad,
    observe_non_deterministic,
    observe_non_deterministic_grad,
)


@pytest.mark.parametrize("function", [observe, observe_non_deterministic, observe_grad, observe_non_deterministic_grad])
def test_without_an_observer_it_calls_nothing(function: Callable[[str, Tensor], object]) -> None:
    called: list[str] = []
    tensor = torch.ones(2)
    sys.setprofile(lambda frame, event, argument: called.append(str(argument)) if event.endswith("call") else None)
    try:
        function("x", tensor)
    finally:
        sys.setprofile(None)
    assert called == ["None", str(sys.setprofile)]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([("x", 1.0), ("y", 2.0)], [("z", "missing")]),
        ([("x", 1.0), ("z", 3.0)], [("y", "missing")]),
        ([("x", 1.0), ("new", 9.0), ("y", 2.0), ("z", 3.0)], [("new", "extra")]),
        ([("x", 1), ("y", 2.0), ("z", 3.0)], [("x", "structure")]),
        ([("x", -0.0), ("y", 2.0), ("z", 3.0)], [("x", "content")]),
    ],
)
def test_shorter_longer_and_otherwise(tmp_path: Path, values: list[Any], found: list[Any]) -> None:
    reference = record(tmp_path, ("x", 1.0), ("y", 2.0), ("z", 3.0))
    with pytest.warns(DivergenceWarning):
        assert mismatches(tmp_path, reference, *values) == found


def test_the_paths_of_nested_values(tmp_path: Path) -> None:
    point = namedtuple("point", "x y")

    @dataclasses.dataclass
    class Pair:
        left: Tensor
        right: str

    tree = {"k": [torch.ones(1), None], 3: point(1, 2.0), "d": Pair(torch.ones(1), "text"), "c": 1j}
    with ObserverContext(tmp_path, "run"):
        assert observe("name", tree) is tree
    paths = ("['k'][0]", "['k'][1]", "[3].x", "[3].y", "['d'].left", "['d'].right", "['c']")
    assert names(tmp_path / "run") == [f"name{path}" for path in paths]
    changed = {**tree, "d": Pair(torch.ones(1), "other")}
    with pytest.warns(DivergenceWarning):
        assert mismatches(tmp_path, tmp_path / "run", ("name", changed)) == [("name['d'].right", "content")]


def test_any_text_is_a_name(tmp_path: Path) -> None:
    names = ["a/b", "a.b", "../..", "run.json", "a#0.0", "x" * 1000, "\0", "é\n", "__metadata__"]
    for reference in (None, tmp_path / "r"):
        with ObserverContext(tmp_path, "r" if reference is None else "c", reference) as observer:
            for name in names:
                observe_non_deterministic(name, torch.rand(2))
    assert observer.verdict.verdict == "match"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "r"]


def test_what_cannot_be_a_name_or_an_observation(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with ObserverContext(tmp_path, "run"):
        observe("fine", 1)
        for function in (observe, observe_non_deterministic, observe_grad, observe_non_deterministic_grad):
            for name, error in (("", ValueError), ("x" * 10_000, ValueError), ("\ud800", ValueError), (3, TypeError)):
                with pytest.raises(error, match="name of an observation"):
                    function(name, torch.ones(1))  # type: ignore[operator, arg-type]  # a wrong one
        for tree, complaint in (
            ({1, 2}, "a set; .* a sorted list"),
            ([1, [lambda: 0]], r"'x\[1\]\[0\]' is a function"),
            (nn.Linear(1, 1), "state_dict"),
            (endless, "contain itself"),
            ({"a": ()}, "empty dict"),
            (np.ones(3), "as_tensor"),
            (b"", "bytes"),
        ):
            with pytest.raises((TypeError, ValueError), match=complaint):
                observe("x", tree)
            with pytest.raises(TypeError, match="on a tensor"):
                observe_grad("x", tree)  # type: ignore[arg-type]  # likewise


def test_occurrences_phases_and_modules_of_values_and_of_each_backward_pass(tmp_path: Path) -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return observe("x", x * 2)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x))

    x = torch.ones(2, requires_grad=True)
    with ObserverContext(tmp_path, "run") as observer:
        for _ in range(2):
            observe_grad("x", x)
            Outer()(observe("x", x)).sum().backward()
            (x * 2).sum().backward()
            observer.next_step()
    assert not x._backward_hooks
    for step in range(2):
        found = [(site.phase, site.module, site.op, site.name, site.occurrence) for site in sites(observer.path, step)]
        assert found == [
            ("forward", "", "", "x", 0),
            ("forward", "Outer.inner", "", "x", 0),
            ("forward", "Outer.inner", "", "x", 1),
            *(("backward", "", "", "grad of x", number) for number in range(2)),
        ]


def test_plain_values_are_replayed_exactly_in_what_is_returned(tmp_path: Path) -> None:
    plain = [1j, complex("nan+1j"), 0.1, -0.0, float("inf"), float("nan"), 7, -(2**70), True, None, "tëxt"]
    tree = {"time": 1.5, "plain": plain, "tensor": torch.ones(1)}
    with ObserverContext(tmp_path, "r"):
        assert observe_non_deterministic("t", tree) is tree
    other = {"time": 2.5, "plain": ["other", *[0] * 9, 3], "tensor": torch.zeros(1)}
    with ObserverContext(tmp_path, "c", tmp_path / "r") as observer:
        replayed = observe_non_deterministic("t", other)
    assert repr(replayed) == repr(tree)
    assert replayed["tensor"] is other["tensor"]
    assert observer.verdict.verdict == "match"
    assert observer.verdict.coverage.replayed == {"t": {"count": 13, "differing": 13, "mib_per_step": 4e-06}}


def test_observers_change_no_bit(tmp_path: Path) -> None:
    def train(*, is_observed: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(2, 4)
            if is_observed:
                observe("x", x)
                observe_non_deterministic("noise", torch.randn(0))
                enable_hash_mode()
            hidden = model(x)
            observe_non_deterministic("hidden", hidden)
            observe_grad("hidden", hidden)
            observe_non_deterministic_grad("hidden again", hidden)
            hidden.sum().backward()
            optimizer.step()
            disable_hash_mode()
        return torch.cat([*(weight.detach().flatten() for weight in model.parameters()), torch.get_rng_state().float()])

    plain = train(is_observed=False)
    with ObserverContext(tmp_path, "r"):
        assert torch.equal(train(is_observed=True), plain)
    with ObserverContext(tmp_path, "c", tmp_path / "r", raise_on_mismatch=True):
        assert torch.equal(train(is_observed=True), plain)


class _Observing(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        with pytest.warns(CoverageWarning, match="DataLoader's worker"):
            observe("inside", index)
        return torch.full((1,), float(index))


def test_a_worker_says_that_it_records_nothing(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(_Observing(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    with ObserverContext(tmp_path, "run"):
        (batch,) = loader
        observe("batch", batch)
    assert names(tmp_path / "run") == ["batch"]


def test_modules_of_earlier_steps_are_not_kept(tmp_path: Path) -> None:
    known = []
    with ObserverContext(tmp_path, "run") as observer:
        for _ in range(3):
            layer = nn.Linear(2, 2)
            known.append(weakref.ref(layer))
            observe("y", layer(torch.ones(2)))
            observer.next_step()
        del layer
        gc.collect()
        assert [one() for one in known] == [None] * 3
    assert [site.module for site in sites(tmp_path / "run", 2)] == [""]


def test_a_gradient_that_never_comes_is_reported(tmp_path: Path) -> None:
    def run(name: str, reference: Path | None, *, goes_back: bool) -> ObserverContext:
        x = torch.ones(2, requires_grad=True)
        left, right = torch.ones(2, 2, requires_grad=True).unbind()
        with ObserverContext(tmp_path, name, reference) as observer:
            observe_grad("x", x)
            observe_grad("never", torch.ones(2))
            observe_non_deterministic_grad("undefined", right)
            left.sum().backward()  # the hook of the other is called with None
            if goes_back:
                x.sum().backward()
        return observer

    with (
        pytest.warns(CoverageWarning, match="grad of never was observed, and no backward"),
        pytest.warns(CoverageWarning, match="grad of undefined was observed, and no backward"),
    ):
        run("r", None, goes_back=True)
    assert sorted(names(tmp_path / "r")) == ["grad of never", "grad of undefined", "grad of x"]
    with (
        pytest.warns(CoverageWarning, match="grad of x was observed"),
        pytest.warns(CoverageWarning, match="grad of (never|undefined)"),
        pytest.warns(DivergenceWarning),
    ):
        found = run("c", tmp_path / "r", goes_back=False).mismatches
    assert ("grad of x", "structure") in [(one.name, one.kind) for one in found]


def test_a_gradient_of_another_branch_is_left_alone(tmp_path: Path) -> None:
    def gradients(name: str, scale: float, reference: Path | None = None) -> tuple[list[float], list[float]]:
        a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        left, right = a * 1, b * 1
        with ObserverContext(tmp_path, name, reference):
            observe_non_deterministic_grad("right", right)  # whose backward runs first
            ((left + right) * scale).sum().backward()  # one tensor is the gradient of both
        return a.grad.tolist(), b.grad.tolist()

    assert gradients("r", 2.0) == ([2.0], [2.0])
    assert gradients("c", 3.0, tmp_path / "r") == ([3.0], [2.0])
