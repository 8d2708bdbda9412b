"""A verdict's JSON form, there and back."""

import json
from dataclasses import replace
from typing import Any

import pytest
from verdicts import DIVERGED, MATCH, NOT_COMPARABLE

from det_callbacks.verdict import Verdict

FULL = replace(
    NOT_COMPARABLE,
    coverage=replace(MATCH.coverage, ops_skipped={"view": 3}, opaque_regions=("a",), replayed={"b": {"count": 1}}),
    evidence=("first", "second"),
)


@pytest.mark.parametrize(
    "verdict", [MATCH, DIVERGED, FULL, replace(MATCH, coverage=replace(MATCH.coverage, steps=None))]
)
def test_what_was_written_is_read(verdict: Verdict) -> None:
    read = Verdict.from_dict(json.loads(json.dumps(verdict.to_dict())))
    assert read == verdict
    assert hash(read.origins) == hash(verdict.origins)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"verdict": "equal"},
        {"cause": "weather"},
        {"counts": {"steps_compared": 1}},
        {"counts": None},
        {"first_divergence": {"rank": 0}},
        {"first_divergence": 3},
        {"origins": 3},
        {"coverage": {}},
        {"environment": []},
        {"environment": {"differences": [{"name": "x"}]}},
        {"evidence": None},
    ],
)
def test_another_structure_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no verdict of schema|Expected|Invalid enum value|missing required field"):
        Verdict.from_dict(FULL.to_dict() | change)
    for damaged in (None, [], "match", {}):
        with pytest.raises(ValueError, match="no verdict of schema 1"):
            Verdict.from_dict(damaged)
