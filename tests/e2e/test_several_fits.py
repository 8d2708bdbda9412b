"""A run of several fits: one reference, one verdict, and a process that may not end before the last of them."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fits import Fit, RaiseAt, StopError, record
from judged import require_one_verdict

from det_callbacks import DeterminismCallback, DivergenceError, DivergenceWarning
from det_callbacks.callback import take_unfinished
from det_callbacks.runs.store import Run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",  # Lightning's advice on speed
    "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning",
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch of the plain classifier."""
    return record(tmp_path_factory.mktemp("reference") / "run")


@pytest.fixture(scope="module")
def two_fits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fit of one epoch and a fit that goes on with it."""
    path = tmp_path_factory.mktemp("two") / "run"
    Fit(DeterminismCallback(path, mode="record")).run().again(epochs=2)
    return path


def test_two_fits_are_two_segments_and_verified_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Fit(DeterminismCallback(tmp_path / "run", mode="record")).run().again(epochs=2)
    run = Run.open(tmp_path / "run")
    assert run.is_complete
    assert [run.rank(0).steps(segment).tolist() for segment in run.rank(0).segments] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    fit = Fit(callback)
    fit.run()
    assert callback.verdict is None
    assert not (tmp_path / "current" / "verdict.json").exists()
    assert "fit 1 of 2 agrees: verified 4 steps" in (told := capsys.readouterr().out)
    assert "diverged" not in told
    fit.again(epochs=2)
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    assert callback.verdict.counts.steps_compared == 8
    require_one_verdict(callback.verdict, tmp_path / "run", tmp_path / "current")


def test_a_fit_too_many_diverges(reference: Path, tmp_path: Path) -> None:
    callback = DeterminismCallback(reference, current=tmp_path / "current")
    fit = Fit(callback).run()
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    with pytest.raises(DivergenceError, match="only in the current run of fit 1"):
        fit.again(epochs=2)
    assert callback.verdict.verdict == "diverged"
    require_one_verdict(callback.verdict, reference, tmp_path / "current")


def test_a_second_fit_that_stops_takes_the_verdict_back(reference: Path, tmp_path: Path) -> None:
    other = RaiseAt("on_train_batch_start", StopError(), call=5)
    callback = DeterminismCallback(reference, current=tmp_path / "current")
    fit = Fit(other, callback).run()
    assert (tmp_path / "current" / "verdict.json").exists()
    with pytest.raises(StopError):
        fit.again(epochs=2)
    assert callback.verdict is None
    assert not (tmp_path / "current" / "verdict.json").exists()


def test_a_second_trainer_goes_on_with_the_same_run(tmp_path: Path) -> None:
    callback = DeterminismCallback(tmp_path / "run", mode="record")
    for _ in range(2):
        Fit(callback).run()
    run = Run.open(tmp_path / "run")
    assert run.is_complete
    assert [run.rank(0).steps(segment).tolist() for segment in (0, 1)] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert run.rank(0).chain(0, 3) == run.rank(0).chain(1, 3)
    verifying = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    Fit(verifying).run()
    Fit(verifying).run()
    assert verifying.verdict is not None
    assert verifying.verdict.verdict == "match"


def test_a_second_fit_with_nothing_left_to_do_changes_nothing(tmp_path: Path) -> None:
    Fit(DeterminismCallback(tmp_path / "run", mode="record")).run().run()
    assert Run.open(tmp_path / "run").is_complete
    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    Fit(callback).run().run()
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"


def test_a_process_that_ends_before_the_last_fit_has_an_error(two_fits: Path, tmp_path: Path) -> None:
    callback = DeterminismCallback(two_fits, current=tmp_path / "current")
    Fit(callback).run()
    error = take_unfinished()
    assert isinstance(error, DivergenceError)
    assert error.exit_code == 1
    assert error.verdict is not None
    assert error.verdict.verdict == "diverged"
    require_one_verdict(error.verdict, two_fits, tmp_path / "current")
    assert "holds 2 fits, and this process ended after 1" in str(error)
    assert "Steps 4 to 7 (4 of them) are only in the reference of fit 1" in str(error)
    assert take_unfinished() is None


def test_what_may_only_warn_warns_when_the_process_ends(two_fits: Path, tmp_path: Path) -> None:
    Fit(DeterminismCallback(two_fits, current=tmp_path / "current", on_divergence="warn")).run()
    with pytest.warns(DivergenceWarning, match="holds 2 fits"):
        assert take_unfinished() is None


def test_common_steps_of_one_fit_are_a_match(
    two_fits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = DeterminismCallback(two_fits, current=tmp_path / "current", steps="common")
    Fit(callback).run()
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    assert "match: verified 4 steps" in capsys.readouterr().out
    assert take_unfinished() is None


def test_a_difference_in_the_first_fit_is_not_waited_with(two_fits: Path, tmp_path: Path) -> None:
    fit = Fit(DeterminismCallback(two_fits, current=tmp_path / "current", on_divergence="collect"))
    fit.model.first.weight.data.add_(1)
    with pytest.raises(DivergenceError, match=r"first\.weight differs"):
        fit.run()
    assert take_unfinished() is None


@pytest.mark.slow
def test_the_status_of_a_process_with_one_fit_of_two(two_fits: Path, tmp_path: Path) -> None:
    script = tmp_path / "verify.py"
    script.write_text(
        textwrap.dedent(
            """
            import atexit, logging, sys
            sys.path[:0] = sys.argv[3].split(":")
            import numpy, random, torch
            from fits import Fit
            from det_callbacks import DeterminismCallback

            atexit.register(print, "registered before")
            reference, current = sys.argv[1:3]
            random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
            fit = Fit(DeterminismCallback(reference, current=current)).run()
            print("not flushed yet", end="")
            """
        )
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(script), str(two_fits), str(tmp_path / "current"), f"{here}:{here.parent}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "fit 1 of 2 agrees" in done.stdout
    assert "not flushed yet" in done.stdout
    assert "DivergenceError: diverged: the reference" in done.stderr
    assert "Traceback" not in done.stderr
