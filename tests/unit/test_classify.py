"""Who started a difference, from what each rank tells of its first differing step;
and the verdict on all of them.
"""

from typing import Any

import pytest
from step_builder import Pair, StepBuilder, both, judge, reducing_step

from det_callbacks.compare.ranks import (
    CollectiveCall,
    FirstDifference,
    classify,
    compare_steps,
    describe_first,
)
from det_callbacks.runs.program import IN_FLIGHT
from det_callbacks.runs.selection import Selection
from det_callbacks.verdict import Divergence

REDUCE = "c10d.allreduce_.default"


def call(**place: Any) -> CollectiveCall:
    return CollectiveCall(
        **{"op": REDUCE, "group": "0-2", "number": 0, "source": ("train.py:9 in step",), **place}
    )


FIRST, SECOND = call(), call(number=1)
SEND, RECEIVE = (call(op=f"c10d.{name}.default") for name in ("send", "recv_"))
WITH = {"op": REDUCE, "rank": 0, "phase": "forward", "kind": "content"}


def rank(*received, put=(), begins="received", step=3) -> FirstDifference:
    """Return what a rank tells; its number does not matter."""
    delivered = tuple((one, Divergence(step=step, **WITH)) for one in received)
    changed = frozenset(one.key for one in put)
    first = Divergence(step=step, **WITH)
    return FirstDifference(
        order=(0, step, 0, 0), first=first, begins=begins, changed=changed, received=delivered
    )


@pytest.mark.parametrize(
    ("ranks", "sides", "collective", "through"),
    [
        ([None, None], "equal equal", None, None),
        (
            [rank(FIRST), rank(put=(FIRST,), begins="local"), rank(FIRST)],
            "receiver origin receiver",
            None,
            FIRST,
        ),
        ([rank(FIRST), rank(FIRST), None], "receiver receiver equal", FIRST, None),
        # another call explains nothing
        *(
            ([rank(FIRST), rank(put=(other,), begins="local")], "receiver origin", FIRST, None)
            for other in (call(group="1-2"), SECOND, call(op="c10d.broadcast_.default"))
        ),
        # a later collective hands on what an earlier one brought
        (
            [rank(FIRST, put=(SECOND,)), rank(put=(FIRST, SECOND), begins="local")],
            "receiver origin",
            None,
            FIRST,
        ),
        (
            [rank(FIRST, put=(SECOND,)), rank(FIRST, put=(SECOND,))],
            "receiver receiver",
            FIRST,
            None,
        ),
        # the two ends of a message
        ([rank(RECEIVE), rank(put=(SEND,), begins="local")], "receiver origin", None, RECEIVE),
        ([rank(RECEIVE), None], "receiver equal", RECEIVE, None),
        # ranks that differ later do not explain an earlier step
        ([rank(FIRST), rank(put=(FIRST,), begins="local", step=4)], "receiver origin", FIRST, None),
        ([rank(begins="local"), rank(FIRST, step=4)], "origin receiver", None, FIRST),
    ],
)
def test_who_started_it(ranks, sides, collective, through):
    found = classify(ranks)
    assert (" ".join(found.sides), found.collective, found.through) == (sides, collective, through)


def differing(**changes: Any) -> Pair:
    return reducing_step(), reducing_step(delivered="other", **changes)


def sent_unseen() -> Pair:
    reference, current = differing()
    current.digests[3] ^= 1
    assert current.sites[3].role == "sent"
    return reference, current


def collective_gone() -> Pair:
    current = StepBuilder()
    current.op("aten.sum.default", current.op("aten.mul.Tensor", current.batch("batch[0]", [1, 2])))
    return reducing_step(), current


# of level state
GRADIENTS = both(lambda step, now: step.named("grad of net.weight", 1 + now, phase="gradient"))
WEIGHT = both(
    lambda step, now: step.op("aten.mm.default", "net.weight", weights={"net.weight": 1 + now})
)
# of what a collective brought, and no op read
MADE = both(
    lambda step, now: (
        step.row(1, role="sent", op=REDUCE),
        step.op("f", "?made", weights={"?made": 1 + now}),
    )
)
REDUCED, ULP = (reducing_step(), reducing_step(reduce="avg")), differing(noise="ulp")
LATER, UNRECORDED = "rank 0 differs a step later", "the step before was not recorded"
MUL = "aten.mul.Tensor"
RECEIVED = "it started on rank 1; rank 0 received the difference"
CANNOT_TELL = "started the difference or received it"


@pytest.mark.parametrize(
    ("pairs", "cause", "origins", "is_origin", "said"),
    [
        (
            [differing()] * 2,
            "collective",
            {0: REDUCE, 1: REDUCE},
            True,
            "0-1 (train.py:9, step) match on all",
        ),
        (
            [differing()],
            "unknown",
            {},
            None,
            "what this rank sent matches, and the difference came from another rank or",
        ),
        ([REDUCED] * 2, "collective", {0: REDUCE, 1: REDUCE}, True, "sum -> avg"),
        ([sent_unseen()], "collective", {}, None, ""),
        ([collective_gone()], "collective", {0: REDUCE}, True, ""),
        (
            [GRADIENTS] * 2,
            "backward",
            {},
            None,
            f"it is unknown whether ranks 0 and 1 {CANNOT_TELL}",
        ),
        (
            [GRADIENTS, None],
            "backward",
            {},
            None,
            "it started on rank 0; 1 of 2 ranks differ (rank 0 from",
        ),
        # what nobody saw written was received where another rank's batch differed,
        # and so may an argument have been
        ([GRADIENTS, differing(batch=7)], "data_content", {}, False, RECEIVED),
        ([LATER, GRADIENTS, differing(batch=7)], "data_content", {}, False, RECEIVED),
        (
            [differing(), ULP],
            "forward",
            {1: MUL},
            True,
            "rank 1; rank 0 sent the same data as in the reference",
        ),
        ([MADE, ULP], "forward", {1: MUL}, False, RECEIVED),
        ([WEIGHT] * 2, "initial_weights", {}, False, "it started on ranks 0 and 1;"),
        (
            [UNRECORDED, *[WEIGHT] * 2],
            "unknown",
            {},
            False,
            f"it is unknown whether ranks 0 and 1 {CANNOT_TELL}",
        ),
        (
            [UNRECORDED, WEIGHT, None],
            "unknown",
            {},
            False,
            "it started on rank 0; 1 of 2 ranks differ",
        ),
        (
            [LATER, REDUCED, ULP],
            "forward",
            {1: MUL},
            True,
            f"rank 1; it is unknown whether rank 0 {CANNOT_TELL}",
        ),
    ],
)
def test_the_verdict_on_all_ranks(pairs, cause, origins, is_origin, said, tmp_path):
    options = {"selection": Selection(only_steps=(7,))} if UNRECORDED in pairs else {}
    ranks = (pair for pair in pairs if pair not in (LATER, UNRECORDED))
    verdict = judge(tmp_path, *ranks, steps={0: 7 + (LATER in pairs)}, **options)
    assert (verdict.cause, verdict.first_divergence.is_origin) == (cause, is_origin)
    assert {(origin.rank, origin.op) for origin in verdict.origins} == {*origins.items()}
    assert all(origin.is_origin for origin in verdict.origins)
    assert said in verdict.explanation.replace('"', "")


def test_a_read_in_flight_is_a_race_and_accuses_nobody(tmp_path):
    verdict = judge(tmp_path, (reducing_step(), reducing_step(detail=IN_FLIGHT)))
    assert (verdict.first_divergence.kind, verdict.origins) == ("structure", ())
    assert verdict.cause != "collective"
    assert "which is a race" in verdict.explanation
    among = describe_first(
        compare_steps(reducing_step().view(), reducing_step(detail=IN_FLIGHT).view())
    )
    assert (among.begins, among.received) == ("ambiguous", ())
    reference, current = reducing_step(detail=IN_FLIGHT), reducing_step(detail=IN_FLIGHT)
    current.digests[-1] ^= 1
    first = judge(tmp_path, (reference, current)).first_divergence
    assert (first.op, first.is_origin) == ("aten.sum.default", None)


def after_an_exchange(kind: str, through: str, *, changed: bool) -> StepBuilder:
    """A step in which Python, which reads a number or is not seen to,
    does what came from the other ranks.
    """
    made = reducing_step(delivered="other" if changed and through != "gradient" else "all")
    last = len(made.sites) - 1
    if through == "gradient":
        last = made.named("grad of net.weight", int(changed), phase="gradient")
    if through != "unseen":
        made.row(
            made.digests[last], op="aten._local_scalar_dense.default", role="value", inputs=(last,)
        )
    other = made.batch("unchanged", [1])
    if kind == "argument":
        made.op("aten.mul.Tensor", other, arguments={"other": 2.0 if changed else 1.0})
    elif changed == (kind == "extra"):
        made.op("aten.add.Tensor", other)
    return made


@pytest.mark.parametrize(
    ("kind", "through"), [("argument", "delivered"), ("missing", "gradient"), ("extra", "unseen")]
)
def test_what_python_does_with_what_came_from_others_starts_nothing(kind, through, tmp_path):
    receiver = (
        after_an_exchange(kind, through, changed=False),
        after_an_exchange(kind, through, changed=True),
    )
    alone = compare_steps(*(made.view() for made in receiver)).origins
    assert bool(alone) == (through == "unseen")  # to this rank alone it looks like an origin
    verdict = judge(tmp_path, receiver, ULP)
    assert [origin.rank for origin in verdict.origins] == [1]
    assert "it started on rank 1; rank 0 " in verdict.explanation
    assert " received the difference" in verdict.explanation


def test_state_that_was_restored_otherwise_is_of_the_rank():
    difference = compare_steps(*(one.view() for one in GRADIENTS))
    assert [describe_first(difference, is_unrestored=one).begins for one in (False, True)] == [
        "ambiguous",
        "external",
    ]


def test_the_first_divergence_is_the_least_though_it_was_received(tmp_path):
    late = reducing_step(num_before=9), reducing_step(num_before=9, noise="ulp", delivered="other")
    verdict = judge(tmp_path, differing(), late)
    assert (verdict.first_divergence.rank, verdict.first_divergence.is_origin) == (0, False)
    assert verdict.explanation.startswith("Step 7 of rank 1, forward: aten.mul.Tensor")
    assert {origin.rank for origin in verdict.origins} == {1}
    assert [entry.rank for entry in verdict.trail] == [1, 0], "it leads to the first divergence"
    assert verdict.trail[-1].current == verdict.first_divergence.current_digest


def test_of_two_ranks_that_differ_at_the_same_place_the_origin_is_the_first_divergence(tmp_path):
    received, late = (
        differing(),
        (
            reducing_step(num_before=2),
            reducing_step(num_before=2, noise="ulp", delivered="other"),
        ),
    )
    found = [compare_steps(*(one.view() for one in pair)) for pair in (received, late)]
    places = [next(iter(one.kinds)) for one in found]
    assert places[0] == places[1]
    verdict = judge(tmp_path, received, late)
    assert (verdict.first_divergence.rank, verdict.first_divergence.is_origin) == (1, True)
    assert {entry.rank for entry in verdict.trail} == {1}
