"""A run of several fits: one reference, one verdict, and a process that may not
end before the last of them.
"""

from pathlib import Path
from typing import Any

import pytest
from fits import Fit, RaiseAt, StopError
from judged import require_one_verdict
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, DivergenceError, DivergenceWarning, cli
from det_callbacks.report.verdict import next_lines
from det_callbacks.runs.store import Run
from det_callbacks.training.recording import take_unfinished

pytestmark = LIGHTNING_ADVICE


@pytest.fixture(scope="module")
def two_fits(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("two") / "run"
    Fit(DeterminismCallback(path, mode="record")).run().again(epochs=2)
    return path


@pytest.fixture
def current(tmp_path: Path) -> Path:
    return tmp_path / "current"


def test_two_fits_are_two_segments_and_verified_together(two_fits, current, capsys):
    run = Run.open(two_fits)
    assert run.is_complete
    assert [run.rank(0).steps(segment).tolist() for segment in run.rank(0).segments] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    callback = DeterminismCallback(two_fits, current=current)
    fit = Fit(callback).run()
    assert callback.verdict is None
    assert not (current / "verdict.json").exists()
    assert f"part 1 (fit) of 2 matches {two_fits}: verified 4 steps" in (
        printed := capsys.readouterr().out
    )
    assert "diverged" not in printed
    fit.again(epochs=2)
    assert (callback.verdict.verdict, callback.verdict.counts.steps_compared) == ("match", 8)
    require_one_verdict(callback.verdict, two_fits, current)


def test_a_fit_too_many_diverges_and_takes_the_verdict_back_where_it_stops(reference, current):
    callback = DeterminismCallback(reference, current=current)
    fit = Fit(callback).run().run()  # fit 1 has nothing left to do
    assert callback.verdict.verdict == "match"
    with pytest.raises(DivergenceError, match="Step 4 of segment 2 is only in the current run"):
        fit.again(epochs=2)
    assert next_lines(callback.verdict) == [f"det-callbacks show {current} --step 4 --segment 2"]

    callback = DeterminismCallback(reference, current=current)
    fit = Fit(RaiseAt("on_train_batch_start", StopError(), call=5), callback).run()
    assert (current / "verdict.json").exists()
    with pytest.raises(StopError):
        fit.again(epochs=2)
    assert callback.verdict is None
    assert not (current / "verdict.json").exists()


def test_a_process_that_ends_before_the_last_fit_has_an_error(two_fits, tmp_path):
    Fit(DeterminismCallback(two_fits, current=tmp_path / "current")).run()
    error = take_unfinished()
    assert isinstance(error, DivergenceError)
    assert (error.exit_code, error.verdict.verdict) == (1, "diverged")
    assert "this process ended after 1 of the 2 parts (fit, fit)" in str(error)
    assert "Steps 4 to 7 of segment 1 (4 of them) are only in the reference" in str(error)
    assert take_unfinished() is None

    Fit(DeterminismCallback(two_fits, current=tmp_path / "warns", on_divergence="warn")).run()
    with pytest.warns(DivergenceWarning, match="after 1 of the 2 parts"):
        assert take_unfinished() is None
    callback = DeterminismCallback(two_fits, current=tmp_path / "common", steps="common")
    Fit(callback).run()
    assert (callback.verdict.verdict, take_unfinished()) == ("match", None)


def test_a_difference_is_shown_in_its_fit_and_not_waited_with(two_fits, current):
    fit = Fit(DeterminismCallback(two_fits, current=current)).run()
    fit.model.first.weight.data.add_(1)
    with pytest.raises(
        DivergenceError, match=r"Step 4 of segment 1: the initial state differs \(first\.weight: "
    ) as caught:
        fit.again(epochs=2)
    first = caught.value.verdict.first_divergence
    assert (first.segment, first.step) == (1, 4)
    (shown,) = [line for line in next_lines(caught.value.verdict) if str(current) in line]
    assert shown == f"det-callbacks show {current} --step 4 --segment 1"
    assert cli.main(shown.split()[1:]) == 0

    fit = Fit(DeterminismCallback(two_fits, current=current, on_divergence="collect"))
    fit.model.first.weight.data.add_(1)
    with pytest.raises(DivergenceError, match=r"differs \(first\.weight"):
        fit.run()
    assert take_unfinished() is None
