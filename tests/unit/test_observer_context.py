"""ObserverContext: steps, raising, the ways in which a run is refused, and regions of ops."""

from dataclasses import replace
from pathlib import Path
from typing import Any

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
from det_callbacks.runs.writer import RunWriter
from det_callbacks.tensors.files import REPLAY, tensor_path


def test_a_name_that_is_no_folder(tmp_path: Path) -> None:
    for name in ("", ".", "..", "a/b", "/etc", "a\\b", "a\0b", 3):
        with pytest.raises(ValueError, match="name of a run"):
            ObserverContext(tmp_path / "runs", name)
    assert not list(tmp_path.iterdir())


def test_steps_are_marked_at_either_end_of_a_loop_and_another_number_of_them_differs(tmp_path: Path) -> None:
    def run(name: str, *steps: bool, reference: Path | None = None) -> ObserverContext:
        """Observe a value in each step; true is one that is marked where it begins."""
        with ObserverContext(tmp_path, name, reference) as observer:
            for value, is_marked_first in enumerate(steps):
                if is_marked_first:
                    observer.next_step()
                observe("x", value)
                if not is_marked_first:
                    observer.next_step()
        return observer

    reference = run("reference", True, True, True).path
    same = run("same", False, False, False, reference=reference)
    assert (same.verdict.verdict, same.verdict.coverage.steps) == ("match", (0, 2))
    for count, kind in ((2, "missing"), (4, "extra")):
        with pytest.warns(DivergenceWarning):
            other = run(kind, *[False] * count, reference=reference)
        assert {found.kind for found in other.mismatches} == {kind}
        assert other.verdict.first_divergence.kind == kind


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


def test_what_is_no_reference_or_becomes_no_run(tmp_path: Path) -> None:
    def refused(error: type[Exception], text: str, name: str, reference: Path | None, *values: Any) -> None:
        with pytest.raises(error, match=text), ObserverContext(tmp_path, name, reference):
            [observe(value, 1) for value in values]

    refused(ReferenceNotFoundError, "nothing", "run", tmp_path / "nothing")
    refused(ValueError, "name", "broken", None, "")
    refused(NothingComparedError, "Nothing was observed", "silent", None)
    assert not list(tmp_path.rglob("run.json")), "nothing was recorded"
    reference = record(tmp_path, ("x", 1))
    for _ in range(2):  # its own folder is replaced
        with ObserverContext(tmp_path, "current", reference):
            observe("x", 1)
    refused(ReferenceFormatError, "is no reference", "next", tmp_path / "current", "x")
    write_manifest(reference, replace(read_manifest(reference), recorded_by=""))
    refused(ReferenceFormatError, "DeterminismCallback", "next", reference, "x")
    damaged = record(tmp_path, ("x", torch.ones(1)), name="damaged")
    stream = next(damaged.rglob("*.arrows"))
    content = bytearray(stream.read_bytes())
    content[-20] ^= 1
    stream.write_bytes(content)
    refused(ReferenceFormatError, "damaged", "next", damaged, "x")
    assert not {"run", "next"} & {path.name for path in tmp_path.iterdir()}


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


def test_what_a_step_saved_is_there_before_the_step_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kill leaves no step without it."""
    append, saved = RunWriter.append, []

    def note(writer: RunWriter, step: int, *content: Any) -> int:
        saved.append(tensor_path(writer.stream, REPLAY, step).exists())
        return append(writer, step, *content)

    monkeypatch.setattr(RunWriter, "append", note)
    with ObserverContext(tmp_path, "run") as observer:
        for step in range(2):
            observe_non_deterministic("x", torch.full((2,), float(step)))
            observer.next_step()
            assert Run.open(observer.path).rank(0).steps(0).tolist() == [*range(step + 1)]
    assert saved == [True, True]
