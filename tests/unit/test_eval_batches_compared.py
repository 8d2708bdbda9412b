"""Batches that are not trained on: their points, the segments of a run, and comparing them one at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from det_callbacks.compare.eval_batches import EvalBatches, read_batches
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.errors import NothingComparedError, ReferenceFormatError
from det_callbacks.trace.eval_batches import (
    FIT,
    Batch,
    are_stages,
    batches_of,
    is_batch_point,
    key_of,
    point_of,
    stages_of_segments,
)
from det_callbacks.trace.evidence import Row
from det_callbacks.trace.store import Run
from det_callbacks.trace.writer import RunWriter

SELECTION = {"level": "state", "modules": ["*"], "phases": ["forward"], "every_n_steps": 1}


def batch(number: int, value: int = 0, *, step: int = 0, stage: str = "test", loader: int = 0) -> Batch:
    return (Row(step, point_of(stage, number, loader), "batch[0]", value),)


def compared(
    reference: list[Batch], current: list[Batch], *, is_common: bool = False, **options: Any
) -> VerdictBuilder:
    builder = VerdictBuilder("a", "b")
    comparison = EvalBatches(iter(reference), rank=0, segment=0, is_alone=True, is_common=is_common, **options)
    for one in current:
        comparison.add(one, builder)
    comparison.end(builder)
    return builder


@pytest.mark.parametrize(
    ("point", "is_one"),
    [
        ("validation batch 0", True),
        ("sanity check batch 12 of loader 3", True),
        ("prediction batch 1", True),
        ("batch start", False),
        ("before validation", False),
        ("validation batch x", False),
        ("after EMA.on_test_batch 3", False),
    ],
)
def test_which_points_are_batches(point: str, is_one: bool) -> None:
    assert is_batch_point(point) is is_one


def test_batches_are_in_the_order_of_a_fit() -> None:
    ordered = [
        batch(0, stage="sanity check"),
        batch(9, step=3, stage="validation"),
        batch(10, step=3, stage="validation"),
        batch(0, step=3, stage="validation", loader=1),
        batch(0, step=10, stage="validation"),
    ]
    assert sorted(ordered, key=key_of) == ordered
    assert list(batches_of(row for one in ordered for row in one)) == ordered


def test_of_each_run_one_batch_is_held() -> None:
    num_read = 0

    def read() -> Iterator[Batch]:
        nonlocal num_read
        for number in range(1_000):
            num_read += 1
            yield batch(number)

    builder = VerdictBuilder("a", "b")
    comparison = EvalBatches(read(), rank=0, segment=0, is_alone=True, is_common=False)
    for number in range(1_000):
        comparison.add(batch(number), builder)
        assert num_read <= number + 2
    assert builder.finish().coverage.batches == {"test": 1_000}


def test_what_differs_is_counted_and_the_first_is_named() -> None:
    reference = [batch(number) for number in range(6)]
    verdict = compared(reference, [batch(number, value=int(number > 3)) for number in range(6)]).finish()
    assert verdict.explanation == "Test batch 4: batch[0] differs in the test, and 1 more batch."
    assert verdict.counts.sites_differing == 2
    verdict = compared(reference, reference[:3]).finish()
    assert "Test batch 3: batch[0] is only in the reference in the test, and 2 more batches" in verdict.explanation
    verdict = compared(reference[1:], reference).finish()
    assert verdict.explanation == "Test batch 0: batch[0] is only in the current run in the test."
    assert compared(reference[1:], reference, is_common=True).finish().verdict == "match"
    assert compared(reference, reference[2:4], is_common=True).finish().coverage.batches == {"test": 2}
    with pytest.raises(NothingComparedError):
        compared(reference[:2], reference[2:], is_common=True).finish()


def test_of_what_is_ahead_of_a_resumed_step_one_run_may_have_less() -> None:
    reference = [batch(0, step=step, stage="validation") for step in (3, 6)]
    assert compared(reference, reference[:1], resumed={6}).finish().verdict == "match"
    assert compared(reference[:1], reference, resumed={6}).finish().verdict == "match"
    assert compared(reference, reference[:1]).finish().verdict == "diverged"
    other = [reference[0], batch(0, 1, step=6, stage="validation")]
    assert compared(reference, other, resumed={6}).finish().verdict == "diverged"


def test_the_same_samples_in_another_order_are_told() -> None:
    def samples(value: int) -> Batch:
        (row,) = batch(0, value)
        return (row, row._replace(name="samples of batch[0]", value=7))

    assert compared([samples(1)], [samples(2)]).finish().cause == "data_order"
    assert compared([batch(0, 1)], [batch(0, 2)]).finish().cause == "data_content"


# segments of a run


def write(writer: RunWriter, *batches: Batch) -> None:
    for one in batches:
        writer.put_evidence(one)
    writer.close(complete=True)


def test_a_resumed_fit_goes_on_with_the_fit_and_a_test_after_it_is_made_anew(tmp_path: Path) -> None:
    def validation(step: int, value: int) -> Batch:
        return batch(0, value, step=step, stage="validation")

    manifest = {"selection": SELECTION, "eval_batches": ["validation", "test"]}
    writer = RunWriter.create(tmp_path / "run", manifest=manifest)
    write(writer, validation(3, 1), validation(6, 1), validation(9, 1))
    writer.start_segment("test")
    write(writer, batch(0, 1), batch(1, 1))
    writer = RunWriter.resume(tmp_path / "run", manifest=manifest)
    assert writer.segment == 0
    write(writer, validation(6, 2))
    run = Run.open(tmp_path / "run")
    assert run.manifest["attempts"] == [
        {"segments": 2, "stages": [FIT, "test"]},
        {"segments": 1, "first_segment": 0},
    ]
    assert stages_of_segments(run.manifest) == {0: FIT, 1: "test"}
    assert [(one[0].step, one[0].value) for one in read_batches(run, 0, 0)] == [(3, 1), (6, 2), (9, 1)]
    assert [one[0].value for one in read_batches(run, 0, 1)] == [1, 1]
    writer = RunWriter.resume(tmp_path / "run", manifest=manifest)
    write(writer)
    writer.start_segment("test")
    write(writer, batch(0, 3))
    run = Run.open(tmp_path / "run")
    assert run.is_complete
    assert [one[0].value for one in read_batches(run, 0, 1)] == [3]


@pytest.mark.parametrize(
    "entry",
    [
        {"segments": 1, "stages": ["fit", "test"]},
        {"segments": 1, "stages": ["tests"]},
        {"segments": 1, "stages": "fit"},
        {"segments": 1, "first_segment": -1},
        {"segments": 1, "first_segment": "0"},
    ],
    ids=str,
)
def test_what_run_json_says_of_segments_is_looked_at(entry: dict[str, Any]) -> None:
    assert not are_stages(entry)
    assert are_stages({"segments": 1})
    assert are_stages({"segments": 2, "stages": ["fit", "test"], "first_segment": 3})


def test_evidence_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    writer = RunWriter.create(
        tmp_path / "run", manifest={"selection": SELECTION, "eval_batches": ["test"]}, stage="test"
    )
    write(writer, batch(0))
    (path,) = (tmp_path / "run" / "rank-00000").glob("*.evidence.arrows")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"digest", b"tsegid"))  # of the digest of a record batch
    with pytest.raises(ReferenceFormatError, match=r"evidence\.arrows"):
        list(read_batches(Run.open(tmp_path / "run"), 0, 0))
