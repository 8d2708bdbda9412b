"""What each rank found by itself becomes the verdict that one process gives which reads the steps of all ranks."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_builder import StepBuilder, reducing_step

from det_callbacks.compare.rank_findings import RankFindings
from det_callbacks.compare.rank_verdicts import verdict_of_ranks
from det_callbacks.compare.step import compare_steps
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.errors import NothingComparedError
from det_callbacks.runs.program import IN_FLIGHT
from det_callbacks.verdict import EnvironmentDifference, Verdict

NAMES = ("refs/run1", "runs/today")
Pair = tuple[StepBuilder, StepBuilder]

CHANGES: list[dict[str, Any]] = [
    {},
    {"delivered": "other"},
    {"noise": "ulp"},
    {"noise": "ulp", "delivered": "other"},
    {"batch": 7},
    {"batch": 7, "delivered": "other"},
    {"reduce": "avg"},
    {"detail": IN_FLIGHT},
]
RANKS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0, 0, 0, *range(len(CHANGES))]), min_size=1, max_size=3),
        st.sampled_from([None, "missing", "extra"]),
        st.integers(0, 3),
    ),
    min_size=2,
    max_size=4,
)


def machine(*ranks: int) -> EnvironmentDifference:
    return EnvironmentDifference(
        name=f"cpu.of {ranks}", reference=1, current=2, changes_bits=bool(ranks), is_machine=True
    )


def of_rank(builder: VerdictBuilder, rank: int, steps: list[int], whole: str | None, num_before: int) -> None:
    for step, change in enumerate(steps):
        reference = reducing_step(num_before=num_before).view(rank=rank, step=step)
        current = reducing_step(num_before=num_before, **CHANGES[change]).view(rank=rank, step=step)
        builder.add_step(reference, current)
    if whole is not None:
        add = builder.add_missing_step if whole == "missing" else builder.add_extra_step
        for step in range(2):
            add(rank, step + rank)


def told(found: RankFindings) -> RankFindings:
    """What arrives at another rank."""
    return RankFindings.from_dict(json.loads(json.dumps(found.to_dict())))


@settings(max_examples=80, deadline=None)
@given(ranks=RANKS, data=st.data())
def test_the_verdict_is_that_of_one_process_that_sees_all_ranks(ranks: Any, data: st.DataObject) -> None:
    whole = VerdictBuilder(*NAMES)
    parts = []
    whole.set_world_size(len(ranks))
    whole.set_environment([machine()])
    for rank, steps in enumerate(ranks):
        of_rank(whole, rank, *steps)
        builder = VerdictBuilder(*NAMES)
        builder.set_world_size(len(ranks))
        builder.set_environment([machine()])
        of_rank(builder, rank, *steps)
        parts.append(told(builder.findings(rank)))
    parts = data.draw(st.permutations(parts))
    verdict = verdict_of_ranks(parts, world_size=len(ranks), reference=NAMES[0], current=NAMES[1])
    assert asdict(verdict) == asdict(whole.finish())
    named = {origin.rank for origin in verdict.origins}
    brought = {rank for rank, (steps, *_) in enumerate(ranks) if next(filter(None, steps), 0) == 1}
    # what only a collective delivered is an origin of no rank, unless the collective is one itself
    assert not named & brought or {origin.op for origin in verdict.origins if origin.rank in brought} == {
        "c10d.allreduce_.default"
    }


def judge(*pairs: Pair | None, steps: dict[int, int] | None = None) -> Verdict:
    """Return the verdict on ranks each of which compared two steps, the second of them another one."""
    parts = []
    for rank, pair in enumerate(pairs):
        builder = VerdictBuilder(*NAMES)
        builder.set_world_size(len(pairs))
        builder.add_step(reducing_step().view(rank=rank), reducing_step().view(rank=rank))
        reference, current = pair or (reducing_step(), reducing_step())
        step = (steps or {}).get(rank, 1)
        builder.add_step(reference.view(rank=rank, step=step), current.view(rank=rank, step=step))
        parts.append(told(builder.findings(rank)))
    return verdict_of_ranks(parts, world_size=len(pairs), reference=NAMES[0], current=NAMES[1])


def differing(**changes: Any) -> Pair:
    return reducing_step(), reducing_step(delivered="other", **changes)


def after_an_exchange(kind: str, through: str, *, changed: bool) -> StepBuilder:
    """A step in which Python does something else because of what came from the other ranks.

    It reads a number of what a collective delivered, or of a gradient of which only that it differs is known; or
    nobody saw it read.
    """
    made = reducing_step(delivered="other" if changed and through != "gradient" else "all")
    last = len(made.sites) - 1
    if through == "gradient":
        last = made.named("grad of net.weight", int(changed), phase="gradient")
    if through != "unseen":
        made.row(made.digests[last], op="aten._local_scalar_dense.default", role="value", inputs=(last,))
    other = made.batch("unchanged", [1])
    if kind == "argument":
        made.op("aten.mul.Tensor", other, arguments={"other": 2.0 if changed else 1.0})
    elif changed == (kind == "extra"):
        made.op("aten.add.Tensor", other)
    return made


@pytest.mark.parametrize("through", ["delivered", "gradient", "unseen"])
@pytest.mark.parametrize("kind", ["argument", "missing", "extra"])
def test_what_python_does_with_what_came_from_others_starts_nothing(kind: str, through: str) -> None:
    receiver = after_an_exchange(kind, through, changed=False), after_an_exchange(kind, through, changed=True)
    alone = compare_steps(*(made.view() for made in receiver)).origins
    assert bool(alone) == (through == "unseen")  # to this rank alone it looks like an origin
    verdict = judge(receiver, differing(noise="ulp"))
    assert [origin.rank for origin in verdict.origins] == [1]
    assert "it started on rank 1; rank 0 " in verdict.explanation
    assert " received the difference" in verdict.explanation


def gradient(bits: int, *, is_recorded: bool = False) -> StepBuilder:
    """A step of level state, or one in which what wrote the gradient is known."""
    made = StepBuilder()
    place = made.batch("batch[0]", [1, 2])
    inputs = (made.op("aten.mul.Tensor", place),) if is_recorded else ()
    made.named("grad of net.weight", bits, phase="gradient", inputs=inputs)
    return made


def test_of_gradients_that_nobody_saw_written_it_is_not_told_who_started() -> None:
    verdict = judge((gradient(1), gradient(2)), (gradient(1), gradient(2)))
    assert verdict.origins == ()
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.is_origin is None
    assert "whether ranks 0, 1 started a difference or received it cannot be told" in verdict.explanation
    assert "it started on" not in verdict.explanation


def test_of_gradients_that_nobody_saw_written_the_only_one_that_differs_is_where_it_started() -> None:
    verdict = judge((gradient(1), gradient(2)), None)
    assert "it started on rank 0; 1 of 2 ranks differ (rank 0 from step 1 on)" in verdict.explanation


@pytest.mark.parametrize("step", [1, 2])
def test_of_gradients_that_nobody_saw_written_those_after_another_ranks_batch_were_received(step: int) -> None:
    verdict = judge((gradient(1), gradient(2)), differing(batch=7), steps={0: step})
    assert "it started on rank 1; rank 0 received the difference" in verdict.explanation
    assert verdict.cause == "data_content"


def test_an_argument_that_changes_after_another_rank_differs_may_have_come_from_there() -> None:
    pair = reducing_step(), reducing_step(reduce="avg")
    verdict = judge(pair, differing(noise="ulp"), steps={0: 2})
    assert "it started on rank 1; whether rank 0 started a difference or received it cannot be told" in (
        verdict.explanation
    )
    assert {origin.rank for origin in verdict.origins} == {1}
    both = judge(pair, pair)
    assert "it started on ranks 0, 1" in both.explanation
    assert {origin.rank for origin in both.origins} == {0, 1}


def test_the_first_divergence_is_the_least_though_it_was_received() -> None:
    late = reducing_step(num_before=9), reducing_step(num_before=9, noise="ulp", delivered="other")
    verdict = judge(differing(), late)
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.rank, verdict.first_divergence.is_origin) == (0, False)
    assert verdict.explanation.startswith("Step 1 of rank 1, forward: aten.mul.Tensor")
    assert {origin.rank for origin in verdict.origins} == {1}
    early = judge(differing(), differing(noise="ulp"))
    assert early.first_divergence is not None
    assert (early.first_divergence.rank, early.first_divergence.is_origin) == (1, True)


def test_a_collective_is_the_origin_where_all_put_in_what_the_reference_did() -> None:
    verdict = judge(differing(), differing())
    assert verdict.first_divergence is not None
    assert (verdict.cause, verdict.first_divergence.is_origin) == ("collective", True)
    assert "the collective itself is the origin; 2 of 2 ranks differ" in verdict.explanation
    # what nobody saw written, and follows it, may hold what it delivered
    pair = differing()
    for made, bits in zip(pair, (1, 2), strict=True):
        made.named("grad of net.weight", bits, phase="gradient")
    assert judge(pair, pair).cause == "collective"
    # a rank that is not known might have put in something else
    parts = []
    for rank in range(2):
        builder = VerdictBuilder(*NAMES)
        builder.set_world_size(3)
        builder.add_step(*(made.view(rank=rank) for made in differing()))
        parts.append(told(builder.findings(rank)))
    verdict = verdict_of_ranks(parts, world_size=3, reference=NAMES[0], current=NAMES[1])
    assert (verdict.cause, verdict.origins) == ("unknown", ())


def test_of_hundreds_of_ranks_the_one_that_started_it_is_explained() -> None:
    """Many origins are cut down to those that are listed; what the explanation needs stays."""
    pairs = [differing()] + [
        (reducing_step(num_before=9), reducing_step(num_before=9, noise="ulp", delivered="other"))
    ] * 220
    builder = VerdictBuilder(*NAMES)
    builder.set_world_size(len(pairs))
    for rank, pair in enumerate(pairs):
        part = builder.part()
        part.add_step(*(made.view(rank=rank) for made in pair))
        builder.merge(part)
    verdict = builder.finish()
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.rank == 0
    assert verdict.explanation.startswith("Step 0 of rank 1, forward: aten.mul.Tensor")
    assert [origin.rank for origin in verdict.origins] == list(range(1, 101))


def test_how_the_machines_of_the_ranks_differ_is_joined() -> None:
    parts = []
    for rank in range(2):
        builder = VerdictBuilder(*NAMES)
        builder.set_world_size(2)
        builder.set_environment([machine(), machine(rank)])
        builder.set_replayed({"aten.mm": {"count": 1, "differing": 0, "mib_per_step": 0.5}})
        builder.note("A note")
        builder.add_step(reducing_step().view(rank=rank), reducing_step().view(rank=rank))
        parts.append(told(builder.findings(rank)))
    verdict = verdict_of_ranks(parts, world_size=2, reference=NAMES[0], current=NAMES[1])
    assert [entry.name for entry in verdict.environment] == ["cpu.of ()", "cpu.of (0,)", "cpu.of (1,)"]
    assert verdict.verdict == "match"
    assert verdict.explanation.startswith("All 12 sites of 2 steps of 2 ranks agree, bit for bit. The machine differs")
    assert verdict.explanation.count("A note.") == 1
    assert verdict.coverage.replayed["aten.mm"] == {"count": 2, "differing": 0, "mib_per_step": 1.0}


def test_a_refusal_of_one_is_no_match() -> None:
    parts = []
    for rank in range(2):
        builder = VerdictBuilder(*NAMES)
        if rank:
            builder.refuse("It cannot be")
        builder.add_step(reducing_step().view(rank=rank), reducing_step().view(rank=rank))
        parts.append(told(builder.findings(rank)))
    verdict = verdict_of_ranks(parts, world_size=2, reference=NAMES[0], current=NAMES[1])
    assert verdict.verdict == "not_comparable"
    assert "It cannot be." in verdict.explanation


def test_nothing_is_no_verdict() -> None:
    with pytest.raises(NothingComparedError):
        VerdictBuilder(*NAMES).findings(0)
    with pytest.raises(NothingComparedError):
        verdict_of_ranks([], world_size=2, reference=NAMES[0], current=NAMES[1])


def test_a_rank_counts_once() -> None:
    builder = VerdictBuilder(*NAMES)
    builder.add_step(reducing_step().view(), reducing_step().view())
    with pytest.raises(ValueError, match=r"steps of ranks \[0\]"):
        verdict_of_ranks([builder.findings(0)] * 2, world_size=2, reference=NAMES[0], current=NAMES[1])
