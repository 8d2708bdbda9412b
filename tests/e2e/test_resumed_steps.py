"""A step after a resume is recorded as the same step of a run that was never stopped: same program, same bits."""

from pathlib import Path

import pytest
from resuming import BATCHES, STYLES, Checkpoints, fit
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, compare_runs
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


def steps_of(path: Path) -> dict[int, tuple[object, ...]]:
    """Return what a run holds of each step: program, layouts, and digest of each site by name."""
    run = Run.open(path)
    return {
        record.step: (
            record.epoch,
            [
                (site.phase, site.module, site.op, site.name, site.role, int(digest))
                for site, digest in zip(run.program(record.program_id).sites, record.digests, strict=True)
            ],
            record.program_id,
            record.layout_id,
        )
        for record in run.rank(0).iterate()
    }


def chains_of(path: Path) -> list[int]:
    rank = Run.open(path).rank(0)
    return [rank.chain(0, int(step)) for step in rank.steps(0)]


EVERYDAY = ("adamw", "two_optimizers")
"""Styles that the everyday tests try at every level; the others at level op, which holds the others."""

CASES = [
    pytest.param(style, level, marks=() if level == "op" or style in EVERYDAY else pytest.mark.slow)
    for style in STYLES
    for level in ("op", "module", "state")
]


@pytest.mark.parametrize(("style", "level"), CASES)
def test_steps_after_an_epochs_end_are_those_of_an_uninterrupted_run(style: str, level: str, tmp_path: Path) -> None:
    model, options, others = STYLES[style]
    whole, parts, saved = tmp_path / "whole", tmp_path / "parts", tmp_path / "checkpoints"
    fit(DeterminismCallback(whole, mode="record", level=level), *others(), model=model, **options)
    first = DeterminismCallback(parts, mode="record", level=level)
    fit(first, *others(), Checkpoints(saved), model=model, **{**options, "max_epochs": 1})
    second = DeterminismCallback(parts, mode="record", level=level)
    fit(second, *others(), model=model, ckpt_path=saved / f"{BATCHES}.ckpt", **options)

    for reference, current in ((whole, parts), (parts, whole)):
        verdict = compare_runs(reference, current)
        assert verdict.verdict == "match", verdict.explanation
    ours, theirs = steps_of(whole), steps_of(parts)
    assert list(theirs) == list(range(2 * BATCHES))
    # Windows of other lengths make other programs there, and which arguments vary is learned from one to the next.
    if (style, level) != ("accumulation", "op"):
        for step, found in theirs.items():
            assert found == ours[step], f"step {step}"
        assert chains_of(parts) == chains_of(whole)

    # and verified from its own first step on, against either
    for reference in (whole, parts):
        callback = DeterminismCallback(reference, current=tmp_path / f"verify-{reference.name}")
        fit(callback, *others(), model=model, ckpt_path=saved / f"{BATCHES}.ckpt", **options)
        assert callback.verdict is not None
        assert callback.verdict.verdict == "match"
        assert callback.verdict.coverage.steps == (BATCHES, 2 * BATCHES - 1)
