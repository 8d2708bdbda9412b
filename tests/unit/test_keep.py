"""Keeping and finding tensors of ops, without a Trainer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import compiling_anew, opaque_backend, twice
from torch import Tensor
from verdicts import DIVERGED, DIVERGENCE

from det_callbacks.compare.numbers import KeptNumbers, to_keep
from det_callbacks.digest import digest_tensor, format_digest
from det_callbacks.errors import ReferenceFormatError, ReplayError
from det_callbacks.runs.files import stream_path
from det_callbacks.runs.steps import StepTrace
from det_callbacks.tensors.copies import TensorBudget
from det_callbacks.tensors.files import KEPT, REPLAY, SavedStep, StepPlace, StepWriter, tensor_path
from det_callbacks.tensors.keep import Keeper
from det_callbacks.tensors.kept import KeptCounts, KeptStep
from det_callbacks.tensors.replay import Replay
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.verdict import Divergence, Numbers

ADD = replace(DIVERGENCE, step=0, module="", op="aten.add.Tensor", shape=(2,))


def keeper(folder: Path, *patterns: str, budget: TensorBudget | None = None) -> Keeper:
    stream = stream_path(folder, 0, 0, 0)
    stream.parent.mkdir(parents=True, exist_ok=True)
    return Keeper(patterns, StepWriter(stream, KEPT, run_id=folder.name), budget or TensorBudget(8.0))


def trace(keeping: Keeper, body: Callable[[], Any], step: int = 0) -> StepTrace:
    with HashMode() as mode:
        mode.recorder.output_hooks = (keeping,)
        keeping.begin()
        body()
    keeping.write(mode.trace, step)
    return mode.trace


def assert_kept(folder: Path, place: Divergence, output: Tensor, step: int = 0) -> None:
    """Check that what an op wrote can be found by its digest."""
    path = tensor_path(stream_path(folder, 0, 0, 0), KEPT, step)
    saved = SavedStep(path, StepPlace(run_id=folder.name, rank=0, segment=0, step=step))
    kept = KeptStep(saved).find(place, format_digest(digest_tensor(output)))
    assert kept is not None
    assert kept.bits.view("float32").tolist() == output.flatten().tolist()


def test_an_argument_that_varies_does_not_shift_what_is_kept(tmp_path: Path) -> None:
    """Its site stands before those of the outputs."""
    mode = HashMode()
    keeping = keeper(tmp_path / "run", "aten.add.Tensor")
    mode.recorder.output_hooks = (keeping,)
    for step, alpha in enumerate((2.0, 3.0)):
        with mode:
            keeping.begin()
            torch.add(torch.ones(2), torch.ones(2), alpha=alpha)
        keeping.write(mode.trace, step)
        assert "argument" in [site.role for site in mode.trace.program.sites]
        assert_kept(tmp_path / "run", ADD, torch.full((2,), 1 + alpha), step)


def test_what_cannot_be_copied_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = keeper(tmp_path / "run", "aten._to_sparse.default", "aten.ones.default")
    trace(keeping, lambda: torch.ones(3, 3).to_sparse())
    assert (keeping.counts.num_tensors, keeping.counts.num_missing) == (1, 1)
    assert "has the layout sparse_coo, so its bits cannot be saved" in keeping.counts.reason
    out_of_memory = mock.Mock(side_effect=torch.OutOfMemoryError("out of memory"))
    monkeypatch.setattr("det_callbacks.tensors.copies.copy_bits", out_of_memory)
    trace(keeping, lambda: torch.ones(2))
    assert (keeping.counts.num_tensors, keeping.counts.num_missing) == (1, 2)


def test_one_budget_serves_what_is_kept_and_the_replay(tmp_path: Path) -> None:
    budget = TensorBudget(0.002)
    keeping = keeper(tmp_path / "run", "aten.mm.default", budget=budget)
    replay = Replay(StepWriter(stream_path(tmp_path / "run", 0, 0, 0), REPLAY, run_id="run"), budget)

    def body() -> None:
        replay.exchange("key", torch.ones(256), op="op", deferred=None)  # a half of the budget
        torch.mm(torch.ones(16, 8), torch.ones(8, 32))  # does not fit
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            torch.mm(torch.ones(2, 2), torch.ones(3, 3))

    trace(keeping, body)
    assert (keeping.counts.num_tensors, keeping.counts.num_missing) == (1, 1)
    with pytest.raises(ReplayError, match=r"This step would save 0\.00229 MiB with op"):
        replay.exchange("more", torch.ones(600), op="op", deferred=None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles
def test_an_op_inside_a_compiled_region_is_kept_too(tmp_path: Path) -> None:
    with compiling_anew():
        compiled = torch.compile(lambda values: twice(values) + 1, backend=opaque_backend())
        with HashMode():
            compiled(torch.ones(2, 4))  # compiled before what is kept
        trace(keeper(tmp_path / "run", "det_tests.twice.default"), lambda: compiled(torch.ones(2, 4)))
    assert_kept(tmp_path / "run", replace(ADD, op="det_tests.twice.default"), torch.full((2, 4), 2.0))


def test_the_counts_of_two_ranks_are_added_and_the_first_gap_is_the_first_ranks() -> None:
    one, other = KeptCounts(num_tensors=2, num_steps=1), KeptCounts(num_tensors=1).with_missing(3, 2, "no room")
    expected = KeptCounts(num_tensors=3, num_steps=1, num_missing=2, first_missing=3, reason="no room")
    assert one.with_rank(other) == other.with_rank(one) == expected


@pytest.mark.parametrize(
    ("fields", "advised"),
    [
        ({"op": "aten.mm.default"}, "forward/:aten.mm.default"),
        ({"op": "compiled.Net_forward.outputs"}, None),  # the end of a compiled region is no output of an op
        ({"op": "c10d.allreduce_.default"}, None),
        ({"op": ""}, None),
        ({"numbers": Numbers()}, None),  # they are known
        ({"numbers": Numbers(problem="the reference did not keep it")}, "forward/:aten.add.Tensor"),
    ],
)
def test_only_what_can_be_kept_is_advised(fields: dict[str, Any], advised: str | None) -> None:
    found = replace(ADD, **fields)
    wanted = to_keep(replace(DIVERGED, first_divergence=found, origins=(found,)))
    assert (None if wanted is None else wanted[1]) == advised


def test_patterns_that_nobody_could_have_asked_for_are_damage(tmp_path: Path) -> None:
    manifest = SimpleNamespace(keep_tensors=["forward/aten.add.Tensor:a:b"])
    run: Any = SimpleNamespace(path=tmp_path, manifest=manifest)
    with pytest.raises(ReferenceFormatError, match=r"run\.json is damaged: keep_tensors"):
        KeptNumbers(run, run)
