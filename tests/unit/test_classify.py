"""Who started a difference, from what each rank tells of its first differing step; and the verdict on all of them."""

import json
from typing import Any

import pytest
from step_builder import StepBuilder, reducing_step

from det_callbacks.compare.collectives import Begins, CollectiveCall, RankDifference, classify, explain
from det_callbacks.compare.step import compare_steps
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.runs.program import IN_FLIGHT
from det_callbacks.verdict import Verdict

REDUCE = "c10d.allreduce_.default"


def call(*, put: bool, got: bool, op: str = REDUCE, group: str = "0-2", number: int = 0) -> CollectiveCall:
    return CollectiveCall(
        op=op,
        group=group,
        number=number,
        input_differs=put,
        output_differs=got,
        num_bytes=128,
        source=("train.py:9 in step",),
    )


def rank(number: int, *calls: CollectiveCall, begins: Begins = "none", step: int = 3) -> RankDifference:
    return RankDifference(rank=number, segment=0, step=step, begins=begins, calls=calls)


def test_nothing_differs() -> None:
    found = classify([None, None])
    assert (found.sides, found.collective, found.through) == (("equal", "equal"), None, None)
    assert explain(found) == ""


def test_one_rank_started_it_and_the_others_received_it() -> None:
    got = call(put=False, got=True)
    found = classify([rank(0, got), rank(1, call(put=True, got=True), begins="own"), rank(2, got)])
    assert found.sides == ("receiver", "origin", "receiver")
    assert (found.origins, found.receivers, found.collective, found.through) == ((1,), (0, 2), None, got)
    assert explain(found) == (
        "it started on rank 1; ranks 0, 2 put in what the reference did and received the difference through "
        "c10d.allreduce_.default in the group of ranks 0-2 (128 bytes) at train.py:9 in step; 3 of 3 ranks differ "
        "(ranks 0, 1, 2 from step 3 on)"
    )


def test_the_collective_itself() -> None:
    got = call(put=False, got=True, number=4)
    found = classify([rank(0, got), rank(1, got), None])
    assert found.sides == ("receiver", "receiver", "equal")
    assert found.collective == got
    assert explain(found) == (
        "what went into c10d.allreduce_.default (number 5 there) in the group of ranks 0-2 (128 bytes) at train.py:9 "
        "in step agrees on all ranks and what came out differs, so the collective itself is the origin; "
        "2 of 3 ranks differ (ranks 0, 1 from step 3 on)"
    )


@pytest.mark.parametrize("other", [{"group": "1-2"}, {"number": 1}, {"op": "c10d.broadcast_.default"}])
def test_another_call_explains_nothing(other: dict[str, Any]) -> None:
    found = classify([rank(0, call(put=False, got=True)), rank(1, call(put=True, got=False, **other), begins="own")])
    assert found.collective == call(put=False, got=True)


def test_a_later_collective_hands_on_what_an_earlier_one_brought() -> None:
    first, second = call(put=False, got=True), call(put=True, got=True, number=1)
    found = classify([rank(0, first, second), rank(1, call(put=True, got=True), second, begins="own")])
    assert found.sides == ("receiver", "origin")
    assert found.through == first
    found = classify([rank(0, first, second), rank(1, first, second)])
    assert found.collective == first


def test_the_ends_of_a_message_belong_together() -> None:
    got = call(put=False, got=True, op="c10d.recv_.default")
    put = call(put=True, got=False, op="c10d.send.default")
    assert classify([rank(0, got), rank(1, put, begins="own")]).sides == ("receiver", "origin")
    assert classify([rank(0, got), rank(1, put, begins="own")]).collective is None
    assert classify([rank(0, got), None]).collective == got


def test_ranks_that_differ_later_do_not_explain_an_earlier_step() -> None:
    got = call(put=False, got=True)
    found = classify([rank(0, got), rank(1, call(put=True, got=True), begins="own", step=4)])
    assert found.collective == got
    later = classify([rank(0, begins="own"), rank(1, got, step=4)])
    assert (later.sides, later.collective) == (("origin", "receiver"), None)


def test_entries_are_ordered_by_rank() -> None:
    with pytest.raises(ValueError, match="The entry of rank 0 is of rank 1"):
        classify([rank(1)])


def test_what_a_rank_tells_goes_through_json() -> None:
    told = rank(1, call(put=True, got=False), begins="own")
    assert RankDifference.from_dict(json.loads(json.dumps(told.to_dict()))) == told


def judge(*pairs: tuple[StepBuilder, StepBuilder], world_size: int = 2) -> Verdict:
    builder = VerdictBuilder("refs/run1", "runs/today")
    if world_size:
        builder.set_world_size(world_size)
    for number, (reference, current) in enumerate(pairs):
        builder.add_step(reference.view(rank=number), current.view(rank=number))
    return builder.finish()


def test_the_verdict_on_all_ranks_names_the_one_that_started() -> None:
    verdict = judge(
        (reducing_step(), reducing_step(delivered="other")),
        (reducing_step(), reducing_step(noise="ulp", delivered="other")),
    )
    assert verdict.cause == "forward"
    assert [(origin.rank, origin.op) for origin in verdict.origins] == [(1, "aten.mul.Tensor")]
    assert "Step 0 of rank 1, forward: aten.mul.Tensor" in verdict.explanation
    assert "it started on rank 1; rank 0 put in what the reference did" in verdict.explanation


def test_the_verdict_tells_of_the_rank_that_started_though_another_differs_earlier_in_its_step() -> None:
    verdict = judge(
        (reducing_step(), reducing_step(delivered="other")),
        (reducing_step(num_before=9), reducing_step(num_before=9, noise="ulp", delivered="other")),
    )
    assert (verdict.first_divergence.rank, verdict.first_divergence.op) == (0, REDUCE)
    assert verdict.cause == "forward"
    assert verdict.explanation.startswith("Step 0 of rank 1, forward: aten.mul.Tensor")


def test_the_verdict_on_all_ranks_names_the_collective() -> None:
    verdict = judge(
        (reducing_step(), reducing_step(delivered="other")), (reducing_step(), reducing_step(delivered="other"))
    )
    assert verdict.cause == "collective"
    assert [(origin.rank, origin.op, origin.is_origin) for origin in verdict.origins] == [
        (0, REDUCE, True),
        (1, REDUCE, True),
    ]
    assert verdict.first_divergence.is_origin is True
    assert "agrees on all ranks" in verdict.explanation
    assert "(128 bytes) at train.py:9 in step" in verdict.explanation


@pytest.mark.parametrize("world_size", [0, 3])
def test_one_rank_alone_cannot_tell(world_size: int) -> None:
    verdict = judge((reducing_step(), reducing_step(delivered="other")), world_size=world_size)
    assert verdict.cause == "unknown"
    assert verdict.origins == ()
    assert verdict.first_divergence.is_origin is None
    assert "what this rank put in agrees, and it came from another rank or from the collective" in verdict.explanation


def test_a_batch_on_one_rank() -> None:
    verdict = judge(
        (reducing_step(), reducing_step(delivered="other")),
        (reducing_step(), reducing_step(batch=7, delivered="other")),
    )
    assert verdict.cause == "data_content"
    assert verdict.origins == ()
    assert "it started on rank 1" in verdict.explanation


def test_another_reduction_is_an_argument_and_an_origin() -> None:
    verdict = judge(*[(reducing_step(), reducing_step(reduce="avg"))] * 2)
    assert verdict.cause == "collective"
    assert {(origin.kind, origin.op) for origin in verdict.origins} == {("argument", REDUCE)}
    assert "sum -> avg" in verdict.explanation.replace('"', "")


def test_what_is_sent_and_was_written_unseen_is_no_origin() -> None:
    reference, current = reducing_step(), reducing_step(delivered="other")
    current.digests[3] ^= 1
    assert current.sites[3].role == "sent"
    verdict = judge((reference, current), world_size=1)
    assert verdict.first_divergence.is_origin is None
    assert verdict.origins == ()


def test_a_read_in_flight_is_a_race_and_accuses_nobody() -> None:
    verdict = judge((reducing_step(), reducing_step(detail=IN_FLIGHT)), world_size=1)
    assert verdict.first_divergence.kind == "structure"
    assert verdict.origins == ()
    assert verdict.cause != "collective"
    assert "which is a race" in verdict.explanation
    among = compare_steps(reducing_step().view(), reducing_step(detail=IN_FLIGHT).view()).among_ranks
    assert among is not None
    assert (among.begins, among.calls) == ("open", ())
    reference, current = reducing_step(detail=IN_FLIGHT), reducing_step(detail=IN_FLIGHT)
    current.digests[-1] ^= 1
    verdict = judge((reference, current), world_size=1)
    assert verdict.first_divergence.op == "aten.sum.default"
    assert verdict.first_divergence.is_origin is None


def test_a_collective_that_is_gone() -> None:
    reference, current = reducing_step(), StepBuilder()
    current.op("aten.sum.default", current.op("aten.mul.Tensor", current.batch("batch[0]", [1, 2])))
    verdict = judge((reference, current), world_size=1)
    assert ("missing", REDUCE) in {(origin.kind, origin.op) for origin in verdict.origins}
