"""A verdict's JSON form, there and back; and what it says to record next."""

import json
from dataclasses import replace

import pytest
from verdicts import DIVERGED, DIVERGENCE, MATCH, NOT_COMPARABLE

from det_callbacks.compare.next_recording import next_recording
from det_callbacks.runs.selection import Selection
from det_callbacks.verdict import Verdict

FULL = replace(
    NOT_COMPARABLE,
    coverage=replace(
        MATCH.coverage, ops_skipped={"view": 3}, opaque_regions=("a",), replayed={"b": {"count": 1}}
    ),
    evidence=("first", "second"),
)


def test_what_was_written_is_read():
    for verdict in (
        MATCH,
        DIVERGED,
        FULL,
        replace(MATCH, coverage=replace(MATCH.coverage, steps=None)),
    ):
        read = Verdict.from_dict(json.loads(json.dumps(verdict.to_dict())))
        assert read == verdict
        assert hash(read.origins) == hash(verdict.origins)


def test_another_structure_is_refused():
    changes = [
        {"schema": 2},
        {"verdict": "equal"},
        {"counts": {"steps_compared": 1}},
        {"first_divergence": 3},
    ]
    for change in (*changes, {"environment": {"differences": [{"name": "x"}]}}, {"evidence": None}):
        with pytest.raises(
            ValueError,
            match=r"not a verdict of schema|Expected|Invalid enum|missing required field",
        ):
            Verdict.from_dict(FULL.to_dict() | change)
    for damaged in (None, [], "match", {}):
        with pytest.raises(ValueError, match="not a verdict of schema 1"):
            Verdict.from_dict(damaged)


STATE = replace(
    DIVERGENCE, step=40, op="", module="", phase="state", name="net.weight", is_origin=None
)
WHOLE = replace(STATE, kind="missing", shape=None, dtype=None, name=None, phase="other")
REGION, CALL = (
    replace(DIVERGENCE, **one) for one in ({"op": "compiled.forward.0"}, {"kind": "argument"})
)
OF_STATE, OF_STEP, OF_CALL = (
    replace(DIVERGED, first_divergence=one, origins=()) for one in (STATE, WHOLE, CALL)
)
OF_REGION = replace(DIVERGED, first_divergence=REGION, origins=(REGION,))
OF_COLLECTIVE = replace(DIVERGED, origins=(replace(DIVERGENCE, op="c10d.allreduce_.default"),))
KEEP = {"level": "op", "only_steps": [3], "keep_tensors": ["forward/net.head:aten.addmm.default"]}


@pytest.mark.parametrize(
    ("verdict", "selection", "expected"),
    [
        (OF_STATE, {"level": "state"}, {"level": "op", "only_steps": [40]}),
        (
            OF_STATE,
            {"level": "state", "every_n_steps": 5},
            {"level": "op", "only_steps": [36, 37, 38, 39, 40]},
        ),
        (OF_STATE, {"level": "state", "every_n_steps": 20}, {"level": "state"}),
        (
            OF_STATE,
            {"level": "state", "only_steps": (3, 37, 40)},
            {"level": "op", "only_steps": [38, 39, 40]},
        ),
        (OF_STATE, {"level": "state", "only_steps": (40, 41)}, {"level": "state"}),
        (DIVERGED, {"every_n_steps": 20}, KEEP),  # an origin needs no step before it
        (OF_REGION, {}, {"level": "op", "only_steps": [3], "compiled": "eager"}),
        (OF_STATE, {"modules": ("net*",)}, {"level": "op", "only_steps": [40]}),
        (OF_STEP, {"level": "state"}, None),
        *((one, {}, None) for one in (OF_COLLECTIVE, OF_STATE, OF_CALL, MATCH)),
    ],
)
def test_what_more_can_be_recorded(verdict, selection, expected):
    found = replace(verdict, record_next=next_recording(verdict, Selection(**selection)))
    assert found.record_next == expected
    assert Verdict.from_dict(found.to_dict()) == found
