"""Observations: names, values and what is replayed; ObserverContext: steps, raising,
refusals, and regions of ops.
"""

import dataclasses
import gc
import sys
import weakref
from collections import namedtuple
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from det_callbacks import (
    CoverageWarning,
    DivergenceError,
    DivergenceWarning,
    NothingComparedError,
    ObserverContext,
    ReferenceFormatError,
    ReferenceNotFoundError,
    RunExistsError,
    TraceError,
    disable_hash_mode,
    enable_hash_mode,
    observe,
    observe_grad,
    observe_non_deterministic,
    observe_non_deterministic_grad,
)
from det_callbacks.runs.manifest import read_manifest, write_manifest
from det_callbacks.runs.program import Site
from det_callbacks.runs.store import Run


def sites(folder: Path, step: int = 0) -> tuple[Site, ...]:
    return Run.open(folder).view(0, 0, step).program.sites


def names(folder: Path, step: int = 0) -> list[str]:
    return [site.name or site.op for site in sites(folder, step)]


def watch(
    folder: Path, name: str, reference: Path | None = None, /, **values: Any
) -> ObserverContext:
    with ObserverContext(folder, name, reference) as observer:
        for key, value in values.items():
            observe(key, value)
    return observer


def kinds(observer: ObserverContext) -> list[tuple[str | None, str]]:
    return [(found.name, found.kind) for found in observer.mismatches]


@pytest.mark.parametrize(
    "function", [observe, observe_non_deterministic, observe_grad, observe_non_deterministic_grad]
)
def test_without_an_observer_it_calls_nothing(function):
    called: list[str] = []
    tensor = torch.ones(2)
    sys.setprofile(
        lambda frame, event, argument: (
            called.append(str(argument)) if event.endswith("call") else None
        )
    )
    try:
        function("x", tensor)
    finally:
        sys.setprofile(None)
    assert called == ["None", str(sys.setprofile)]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"x": 1.0, "y": 2.0}, [("z", "missing")]),
        ({"x": 1.0, "z": 3.0}, [("y", "missing")]),
        ({"x": 1.0, "new": 9.0, "y": 2.0, "z": 3.0}, [("new", "extra")]),
        ({"x": 1, "y": 2.0, "z": 3.0}, [("x", "structure")]),
        ({"x": -0.0, "y": 2.0, "z": 3.0}, [("x", "content")]),
    ],
)
def test_shorter_longer_and_otherwise(tmp_path, values, found):
    reference = watch(tmp_path, "reference", x=1.0, y=2.0, z=3.0).path
    with pytest.warns(DivergenceWarning):
        assert kinds(watch(tmp_path, "current", reference, **values)) == found


def test_what_is_a_name_and_what_cannot_be_a_name_or_an_observation(tmp_path):
    endless: list[Any] = []
    endless.append(endless)
    with ObserverContext(tmp_path, "run"):
        for name in ("a/b", "../..", "run.json", "a#0.0", "x" * 1000, "\0", "é\n", "__metadata__"):
            observe_non_deterministic(name, torch.rand(2))
        for function in (
            observe,
            observe_non_deterministic,
            observe_grad,
            observe_non_deterministic_grad,
        ):
            for name, error in (
                ("", ValueError),
                ("x" * 10_000, ValueError),
                ("\ud800", ValueError),
                (3, TypeError),
            ):
                with pytest.raises(error, match="name of an observation"):
                    function(name, torch.ones(1))  # type: ignore[operator, arg-type]  # a wrong one
        for tree, complaint in (
            ({1, 2}, "a set; .* sets with sorted"),
            ([1, [lambda: 0]], r"'x\[1\]\[0\]' is a function"),
            (nn.Linear(1, 1), "state_dict"),
            (endless, "contain itself"),
            ({"a": ()}, "empty dict"),
            (np.ones(3), "as_tensor"),
            (b"", "bytes"),
        ):
            with pytest.raises((TypeError, ValueError), match=complaint):
                observe("x", tree)
            with pytest.raises(TypeError, match="needs a tensor"):
                observe_grad("x", tree)  # type: ignore[arg-type]  # likewise
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert len(names(tmp_path / "run")) == 8


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return observe("x", x * 2)


def test_occurrences_phases_and_modules_of_values_and_of_each_backward_pass(tmp_path):
    inner, x = Inner(), torch.ones(2, requires_grad=True)
    with ObserverContext(tmp_path, "run") as observer:
        for _ in range(2):
            observe_grad("x", x)
            nn.Sequential(inner, inner)(observe("x", x)).sum().backward()
            (x * 2).sum().backward()
            observer.next_step()
    assert not x._backward_hooks
    for step in range(2):
        found = [
            (site.phase, site.module, site.op, site.name, site.occurrence)
            for site in sites(observer.path, step)
        ]
        assert found == [
            ("forward", "", "", "x", 0),
            ("forward", "Sequential.0", "", "x", 0),
            ("forward", "Sequential.0", "", "x", 1),
            *(("backward", "", "", "grad of x", number) for number in range(2)),
        ]


def test_plain_values_are_replayed_exactly_in_what_is_returned(tmp_path):
    plain = [
        1j,
        complex("nan+1j"),
        0.1,
        -0.0,
        float("inf"),
        float("nan"),
        7,
        -(2**70),
        True,
        None,
        "tëxt",
    ]
    point, pair = namedtuple("point", "x y"), dataclasses.make_dataclass("Pair", ["left", "right"])
    tree = {"time": point(1.5, 2), "plain": plain, "pair": pair(1, 2), "tensor": torch.ones(1)}
    with ObserverContext(tmp_path, "r"):
        assert observe_non_deterministic("t", tree) is tree
    paths = [f"['plain'][{index}]" for index in range(len(plain))]
    expected = ["['time'].x", "['time'].y", *paths, "['pair'].left", "['pair'].right", "['tensor']"]
    assert names(tmp_path / "r") == [f"t{path}" for path in expected]
    other = {
        "time": point(2.5, 2),
        "plain": ["other", *[0] * 9, 3],
        "pair": pair(0, 2),
        "tensor": torch.zeros(1),
    }
    with ObserverContext(tmp_path, "c", tmp_path / "r") as observer:
        replayed = observe_non_deterministic("t", other)
    assert repr(replayed) == repr(tree)
    assert replayed["tensor"] is other["tensor"]
    assert observer.verdict.verdict == "match"
    assert observer.verdict.coverage.replayed == {
        "t": {"count": 16, "differing": 14, "mib_per_step": 4e-06}
    }


def test_observers_change_no_bit(tmp_path):
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
        return torch.cat(
            [
                *(weight.detach().flatten() for weight in model.parameters()),
                torch.get_rng_state().float(),
            ]
        )

    plain = train(is_observed=False)
    with ObserverContext(tmp_path, "r"):
        assert torch.equal(train(is_observed=True), plain)
    with ObserverContext(tmp_path, "c", tmp_path / "r", raise_on_mismatch=True):
        assert torch.equal(train(is_observed=True), plain)


def observed_in_a_worker(batch: list[int]) -> Tensor:
    with pytest.warns(CoverageWarning, match="a DataLoader worker"):
        observe("inside", batch)
    return torch.tensor(batch)


def test_a_worker_says_that_it_records_nothing(tmp_path):
    options = {
        "num_workers": 1,
        "multiprocessing_context": "fork",
        "collate_fn": observed_in_a_worker,
    }
    with ObserverContext(tmp_path, "run"):
        (batch,) = torch.utils.data.DataLoader([0, 1], batch_size=2, **options)
        observe("batch", batch)
    assert names(tmp_path / "run") == ["batch"]


def test_modules_of_earlier_steps_are_not_kept(tmp_path):
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


@pytest.mark.filterwarnings("ignore::det_callbacks.DivergenceWarning")
def test_a_gradient_that_never_comes_is_reported(tmp_path):
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

    with pytest.warns(CoverageWarning, match="is recorded as missing, because no backward") as said:
        reference = run("r", None, goes_back=True)
    assert [str(one.message).split()[2] for one in said] == ["never", "undefined"]
    assert sorted(names(reference.path)) == ["grad of never", "grad of undefined", "grad of x"]
    with pytest.warns(CoverageWarning, match="is recorded as missing, because no backward") as said:
        current = run("c", reference.path, goes_back=False)
    assert str(said[0].message).startswith("grad of x is recorded as missing")
    assert ("grad of x", "structure") in kinds(current)


def test_a_gradient_of_another_branch_is_left_alone(tmp_path):
    def gradients(
        name: str, scale: float, reference: Path | None = None
    ) -> tuple[list[float], list[float]]:
        a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        left, right = a * 1, b * 1
        with ObserverContext(tmp_path, name, reference):
            observe_non_deterministic_grad("right", right)  # whose backward runs first
            ((left + right) * scale).sum().backward()  # one tensor is the gradient of both
        return a.grad.tolist(), b.grad.tolist()

    assert gradients("r", 2.0) == ([2.0], [2.0])
    assert gradients("c", 3.0, tmp_path / "r") == ([3.0], [2.0])


def test_steps_are_marked_at_either_end_of_a_loop_and_another_number_of_them_differs(tmp_path):
    def run(
        num_steps: int, *, is_marked_first: bool = False, reference: Path | None = None
    ) -> ObserverContext:
        name = f"{num_steps} steps, {is_marked_first}"
        with ObserverContext(tmp_path, name, reference) as observer:
            for value in range(num_steps):
                if is_marked_first:
                    observer.next_step()
                observe("x", value)
                if not is_marked_first:
                    observer.next_step()
        return observer

    reference = run(3, is_marked_first=True).path
    same = run(3, reference=reference).verdict
    assert (same.verdict, same.coverage.steps) == ("match", (0, 2))
    for count, kind in ((2, "missing"), (4, "extra")):
        with pytest.warns(DivergenceWarning):
            other = run(count, reference=reference)
        assert [*kinds(other), other.verdict.first_divergence.kind] == [(None, kind), kind]


def test_raising_at_the_end_of_the_step_that_differs_and_again_at_the_end(tmp_path):
    reference = ObserverContext(tmp_path, "reference")
    observer = ObserverContext(tmp_path, "current", tmp_path / "reference", raise_on_mismatch=True)

    def run(observer: ObserverContext, *values: int) -> None:
        with observer:
            for step, value in enumerate(values):
                observe("a", step)
                observe("b", value)
                with suppress(DivergenceError):
                    observer.next_step()
                if observer.verdict is not None:
                    break

    run(reference, 1, 2, 3)
    with pytest.raises(DivergenceError, match=r"Step 1.* b has different bits") as raised:
        run(observer, 1, 9, 9)
    assert raised.value.verdict is observer.verdict
    assert (kinds(observer), observer.verdict.counts.sites_differing) == ([("b", "content")], 1)
    assert (tmp_path / "current" / "verdict.json").is_file()


def test_a_context_is_used_once_and_only_one_at_a_time(tmp_path):
    observer = ObserverContext(tmp_path, "run")
    with pytest.raises(TraceError, match="not open"):
        observer.next_step()
    with observer:
        observe("x", 1)
        with (
            pytest.raises(TraceError, match="is already active"),
            ObserverContext(tmp_path, "other"),
        ):
            pass
        observe("y", 1)
    assert names(tmp_path / "run") == ["x", "y"]
    assert not (tmp_path / "other").exists()
    with pytest.raises(TraceError, match="already entered"), observer:
        pass
    with pytest.raises(TraceError, match="not open"):
        observer.next_step()


def test_what_is_no_reference_no_folder_or_becomes_no_run(tmp_path):
    for name in ("", ".", "..", "a/b", "/etc", "a\\b", "a\0b", 3):
        with pytest.raises(ValueError, match="is not a valid folder name"):
            ObserverContext(tmp_path / "runs", name)
    assert not list(tmp_path.iterdir())

    def refused(
        error: type[Exception], text: str, name: str, reference: Path | None, *values: Any
    ) -> None:
        with pytest.raises(error, match=text), ObserverContext(tmp_path, name, reference):
            [observe(value, 1) for value in values]

    refused(ReferenceNotFoundError, "nothing", "run", tmp_path / "nothing")
    refused(ValueError, "name", "broken", None, "")
    refused(NothingComparedError, "Nothing was observed", "silent", None)
    assert not list(tmp_path.rglob("run.json")), "nothing was recorded"
    reference = watch(tmp_path, "reference", x=1).path
    for _ in range(2):  # its own folder is replaced
        watch(tmp_path, "current", reference, x=1)
    refused(RunExistsError, "reference", "reference", None, "y")
    refused(RunExistsError, "reference", "reference", reference, "y")
    refused(ReferenceFormatError, "cannot be a reference", "next", tmp_path / "current", "x")
    write_manifest(reference, replace(read_manifest(reference), recorded_by=""))
    refused(ReferenceFormatError, "DeterminismCallback", "next", reference, "x")
    assert names(reference) == ["x"]
    with ObserverContext(tmp_path, "reference", overwrite=True):
        observe("y", 1)
    assert names(reference) == ["y"]
    stream = next(reference.rglob("*.arrows"))
    content = bytearray(stream.read_bytes())
    content[-20] ^= 1
    stream.write_bytes(content)
    refused(ReferenceFormatError, "damaged", "next", reference, "x")
    assert not {"run", "next"} & {path.name for path in tmp_path.iterdir()}


def test_ops_are_sites_only_inside_regions(tmp_path):
    x = torch.ones(2, 2)
    with ObserverContext(tmp_path, "run") as observer:
        x + 1
        enable_hash_mode()
        x * 2
        with enable_hash_mode():
            x * 3
        disable_hash_mode()
        observe("between", x - 1)
        with pytest.raises(TraceError, match="more often"):
            disable_hash_mode()
        enable_hash_mode()
        with DebugMode():
            x @ x
            with pytest.raises(TraceError, match=r"dispatch mode \(DebugMode\) is open above"):
                disable_hash_mode()
            x / x
        disable_hash_mode()
        x * x
    assert _get_current_dispatch_mode_stack() == []
    ops = [
        site.op or site.name for site in sites(observer.path) if site.role in ("output", "named")
    ]
    assert ops == [
        "aten.mul.Tensor",
        "aten.mul.Tensor",
        "between",
        "aten.mm.default",
        "aten.div.Tensor",
    ]


def test_what_was_put_back_is_what_later_ops_read(tmp_path):
    x = torch.ones(2)
    with ObserverContext(tmp_path, "run") as observer, enable_hash_mode():
        y = x.exp()
        observe("seen", y)
        y.sin()
        observe_non_deterministic("put back", y)
        y.cos()
    inputs = {site.name or site.op: site.inputs for site in sites(observer.path)[1:]}
    assert inputs == {
        "aten.exp.default": (0,),
        "seen": (1,),
        "aten.sin.default": (1,),
        "put back": (1,),
        "aten.cos.default": (4,),
    }
