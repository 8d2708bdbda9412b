"""A verification stores what differs and seals a record of the rest;
the judge says what it says of recordings.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import require_one_verdict
from step_builder import (
    StepBuilder,
    detector,
    record,
    reducing_step,
    run_fits,
    steps_of,
    training_step,
)

from det_callbacks.compare.record import (
    TOGETHER,
    FitRecord,
    RankRecord,
    Stop,
    Tally,
    record_path,
    write_record,
)
from det_callbacks.errors import NothingComparedError, ReferenceFormatError
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Verdict
from det_callbacks.verify import verification as verifying
from det_callbacks.verify.judge import compare_runs

CHANGES: list[dict[str, Any]] = [{}, {}, {}, {"noise_at": 2}, {"lr": 0.2}, {"insert_at": 3}]
FITS = st.lists(st.lists(st.sampled_from(range(len(CHANGES))), max_size=4), min_size=1, max_size=3)


def made(fits: list[list[int]]) -> list[dict[int, StepBuilder]]:
    return [
        {step: training_step(muls=4, **CHANGES[change]) for step, change in enumerate(fit)}
        for fit in fits
    ]


@settings(max_examples=30, deadline=None)
@given(ours=FITS, theirs=FITS, is_common=st.booleans())
def test_the_verdict_is_that_of_two_recordings(tmp_path_factory, ours, theirs, is_common):
    folder = tmp_path_factory.mktemp("runs")
    steps: Any = "common" if is_common else "all"
    reference = record(folder / "reference", made([[0] * len(fit) for fit in ours]))
    current = made(theirs)
    recorded = record(folder / "recorded", current)
    live = detector(reference, folder / "verified", steps=steps)
    run_fits(live, current)
    try:
        expected = compare_runs(reference, recorded, steps=steps).to_dict()
    except NothingComparedError:
        with contextlib.suppress(NothingComparedError):
            assert live.finish().verdict == "diverged"  # by whole steps that only one of them has
        return
    found = live.finish()
    require_one_verdict(found, reference, folder / "verified")
    # the recording has no evidence, from which to read findings; a verification needs none
    expected["evidence"] = [
        line for line in expected["evidence"] if "findings of the current run" not in line
    ]
    names = {"current": ""}
    assert found.to_dict() | names == expected | names


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return record(tmp_path / "reference", steps_of(range(10)))


def verified(reference: Path, current: Path, **changes: Any) -> Verdict:
    live = detector(reference, current)
    run_fits(live, [steps_of(range(10), **changes)])
    return live.finish()


def test_steps_that_were_not_stored_are_counted_and_the_first_that_differs_is_stored(
    reference, tmp_path, monkeypatch
):
    match = verified(reference, tmp_path / "match")
    assert (match.counts.steps_compared, match.coverage.steps, match.coverage.ops_seen) == (
        10,
        (0, 9),
        30,
    )
    assert not list((tmp_path / "match" / "programs").iterdir())
    changes = {f"s{step}": {"noise_at": 2} for step in range(3, 10)}
    stored = verified(reference, tmp_path / "all", **changes)
    monkeypatch.setattr(verifying, "STORED_STEPS", 2)
    some = verified(reference, tmp_path / "some", **changes)
    assert (some.counts, some.explanation) == (stored.counts, stored.explanation)
    require_one_verdict(some, reference, tmp_path / "some")
    reference = record(tmp_path / "later", {5: training_step()})
    live = detector(reference, tmp_path / "current")
    run_fits(live, [{step: training_step(noise_at=1) for step in range(6)}])
    verdict = live.finish()
    assert "Steps 0 to 4 (5 of them) are only in the current run" in verdict.explanation
    assert [origin.step for origin in verdict.origins] == [5]
    require_one_verdict(verdict, reference, tmp_path / "current")


@pytest.mark.parametrize("is_checked", [True, False])
def test_an_op_that_was_not_checked_for_unseen_writes_is_no_origin(reference, tmp_path, is_checked):
    steps = steps_of(range(10), s9={"noise_at": 2})
    changed = steps[9]
    position = [at for at, site in enumerate(changed.sites) if site.module == "net.chain"][2]
    changed.checked = frozenset({position} if is_checked else {0})
    live = detector(reference, tmp_path / "current")
    run_fits(live, [steps])
    verdict = live.finish()
    require_one_verdict(verdict, reference, tmp_path / "current")
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.is_origin is (is_checked or None)
    assert len(verdict.origins) == is_checked
    assert ("were not checked for unseen writes" in verdict.explanation) is not is_checked


# what may not become a match


@pytest.mark.parametrize("ends", ["stop", "early"])
def test_steps_after_a_stop_are_not_missing(ends, reference, tmp_path):
    live = detector(reference, tmp_path / "current")
    run_fits(live, [steps_of(range(4), s3={"noise_at": 1})], ends=False)
    verdict = live.stop("StopError") if ends == "stop" else live.finish(is_early=True)
    assert (verdict.cause, verdict.counts.steps_compared) == ("forward", 4)
    assert "only in the reference" not in verdict.explanation
    require_one_verdict(verdict, reference, tmp_path / "current")


def test_what_is_not_over_is_no_match(reference, tmp_path):
    stopped = detector(reference, tmp_path / "stopped")
    run_fits(stopped, [steps_of(range(4))], ends=False)
    assert stopped.stop("KeyboardInterrupt") is None
    with pytest.raises(
        NothingComparedError, match=r"by KeyboardInterrupt after step 3.*the rest was not compared"
    ):
        compare_runs(reference, tmp_path / "stopped")
    running = detector(reference, tmp_path / "running")
    run_fits(running, [steps_of(range(10))])
    assert running.finish().verdict == "match"
    running.begin_fit(1)
    with pytest.raises(
        NothingComparedError, match="was killed, or is still running: it compared no step"
    ):
        compare_runs(reference, tmp_path / "running")
    running.close(complete=False)


def test_what_a_killed_verification_found_before_is_known(reference, tmp_path, monkeypatch):
    """As after a kill, since nothing was closed; the step under way,
    which is stored before the record, is lost.
    """
    monkeypatch.setattr("det_callbacks.verify.verification.STEPS_BETWEEN_RECORDS", 2)
    killed = detector(reference, tmp_path / "killed")
    run_fits(killed, [steps_of(range(5))], ends=False)
    with pytest.raises(
        NothingComparedError, match=r"compared steps until 3, and found no difference"
    ):
        compare_runs(reference, tmp_path / "killed")
    differing = steps_of(range(7), s5={"noise_at": 1}, s6={"noise_at": 1})
    killed.add(differing[5].trace(), step=5, epoch=0)
    before = record_path(tmp_path / "killed", 0).read_bytes()
    killed.add(differing[6].trace(), step=6, epoch=0)
    verdict = compare_runs(reference, tmp_path / "killed")
    assert (verdict.verdict, verdict.cause, verdict.first_divergence.step) == (
        "diverged",
        "forward",
        5,
    )
    assert verdict.counts.steps_compared == 7
    assert "was killed, or is still running: it compared steps until 6" in verdict.explanation
    record_path(tmp_path / "killed", 0).write_bytes(before)
    assert compare_runs(reference, tmp_path / "killed").counts.steps_compared == 6
    killed.close(complete=False)


def of_another_run(path: Path) -> None:
    content = json.loads(path.read_bytes())["content"]
    write_record(
        path.parent.parent,
        msgspec.convert({**content, "run_id": "another"}, RankRecord, strict=False),
    )


def without_a_stored_step(path: Path) -> None:
    stored = path.parent / "attempt-000.arrows"
    stored.write_bytes(stored.read_bytes()[:1000])


def with_flipped_bits(path: Path) -> Iterator[None]:
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        yield


@pytest.mark.parametrize(
    "damage", [Path.unlink, of_another_run, without_a_stored_step, with_flipped_bits]
)
def test_a_damaged_record_is_an_error(damage, reference, tmp_path):
    verified(reference, tmp_path / "current", s3={"noise_at": 1})
    for _ in damage(record_path(tmp_path / "current", 0)) or [None]:
        with pytest.raises(ReferenceFormatError):
            compare_runs(reference, tmp_path / "current")


def test_a_verification_is_no_reference_and_belongs_to_its_own(reference, tmp_path):
    verified(reference, tmp_path / "current")
    with pytest.raises(ReferenceFormatError, match="cannot be a reference"):
        compare_runs(tmp_path / "current", reference)
    record(reference, steps_of(range(10)), overwrite=True)
    with pytest.raises(ReferenceFormatError, match="verified against a different reference"):
        compare_runs(reference, tmp_path / "current")


@pytest.mark.parametrize("reason", [TOGETHER, "ValueError"])
def test_a_rank_that_was_stopped_before_is_not_known_to_agree(reason, tmp_path):
    """What a collective delivered to one rank is its own fault only where all others put
    in what the reference did.
    """
    reference = record(tmp_path / "reference", {1: reducing_step()}, others=[{1: reducing_step()}])
    current = record(
        tmp_path / "current", {1: reducing_step(delivered="x")}, others=[{}], purpose="verify"
    )
    runs = Run.open(reference), Run.open(current)
    for rank, stored in enumerate((1, 0)):
        fit = FitRecord(
            segment=0, compared={1}, differing={1} if stored else set(), num_stored=stored
        )
        found = RankRecord(
            run_id=runs[1].manifest.run_id,
            reference_id=runs[0].manifest.run_id,
            rank=rank,
            steps="all",
            fits=(fit,),
            tally=Tally(num_steps=1, num_sites=6, num_differing=2 * stored),
            stopped=Stop(segment=0, step=1, reason=TOGETHER if stored else reason),
        )
        write_record(current, found)
    verdict = compare_runs(reference, current)
    assert verdict.verdict == "diverged"
    assert verdict.cause == ("collective" if reason == TOGETHER else "unknown")
