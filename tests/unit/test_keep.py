"""Keeping and finding tensors of ops, without a Trainer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import NUDGE, compiling_anew, opaque_backend, twice
from verdicts import DIVERGED, DIVERGENCE, MATCH

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

Body = Callable[[], Any]


ADD = replace(DIVERGENCE, step=0, module="", op="aten.add.Tensor", shape=(2,))


def keeper(folder: Path, *patterns: str, segment: int = 0, budget: float = 8.0) -> Keeper:
    stream = stream_path(folder, 0, 0, segment)
    stream.parent.mkdir(parents=True, exist_ok=True)
    writer = StepWriter(stream, KEPT, run_id=folder.name, segment=segment)
    return Keeper(patterns, writer, TensorBudget(budget))


def kept_step(folder: Path, step: int, segment: int = 0) -> KeptStep:
    path = tensor_path(stream_path(folder, 0, 0, segment), KEPT, step)
    return KeptStep(SavedStep(path, StepPlace(run_id=folder.name, rank=0, segment=segment, step=step)))


def trace(keeping: Keeper, body: Body, step: int = 0) -> StepTrace:
    with HashMode() as mode:
        mode.recorder.keeper = keeping
        keeping.begin()
        body()
    keeping.write(mode.trace, step)
    return mode.trace


def run_of(folder: Path, *patterns: str) -> Any:
    """Return as much of a run as tells where its tensors are, and of which ops they were to be."""
    rank = SimpleNamespace(stream_of=lambda segment, _: stream_path(folder, 0, 0, segment))
    manifest = SimpleNamespace(keep_tensors=patterns)
    return SimpleNamespace(run_id=folder.name, rank=lambda _: rank, manifest=manifest)


def divergence(first: StepTrace, second: StepTrace, op: str, occurrence: int = 0, output: int = 0) -> Divergence:
    """Return the divergence of a site that both have."""
    digests = []
    for one in (first, second):
        places = [(site.op, site.occurrence, site.output, site.role) for site in one.program.sites]
        digests.append(format_digest(int(one.digests[places.index((op, occurrence, output, "output"))])))
    place = {"op": op, "occurrence": occurrence, "output": output}
    return replace(ADD, **place, reference_digest=digests[0], current_digest=digests[1])


def compare(tmp_path: Path, op: str, bodies: Sequence[Body], **place: int) -> Numbers | None:
    """Return the numbers of an op of two steps, each kept in a run of its own."""
    folders = tmp_path / "ref", tmp_path / "cur"
    first, second = (trace(keeper(folder, op), body) for folder, body in zip(folders, bodies, strict=True))
    numbers = KeptNumbers(*(run_of(folder, op) for folder in folders))
    return numbers(0, divergence(first, second, op, **place))


def test_outputs_and_inputs_of_one_call_belong_together(tmp_path: Path) -> None:
    """Three equal results of calls that read other tensors: the occurrence decides whose inputs are shown."""

    def body(last: float) -> Body:
        def run() -> None:
            for size in (2.0, 4.0, last):
                torch.sign(torch.full((3,), size))

        return run

    for number in (0, 2):
        numbers = compare(tmp_path / str(number), "aten.sign.default", [body(8.0), body(9.0)], occurrence=number)
        assert numbers.output[0].num_differing == 0
        assert numbers.inputs[0].num_differing == (3 if number == 2 else 0)


def test_an_argument_that_varies_does_not_shift_what_is_kept(tmp_path: Path) -> None:
    """Its site stands before those of the outputs."""
    keeping = keeper(tmp_path / "run", "aten.add.Tensor")
    mode = HashMode()
    mode.recorder.keeper = keeping
    for step, alpha in enumerate((2.0, 3.0, 5.0, 7.0)):
        with mode:
            keeping.begin()
            torch.add(torch.ones(2), torch.ones(2), alpha=alpha)
        keeping.write(mode.trace, step)
    assert "argument" in [site.role for site in mode.trace.program.sites]
    for step, alpha in enumerate((2.0, 3.0, 5.0, 7.0)):
        digest = format_digest(digest_tensor(torch.full((2,), 1 + alpha)))
        kept = kept_step(tmp_path / "run", step)
        assert kept.find(ADD, format_digest(digest_tensor(torch.full((2,), 2 + alpha)))) == []
        call = kept.find(ADD, digest)
        assert call[0].saved.bits.view("float32").tolist() == [1 + alpha] * 2
        assert [one.label for one in call[1:]] == ["self", "other"]


def test_what_is_overwritten_is_not_read(tmp_path: Path) -> None:
    def body(value: float) -> Body:
        def run() -> None:
            target = torch.zeros(4)
            target.copy_(torch.full((4,), value))
            torch.add(target, 1.0, out=torch.full((4,), value))

        return run

    numbers = compare(tmp_path, "aten.copy_.default", [body(1.0), body(2.0)])
    assert [tensor.tensor for tensor in numbers.inputs] == ["src"]
    numbers = compare(tmp_path / "out", "aten.add.out", [body(1.0), body(2.0)])
    assert "out" not in [tensor.tensor for tensor in numbers.inputs]
    assert [tensor.num_differing for tensor in numbers.output] == [4]


def test_what_is_not_kept_is_said_step_by_step(tmp_path: Path) -> None:
    """In the file of the step, which is there before a kill may come."""
    keeping = keeper(tmp_path / "run", "aten.ones.default", budget=0.001)
    for step, size in enumerate((100, 400, 400)):
        trace(keeping, lambda size=size: torch.ones(size), step)
    keeping.writer.start_segment(stream_path(tmp_path / "run", 0, 0, 1), 1)
    trace(keeping, lambda: torch.ones(400), 0)
    steps = [kept_step(tmp_path / "run", step, segment) for segment, step in ((0, 0), (0, 1), (0, 2), (1, 0))]
    assert [step.num_missing for step in steps] == [0, 1, 1, 1]
    reason = "This step would save 0.00153 MiB with aten.ones.default, and tensor_budget_mib is 0.001."
    assert steps[1].reason.startswith(reason)
    counts = keeping.counts
    assert (counts.num_tensors, counts.num_steps, counts.first_missing, counts.num_missing) == (1, 1, 1, 3)
    assert counts.reason == steps[1].reason
    both = KeptCounts(num_tensors=2).with_rank(counts).with_rank(KeptCounts(**counts.to_dict()))
    assert (both.num_tensors, both.num_steps, both.first_missing, both.num_missing) == (4, 1, 1, 6)


def test_what_cannot_be_copied_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = keeper(tmp_path / "run", "aten._to_sparse.default", "aten.ones.default")
    trace(keeping, lambda: torch.ones(3, 3).to_sparse())
    assert (keeping.counts.num_tensors, keeping.counts.num_missing) == (1, 1)
    assert "has the layout sparse_coo, so its bits cannot be saved" in keeping.counts.reason

    def running_out(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("det_callbacks.tensors.copies.copy_bits", running_out)
    assert keeping.begin_call("aten.exp.default", [("self", None, torch.ones(2))]) is None


def test_a_call_is_kept_whole_or_not_at_all_within_one_budget_with_the_replay(tmp_path: Path) -> None:
    keeping, budget = keeper(tmp_path / "run", "aten.mm.default"), TensorBudget(0.002)
    stream = stream_path(tmp_path / "run", 0, 0, 0)
    keeping = Keeper(["aten.mm.default"], keeping.writer, budget)
    replay = Replay(StepWriter(stream, REPLAY, run_id="run"), budget)

    def body() -> None:
        replay.exchange("key", torch.ones(256), op="op", deferred=None)  # a half of the budget
        torch.mm(torch.ones(8, 8), torch.ones(8, 16))  # what it reads fits, what it wrote does not
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            torch.mm(torch.ones(2, 2), torch.ones(3, 3))

    trace(keeping, body)
    assert (keeping.counts.num_tensors, keeping.counts.num_missing) == (3, 1)
    with pytest.raises(ReplayError, match=r"This step would save 0\.00229 MiB with op"):
        replay.exchange("more", torch.ones(600), op="op", deferred=None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles
def test_an_op_inside_a_compiled_region_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling_anew():
        compiled = torch.compile(lambda values: twice(values) + 1, backend=opaque_backend())

        def body(*, is_nudged: bool) -> Body:
            def run() -> None:
                monkeypatch.setitem(NUDGE, "twice", is_nudged)
                compiled(torch.ones(2, 4))

            return run

        run, nudged = body(is_nudged=False), body(is_nudged=True)
        with HashMode():
            run()  # compiled before what is compared
        numbers = compare(tmp_path, "det_tests.twice.default", [run, nudged])
    assert [(tensor.num_differing, tensor.max_ulps, tensor.first) for tensor in numbers.output] == [(1, 1, (0, 3))]
    assert [(tensor.tensor, tensor.num_differing) for tensor in numbers.inputs] == [("tensor", 0)]


def test_only_what_can_be_kept_is_advised() -> None:
    """Not the end of a compiled region, nor a collective: they are no outputs of an op."""
    for op, is_advised in (
        ("aten.mm.default", True),
        ("compiled.Net_forward.outputs", False),
        ("c10d.allreduce_.default", False),
        ("", False),
    ):
        verdict = replace(DIVERGED, first_divergence=replace(ADD, op=op), origins=(replace(ADD, op=op),))
        advised = to_keep(verdict)
        assert (advised is not None) == is_advised
        if advised is not None:
            assert advised[1] == "forward/:aten.mm.default"
    known = replace(ADD, numbers=Numbers(num_inputs=1))
    assert to_keep(replace(DIVERGED, first_divergence=known, origins=(known,))) is None
    missing = replace(ADD, numbers=Numbers(problem="the reference did not keep it"))
    assert to_keep(replace(DIVERGED, first_divergence=missing, origins=(missing,))) is not None
    assert to_keep(MATCH) is None


def test_patterns_that_nobody_could_have_asked_for_are_damage(tmp_path: Path) -> None:
    manifest = SimpleNamespace(keep_tensors=["forward/aten.add.Tensor:a:b"])
    run: Any = SimpleNamespace(path=tmp_path, manifest=manifest)
    with pytest.raises(ReferenceFormatError, match=r"run\.json is damaged: keep_tensors"):
        KeptNumbers(run, run)
