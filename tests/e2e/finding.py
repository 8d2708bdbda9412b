"""Finding a planted fault: while it trains, and in a second recording."""

from pathlib import Path
from typing import Any

import pytest
from faults import Training

from det_callbacks import DeterminismCallback, Divergence, DivergenceError, Verdict, compare_runs
from det_callbacks.runs.store import Run


def verify(reference: Path, training: Training, current: Path, **options: Any) -> Verdict:
    """Verify a training that must be found to diverge; check what is on disk afterwards."""
    callback = DeterminismCallback(reference, current=current, **options)
    with pytest.raises(DivergenceError) as caught:
        training.fit(callback)
    verdict = callback.verdict
    assert verdict is not None
    assert caught.value.verdict is verdict
    assert caught.value.exit_code == verdict.exit_code == 1
    assert verdict.explanation in str(caught.value)
    assert verdict.first_divergence is not None
    assert Run.open(current).rank(0).steps(0).tolist() == [verdict.first_divergence.step]
    return verdict


def find(reference: Path, training: Training, folder: Path, **options: Any) -> Verdict:
    """Find a fault while it trains and in a second recording: both say the same."""
    live = verify(reference, training, folder / "current", **options)
    offline = compare_runs(reference, training.record(folder / "second", **options))
    for name in ("verdict", "first_divergence", "origins", "cause", "explanation", "exit_code"):
        assert getattr(offline, name) == getattr(live, name)
    return live


def first_of(verdict: Verdict) -> Divergence:
    assert verdict.first_divergence is not None
    return verdict.first_divergence
