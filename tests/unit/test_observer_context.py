"""ObserverContext: steps, raising, the ways in which a run is refused, and regions of ops."""

import subprocess
import sys
import textwrap
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from observing import names, record, sites
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from det_callbacks import (
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
    observe_non_deterministic,
)
from det_callbacks.runs.manifest import read_manifest, write_manifest
from det_callbacks.runs.store import Run
from det_callbacks.tensors.files import SavedStep


def test_a_name_that_is_no_folder(tmp_path: Path) -> None:
    for name in ("", ".", "..", "a/b", "/etc", "a\\b", "a\0b", 3):
        with pytest.raises(ValueError, match="name of a run"):
            ObserverContext(tmp_path / "runs", name)
    assert not list(tmp_path.iterdir())


def test_steps_marked_at_either_end_of_a_loop(tmp_path: Path) -> None:
    with ObserverContext(tmp_path, "first") as observer:
        for value in range(3):
            observer.next_step()
            observe("x", value)
    with ObserverContext(tmp_path, "second", tmp_path / "first") as observer:
        for value in range(3):
            observe("x", value)
            observer.next_step()
    assert (observer.verdict.verdict, observer.verdict.coverage.steps) == ("match", (0, 2))


@pytest.mark.parametrize(("count", "kind"), [(2, "missing"), (4, "extra")])
def test_another_number_of_steps(tmp_path: Path, count: int, kind: str) -> None:
    observers = []
    for name, steps, reference in (("r", 3, None), ("c", count, tmp_path / "r")):
        with (
            nullcontext() if reference is None else pytest.warns(DivergenceWarning),
            ObserverContext(tmp_path, name, reference) as observer,
        ):
            for value in range(steps):
                observe("x", value)
                observer.next_step()
        observers.append(observer)
    assert {found.kind for found in observers[1].mismatches} == {kind}
    assert observers[1].verdict.first_divergence.kind == kind


@pytest.mark.parametrize("is_caught", [False, True], ids=["leaves the block", "is caught in it"])
def test_raising_at_the_observation_that_differs_and_again_at_the_end(tmp_path: Path, is_caught: bool) -> None:
    reference = record(tmp_path, ("a", 1), ("b", 2), ("c", 3))
    observer = ObserverContext(tmp_path, "current", reference, raise_on_mismatch=True)
    raised: list[DivergenceError] = []

    def run() -> None:
        with observer:
            observe("a", 1)
            try:
                observe("b", 9)
            except DivergenceError as error:
                raised.append(error)
                if not is_caught:
                    raise
            observe("c", 3)

    with pytest.raises(DivergenceError, match="b holds other bits") as error:
        run()
    assert raised == [error.value]
    assert error.value.verdict is observer.verdict
    assert [(found.name, found.kind) for found in observer.mismatches] == [("b", "content")]
    assert observer.verdict.counts.sites_differing == 1
    assert (tmp_path / "current" / "verdict.json").is_file()


def test_a_context_is_used_once_and_only_one_at_a_time(tmp_path: Path) -> None:
    observer = ObserverContext(tmp_path, "run")
    with pytest.raises(TraceError, match="not open"):
        observer.next_step()
    with observer:
        observe("x", 1)
        with pytest.raises(TraceError, match="active already"), ObserverContext(tmp_path, "other"):
            pass
        observe("y", 1)
    assert names(tmp_path / "run") == ["x", "y"]
    assert not (tmp_path / "other").exists()
    with pytest.raises(TraceError, match="entered already"), observer:
        pass
    with pytest.raises(TraceError, match="not open"):
        observer.next_step()


def test_an_existing_run_is_kept(tmp_path: Path) -> None:
    reference = record(tmp_path, ("x", 1))
    with pytest.raises(RunExistsError), ObserverContext(tmp_path, "reference"):
        pass
    with pytest.raises(RunExistsError), ObserverContext(tmp_path, "reference", reference):
        pass
    assert names(reference) == ["x"]
    with ObserverContext(tmp_path, "reference", overwrite=True):
        observe("y", 1)
    assert names(reference) == ["y"]


def test_a_reference_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ReferenceNotFoundError), ObserverContext(tmp_path, "run", tmp_path / "nothing"):
        pass
    with pytest.raises(ValueError, match="name"), ObserverContext(tmp_path, "broken"):
        observe("", 1)
    assert not (tmp_path / "broken" / "run.json").exists(), "nothing was recorded"
    reference = record(tmp_path, ("x", torch.ones(1)))
    stream = next(reference.rglob("*.arrows"))
    content = bytearray(stream.read_bytes())
    content[-20] ^= 1
    stream.write_bytes(content)
    with pytest.raises(ReferenceFormatError, match="damaged"), ObserverContext(tmp_path, "run", reference):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "reference"]


def test_nothing_observed_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NothingComparedError, match="Nothing was observed"), ObserverContext(tmp_path, "run"):
        torch.ones(2)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_reference_of_another_kind_is_refused(tmp_path: Path) -> None:
    reference = record(tmp_path, ("x", 1))
    for _ in range(2):  # its own folder is replaced
        with ObserverContext(tmp_path, "current", reference):
            observe("x", 1)
    current = tmp_path / "current"
    with pytest.raises(ReferenceFormatError, match="is no reference"), ObserverContext(tmp_path, "next", current):
        pass
    write_manifest(reference, replace(read_manifest(reference), recorded_by=""))
    with pytest.raises(ReferenceFormatError, match="DeterminismCallback"), ObserverContext(tmp_path, "c", reference):
        pass


def test_ops_are_sites_only_inside_regions(tmp_path: Path) -> None:
    x = torch.ones(2)
    with ObserverContext(tmp_path, "run") as observer:
        x + 1
        enable_hash_mode()
        x * 2
        with enable_hash_mode():
            x * 3
        disable_hash_mode()
        observe("between", x - 1)
        with enable_hash_mode():
            x / 2
        with pytest.raises(TraceError, match="more often"):
            disable_hash_mode()
    ops = [site.op or site.name for site in sites(observer.path) if site.role in ("output", "named")]
    assert ops == ["aten.mul.Tensor", "aten.mul.Tensor", "between", "aten.div.Tensor"]


def test_a_region_that_ends_before_a_mode_in_it_is_refused(tmp_path: Path) -> None:
    x = torch.ones(2, 2)
    with ObserverContext(tmp_path, "run") as observer:
        enable_hash_mode()
        with DebugMode():
            x @ x
            with pytest.raises(TraceError, match=r"dispatch mode \(DebugMode\) is open above"):
                disable_hash_mode()
            x / x
        disable_hash_mode()
        x * x
    assert _get_current_dispatch_mode_stack() == []
    assert [site.op for site in sites(observer.path) if site.op] == ["aten.mm.default", "aten.div.Tensor"]


def test_what_was_put_back_is_what_later_ops_read(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_kill_leaves_whole_steps_and_what_they_saved(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, torch
        from det_callbacks import ObserverContext, observe_non_deterministic
        with ObserverContext(sys.argv[1], "run") as observer:
            for step in range(10**6):
                observe_non_deterministic("x", torch.full((2**16,), float(step)))
                observer.next_step()
                print(step, flush=True)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        for _ in range(20):
            last = int(process.stdout.readline())
        process.kill()
    reference = Run.open(tmp_path / "run")
    assert not reference.is_complete
    steps = reference.rank(0).steps(0)
    assert len(steps) > last
    for step in steps.tolist():
        saved = SavedStep.of(reference, rank=0, segment=0, step=step).read("observation:x#0.0")
        assert saved.bits.view("float32").tolist() == [float(step)] * 2**16
