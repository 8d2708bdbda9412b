"""A step after a resume is recorded as the same step of a run that was never stopped: same program, same bits."""

from pathlib import Path

import pytest
from resuming import BATCHES, STYLES, Checkpoints, fit

from det_callbacks import DeterminismCallback
from det_callbacks.trace.store import Run
from trainers import LIGHTNING_ADVICE

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


@pytest.mark.parametrize("level", ["op", "module", "state"])
@pytest.mark.parametrize("style", STYLES)
def test_steps_after_an_epochs_end_are_those_of_an_uninterrupted_run(style: str, level: str, tmp_path: Path) -> None:
    model, options, others = STYLES[style]
    saved = tmp_path / "checkpoints"
    whole = DeterminismCallback(tmp_path / "whole", mode="record", level=level)
    fit(whole, *others(), Checkpoints(saved), model=model, **options)

    resumed = DeterminismCallback(tmp_path / "resumed", mode="record", level=level)
    fit(resumed, *others(), model=model, ckpt_path=saved / f"{BATCHES}.ckpt", **options)

    ours, theirs = steps_of(tmp_path / "whole"), steps_of(tmp_path / "resumed")
    assert list(theirs) == list(range(BATCHES, 2 * BATCHES))
    for step, found in theirs.items():
        assert found == ours[step], f"step {step}"
