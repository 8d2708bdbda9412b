"""What became of each step of a fit, against what comparing the same steps says."""

from pathlib import Path
from typing import Any

import pytest
from step_builder import reducing_step, training_step
from stored_runs import append, create, record

from det_callbacks.compare.ranks import first_difference, walk_outcomes
from det_callbacks.compare.record import FitRecord, ranges_of
from det_callbacks.compare.step import compare_steps, differing_sites
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter

FAULTS: list[dict[str, Any]] = [
    {"noise_at": 7},
    {"insert_at": 5},
    {"remove_at": 5},
    {"insert_at": 5, "factor": 3.0},
    {"seed": 4},
    {"rows": (2, 1, 3, 4)},
    {"weight": 99},
    {"lr": 0.2},
    {"lr": 0.2, "lr_varies": True},
    {"backward_noise": 1},
    {"dtype": "float64"},
    {"noise_at": 3, "unseen_at": 3},
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_origins_are_those_of_the_comparison(fault: dict[str, Any]) -> None:
    varies = {key: value for key, value in fault.items() if key == "lr_varies"}
    reference, current = training_step(**varies).view(), training_step(**fault).view()
    told = compare_steps(reference, current, limit=10_000)
    found = differing_sites(reference, current)
    assert found is not None
    assert len(found.rows) == told.num_differing
    judged = list(zip(found.origins.tolist(), found.unproven.tolist(), strict=True))
    assert [is_origin for is_origin, _ in judged] == [one.is_origin is True for one in told.divergences]
    assert [is_unproven for _, is_unproven in judged] == [one.is_origin is None for one in told.divergences]
    assert bool(found.sources.any()) == any(finding.is_source for finding in told.findings)


def test_what_a_collective_delivered_is_not_proven() -> None:
    found = differing_sites(reducing_step().view(), reducing_step(delivered="other").view())
    assert found is not None
    assert found.unproven.any()
    assert not found.origins.any()


def test_equal_steps_have_no_differences() -> None:
    assert differing_sites(training_step().view(), training_step().view()) is None


def outcomes(reference: Path, current: Path, compared: Any = None) -> list[tuple[int, str]]:
    ours, theirs = Run.open(reference), Run.open(current)
    return [(one.step, one.outcome) for one in walk_outcomes(ours, theirs, 0, 0, compared or {})]


def test_steps_of_two_recordings(tmp_path: Path) -> None:
    reference = record(tmp_path / "reference", range(4))
    writer = create(tmp_path / "current")
    append(writer, range(2))
    append(writer, [2], seed=1)
    append(writer, [4])
    writer.close(complete=True)
    expected = [(0, "equal"), (1, "equal"), (2, "differs"), (3, "missing"), (4, "extra")]
    assert outcomes(reference, tmp_path / "current") == expected
    runs = Run.open(reference), Run.open(tmp_path / "current")
    assert first_difference(*runs, 0, 0, {}) == 2
    assert first_difference(runs[0], runs[0], 0, 0, {}) is None


def verified(path: Path) -> RunWriter:
    writer = create(path, purpose="verify")
    append(writer, [2], seed=1)
    writer.close(complete=True)
    return writer


def test_steps_that_a_verification_did_not_keep(tmp_path: Path) -> None:
    reference, current = record(tmp_path / "reference", range(7)), tmp_path / "current"
    verified(current)
    unknown = [(step, "differs" if step == 2 else "unknown") for step in range(7)]
    assert outcomes(reference, current) == unknown
    compared = {0: FitRecord(segment=0, compared=((1, 5),), differing=((2, 2), (4, 4)))}
    assert outcomes(reference, current, compared) == [
        (0, "unknown"),
        (1, "equal"),
        (2, "differs"),
        (3, "equal"),
        (4, "unkept"),
        (5, "equal"),
        (6, "unknown"),
    ]
    assert first_difference(Run.open(reference), Run.open(current), 0, 0, compared) == 2


def test_ranges_are_of_what_the_reference_has() -> None:
    known = [0, 10, 20, 40, 50]
    assert ranges_of([10, 20, 40], known) == ((10, 40),)
    assert ranges_of([50, 0, 20, 10, 99], known) == ((0, 20), (50, 50))
    assert ranges_of([], known) == ()
