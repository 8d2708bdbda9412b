import pytest
from pairs import record, steps_of
from step_builder import StepBuilder

from det_callbacks.errors import (
    NotComparableError,
    NothingComparedError,
    ReferenceFormatError,
    ReferenceNotFoundError,
    SelectionError,
)
from det_callbacks.judge import compare_runs
from det_callbacks.runs.selection import Selection
from det_callbacks.verification import open_reference


@pytest.fixture
def reference(tmp_path):
    return record(tmp_path / "reference", steps_of(range(10)))


@pytest.mark.parametrize(("ours", "theirs", "kind"), [((0, 10), (0, 6), "missing"), ((0, 6), (0, 10), "extra")])
def test_run_of_other_length_diverges(tmp_path, ours, theirs, kind):
    reference = record(tmp_path / "reference", steps_of(range(*ours)))
    current = record(tmp_path / "current", steps_of(range(*theirs)))
    verdict = compare_runs(reference, current)
    assert (verdict.verdict, verdict.cause) == ("diverged", "structure")
    assert (verdict.first_divergence.kind, verdict.first_divergence.step) == (kind, 6)
    assert (verdict.counts.steps_compared, verdict.counts.sites_differing) == (6, 4)
    side = "reference" if kind == "missing" else "current run"
    assert f"Steps 6 to 9 (4 of them) are only in the {side}; the 6 steps that both have agree" in verdict.explanation
    common = compare_runs(reference, current, steps="common")
    assert (common.verdict, common.coverage.steps) == ("match", (0, 5))
    assert "Only steps that both runs have" in common.explanation


def test_an_incomplete_run_is_refused_as_the_reference_and_misses_steps_as_the_current_one(tmp_path, reference):
    part = record(tmp_path / "part", steps_of(range(4)), complete=False)
    with pytest.raises(ReferenceFormatError, match=r"incomplete.*steps=\"common\"") as caught:
        compare_runs(part, reference)
    assert (caught.value.exit_code, caught.value.path) == (2, str(part))
    verdict = compare_runs(part, reference, steps="common")
    assert (verdict.verdict, verdict.counts.steps_compared) == ("match", 4)
    assert "The reference is incomplete" in verdict.explanation
    verdict = compare_runs(reference, part)
    assert (verdict.verdict, verdict.first_divergence.kind, verdict.first_divergence.step) == ("diverged", "missing", 4)
    assert "The current run is incomplete" in verdict.explanation


def test_nothing_in_common_is_no_match(tmp_path, reference):
    other = record(tmp_path / "other", steps_of(range(20, 25)))
    empty = [record(tmp_path / name, {step: StepBuilder() for step in range(3)}) for name in "ab"]
    with pytest.raises(NothingComparedError, match=r"steps 0 to 9.*steps 20 to 24"):
        compare_runs(reference, other)
    with pytest.raises(NothingComparedError, match="none that holds a site"):
        compare_runs(*empty)


@pytest.mark.parametrize("other", [{"level": "state"}, {"modules": ("net.*",)}, {"phases": ("forward",)}])
def test_other_selection_is_refused(tmp_path, reference, other):
    current = record(tmp_path / "current", steps_of(range(10)), selection=Selection(**other))
    with pytest.raises(SelectionError, match=next(iter(other))) as caught:
        compare_runs(reference, current)
    assert caught.value.exit_code == 2


def test_other_world_size_is_not_comparable(tmp_path, reference):
    two = record(tmp_path / "two", steps_of(range(10)), others=[steps_of(range(10))])
    verdict = compare_runs(reference, two)
    assert (verdict.verdict, verdict.exit_code) == ("not_comparable", 3)
    assert "world size of 1 and this run one of 2" in verdict.explanation
    with pytest.raises(NotComparableError, match="world size of 2 and this run one of 1") as caught:
        open_reference(two, steps="all")
    assert (caught.value.exit_code, caught.value.verdict.verdict) == (3, "not_comparable")


def test_missing_run_and_wrong_word(tmp_path, reference):
    for pair in ((tmp_path / "nowhere", reference), (reference, tmp_path / "nowhere")):
        with pytest.raises(ReferenceNotFoundError):
            compare_runs(*pair)
    with pytest.raises(ValueError, match='"all" or "common"'):
        compare_runs(reference, reference, steps="some")
