"""Progress bars at a terminal: lines of ours are whole, and the bar says how far the run is."""

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import terminal
from fits import Fit, Steady, StopError
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from test_loggers import Logging
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, DivergenceError

pytestmark = LIGHTNING_ADVICE

BARS = [TQDMProgressBar, RichProgressBar]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    # where the others run, too: as many threads
    see(DeterminismCallback(path, mode="record", level="state"), TQDMProgressBar())
    return path


def see(
    *callbacks: pl.Callback, factor_at: int | None = None, error: type[BaseException] = DivergenceError
) -> list[str]:
    def make() -> Logging:
        model = Logging()
        model.factor_at = factor_at
        return model

    def body() -> None:
        # Lightning's own line at the end of a fit goes to the terminal past the bar
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        with suppress(error):
            Fit(*callbacks, model=make, max_epochs=2, enable_progress_bar=True).run()

    return terminal.see(body)


def bars_of(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match(r"Epoch \d", line)]


@pytest.mark.parametrize("is_first", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bar", BARS)
def test_the_closing_line_is_whole_and_the_bar_says_how_far_it_is(
    bar: type[ProgressBar], is_first: bool, reference: Path, tmp_path: Path
) -> None:
    callback = DeterminismCallback(reference, current=tmp_path / "current")
    lines = see(*([callback, bar()] if is_first else [bar(), callback]))
    (line,) = [line for line in lines if "det_callbacks:" in line]
    assert line == (
        f"det_callbacks: match: verified 8 steps, 345 sites at level state, 2 metrics, against {reference} "
        f"(verdict and diverging steps: {tmp_path / 'current'})"
    )
    (drawn,) = bars_of(lines)
    assert re.search(r"determinism[=:] ?8 steps match", drawn)
    assert "loss" in drawn
    assert drawn.count("Epoch") == 1


@pytest.mark.parametrize("bar", BARS)
def test_a_divergence_is_told_on_a_line_of_its_own(bar: type[ProgressBar], reference: Path, tmp_path: Path) -> None:
    lines = see(DeterminismCallback(reference, current=tmp_path / "current"), bar(), factor_at=5)
    (line,) = [line for line in lines if "det_callbacks:" in line]
    assert line.startswith("det_callbacks: diverged: verified 6 steps, ")
    current = tmp_path / "current"
    assert line.endswith(f"(verdict and diverging steps: {current}; report: {current / 'report.html'})")
    assert all(drawn.count("Epoch") == 1 for drawn in bars_of(lines))


@pytest.mark.slow
@pytest.mark.parametrize("bar", BARS)
def test_a_stopped_recording_is_told_on_a_line_of_its_own(bar: type[ProgressBar], tmp_path: Path) -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.total_batch_idx == 5:
                raise StopError

    lines = see(DeterminismCallback(tmp_path / "run", mode="record", level="state"), Stop(), bar(), error=StopError)
    expected = f"det_callbacks: recording stopped by StopError after 6 steps: {tmp_path / 'run'} is incomplete"
    assert [line for line in lines if "det_callbacks:" in line] == [expected]
    assert any(re.search(r"determinism[=:] ?5 steps recorded", drawn) for drawn in bars_of(lines))


class Own(TQDMProgressBar):
    """Shows what it likes."""

    def get_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"mine": "yes"}


class OnlyNumbers(ProgressBar):
    """A bar of a user's, of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []

    def disable(self) -> None:
        pass

    enable = disable

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.shown.append(
            " ".join(f"{name}={value:.1f}" for name, value in self.get_metrics(trainer, pl_module).items())
        )


def test_what_a_user_shows_stays(reference: Path, tmp_path: Path) -> None:
    lines = see(Own(), DeterminismCallback(reference, current=tmp_path / "current"))
    (drawn,) = bars_of(lines)
    assert "mine=yes, determinism=8 steps match" in drawn


def test_a_bar_of_another_kind_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = OnlyNumbers()
    callback = DeterminismCallback(tmp_path / "run", mode="record", level="state")
    Fit(bar, callback, model=Logging, enable_progress_bar=True).run()
    assert len(bar.shown) == 4
    assert all(re.fullmatch(r"loss=\d\.\d", line) for line in bar.shown)
    assert "det_callbacks: recorded 4 steps, " in capsys.readouterr().out


@pytest.mark.parametrize("error", [None, StopError])
def test_the_bar_is_given_back(error: type[BaseException] | None, tmp_path: Path) -> None:
    bar = TQDMProgressBar(refresh_rate=0)

    class Look(Steady):
        def training_step(self, *args: Any) -> Any:
            assert "get_metrics" in vars(bar)
            if error is not None:
                raise error
            return super().training_step(*args)

    training = Fit(bar, DeterminismCallback(tmp_path / "run", mode="record"), model=Look, enable_progress_bar=True)
    with suppress(StopError):
        training.run()
    assert "get_metrics" not in vars(bar)


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("one\r\ntwo", ["one", "two"]),
        ("three\rONE", ["ONEee"]),
        ("bar\r\x1b[Kline\r\nbar", ["line", "bar"]),
        ("a\r\nb\x1b[A\r\x1b[2Kc", ["c", "b"]),
        ("\x1b[1;32mgreen\x1b[0m\x1b[?25l", ["green"]),
    ],
)
def test_the_terminal_is_one(written: str, lines: list[str]) -> None:
    assert terminal.shown(written) == lines


def test_what_the_terminal_does_not_know_is_an_error() -> None:
    with pytest.raises(ValueError, match="not known"):
        terminal.shown("\x1b[5S")
    show: Callable[[str], list[str]] = terminal.shown
    assert show("x" * (terminal.COLUMNS + 1)) == ["x" * terminal.COLUMNS, "x"]
