"""What the ranks found becomes one verdict."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from det_callbacks.compare.rank_verdicts import RankVerdict, merge_verdicts
from det_callbacks.verdict import Counts, Coverage, Divergence, EnvironmentDifference, Verdict

PLACE = Divergence(
    rank=0,
    step=0,
    phase="forward",
    module="net",
    op="aten.mm.default",
    occurrence=0,
    output=0,
    name=None,
    kind="content",
    source=("train.py:3 in forward",),
    shape=(2, 3),
    dtype="float32",
    reference_digest="00",
    current_digest="01",
    is_origin=True,
)


def part(
    rank: int,
    step: int | None = None,
    *,
    position: int = 5,
    may_receive: bool = False,
    is_origin: bool | None = True,
    segment: int = 0,
    name: Any = None,
    **place: Any,
) -> RankVerdict:
    first = None if step is None else replace(PLACE, rank=rank, step=step, is_origin=is_origin, **place)
    return RankVerdict(
        rank=rank,
        verdict=Verdict(
            verdict=name or ("match" if first is None else "diverged"),
            reference="refs/run1",
            current="here",
            first_divergence=first,
            origins=(first,) if first is not None and is_origin else (),
            cause=None if first is None else "forward",
            explanation=f"What rank {rank} says." if first is not None else "All agree, bit for bit. The machine too.",
            counts=Counts(steps_compared=4, sites_compared=40, sites_differing=0 if first is None else 3),
            coverage=Coverage(
                ranks=1,
                steps=(rank, 9),
                ops_seen=7,
                ops_digested=5,
                ops_skipped={"view": 2},
                opaque_regions=("graph",),
                replayed={"aten.mm": {"count": 1, "differing": 0, "mib_per_step": 0.5}},
            ),
            environment=(
                EnvironmentDifference(name="cpu.model", reference=1, current=2, changes_bits=True, is_machine=True),
            ),
        ),
        order=None if step is None else (segment, step, position, rank),
        may_receive=may_receive,
    )


def test_a_part_survives_json() -> None:
    for one in (part(0), part(1, 3, shape=None)):
        assert RankVerdict.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_ranks_that_agree_are_a_match() -> None:
    verdict = merge_verdicts([part(0), part(1), part(2)])
    assert (verdict.verdict, verdict.first_divergence, verdict.origins, verdict.cause) == ("match", None, (), None)
    assert verdict.explanation == "All 120 sites of 12 steps of 3 ranks agree, bit for bit. The machine too."
    assert verdict.counts == Counts(steps_compared=12, sites_compared=120, sites_differing=0)
    assert (verdict.coverage.ranks, verdict.coverage.steps) == (3, (0, 9))
    assert verdict.coverage.ops_skipped == {"view": 6}
    assert verdict.coverage.replayed["aten.mm"]["count"] == 3
    assert len(verdict.environment) == 1


def test_the_order_in_which_they_come_makes_no_difference() -> None:
    parts = [part(0, 4, may_receive=True), part(1, 3), part(2), part(3, 4)]
    merged = {json.dumps(merge_verdicts(list(order)).to_dict()) for order in itertools.permutations(parts)}
    assert len(merged) == 1


@pytest.mark.parametrize(
    ("parts", "rank"),
    [
        ([part(0, 5), part(1, 3)], 1),
        ([part(0, 3, position=9), part(1, 3, position=2)], 1),
        ([part(0, 3), part(1, 3)], 0),
        ([part(0, 1, segment=1), part(1, 7)], 1),
    ],
)
def test_the_first_is_the_least_in_segment_step_position_and_rank(parts: list[RankVerdict], rank: int) -> None:
    verdict = merge_verdicts(parts)
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.rank == rank
    assert verdict.explanation.startswith(f"Rank {rank} of 2: What rank {rank} says.")
    assert "it also differs by itself" in verdict.explanation
    assert [origin.rank for origin in verdict.origins] == [rank, 1 - rank]


@pytest.mark.parametrize("step", [3, 4])
def test_who_differs_only_after_an_exchange_received_it(step: int) -> None:
    verdict = merge_verdicts([part(0, step, position=9, may_receive=True), part(1, 3), part(2)])
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.rank, verdict.first_divergence.is_origin) == (1, True)
    assert [origin.rank for origin in verdict.origins] == [1]
    assert f"Rank 0 differs from step {step} on: it received the difference." in verdict.explanation
    assert "Rank 2 agrees as far as it was compared." in verdict.explanation


def test_a_receiver_that_comes_first_is_no_origin_and_the_sender_has_the_word() -> None:
    verdict = merge_verdicts([part(0, 3, position=1, may_receive=True), part(1, 3, position=9)])
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.rank, verdict.first_divergence.is_origin) == (0, False)
    assert verdict.explanation.startswith("Rank 1 of 2: What rank 1 says.")


def test_after_an_exchange_nobody_is_proven_to_be_the_origin() -> None:
    verdict = merge_verdicts([part(0, 3, may_receive=True), part(1, 3, may_receive=True)])
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.is_origin, verdict.origins) == (None, ())
    assert "may have received the difference or sent it" in verdict.explanation


def test_a_collective_that_read_the_same_everywhere_is_the_origin() -> None:
    options: dict[str, Any] = {"op": "c10d.allreduce_.default", "is_origin": None, "may_receive": True}
    verdict = merge_verdicts([part(0, 3, **options), part(1, 3, **options)])
    assert verdict.first_divergence is not None
    assert (verdict.cause, verdict.first_divergence.is_origin) == ("collective", True)
    assert "Rank 1 differs from step 3 on: it took part in the same collective." in verdict.explanation
    # what went in differed on one rank: it only delivered that
    verdict = merge_verdicts([part(0, 3, **options), part(1, 3, position=2)])
    assert verdict.cause == "forward"
    assert [origin.rank for origin in verdict.origins] == [1]


def test_a_refusal_of_one_is_no_match() -> None:
    verdict = merge_verdicts([part(0), part(1, name="not_comparable")])
    assert verdict.verdict == "not_comparable"


def test_nothing_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        merge_verdicts([])
