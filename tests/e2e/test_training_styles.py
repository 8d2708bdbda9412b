"""Every style of training: recorded twice alike, verified as a match, and trained as if nobody looked."""

from pathlib import Path

import pytest
from fits import STYLES, train
from trainers import LIGHTNING_ADVICE, has_same_weights

from det_callbacks import DeterminismCallback
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE

LOWER = [("plain", "state"), ("checkpoint", "module")]


@pytest.mark.parametrize(("style", "level"), [*((style, "op") for style in STYLES), *LOWER])
def test_a_verified_run_matches_and_is_not_disturbed(style: str, level: str, tmp_path: Path) -> None:
    module, options = STYLES[style]
    options = {"epochs": 2 if style == "skipping" else 1, **options}
    plain, losses, states = train(module, **options)
    train(module, DeterminismCallback(tmp_path / "first", mode="record", level=level), **options)
    first = Run.open(tmp_path / "first")
    assert first.is_complete
    callback = DeterminismCallback(tmp_path / "first", current=tmp_path / "current")
    seen, seen_losses, seen_states = train(module, callback, **options)
    assert (callback.verdict.verdict, callback.selection.level) == ("match", level)
    assert callback.verdict.counts.sites_differing == 0
    assert callback.verdict.counts.steps_compared == first.rank(0).num_steps > 0
    assert has_same_weights(plain, seen)
    assert (losses, states) == (seen_losses, seen_states)
    if style == "checkpoint" and level == "op":  # repeated ops and their backward have the user's lines
        sites = first.view(0, 0, 1).program.sites
        repeated = [site for site in sites if site.recomputed and site.op]
        assert len(repeated) > 3
        backward = [site for site in sites if site.phase == "backward" and site.op and site.module not in ("", "?")]
        for site in (*repeated, *backward):
            assert any(line.startswith("tests/e2e/fits.py:") for line in site.source), (site.op, site.source)
