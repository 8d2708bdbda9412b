"""What a Trainer's loggers and progress bars show of a run, and that the training does not notice."""

import csv
import logging
import random
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY

import lightning.pytorch as pl
import numpy as np
import pytest
import terminal
import torch
from fits import Fit, Steady, StopError
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, DivergenceError
from det_callbacks.digest import format_digest
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE
COMMON = ("chain", "differing", "replayed_mib", "sites")


class Logging(Steady):
    """Logs its loss at every step."""

    factor_at: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss * 2 if self.trainer.fit_loop.epoch_loop.total_batch_idx == self.factor_at else loss


class FloatsOnly(Logger):
    """Takes nothing but floats; if asked to, draws from every generator and computes whenever it is called."""

    name = version = "floats"

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()
        self._draws = (random.random, np.random.rand, lambda: torch.rand(3).sum()) if draws else ()
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert all(type(value) is float for name, value in metrics.items() if name != "epoch"), metrics
        for draw in self._draws:
            draw()
        self.logged.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def ours(self) -> list[tuple[int, dict[str, float]]]:
        return [
            (step, {name.removeprefix("determinism/"): value for name, value in row.items()})
            for step, row in self.logged
            if any(name.startswith("determinism/") for name in row)
        ]


def training(*callbacks: pl.Callback, factor_at: int | None = None, **options: Any) -> Fit:
    made = Fit(*callbacks, model=Logging, **{"max_epochs": 2, **options})
    made.model.factor_at = factor_at
    return made


def fit(callback: DeterminismCallback | None, *loggers: Logger, **options: Any) -> Fit:
    options = {"log_every_n_steps": 3, "logger": list(loggers), **options}
    return training(*([] if callback is None else [callback]), **options).run()


def csv_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def ours_of(folder: Path) -> list[dict[str, str]]:
    """Return the lines of a metrics.csv that are ours, without the prefix."""
    found = [row for row in csv_rows(folder) if row.get("determinism/sites")]
    return [{name.removeprefix("determinism/"): value for name, value in row.items() if value} for row in found]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference, and in ``csv`` beside it what the logger of its recording was given."""
    folder = tmp_path_factory.mktemp("reference")
    trainer = fit(
        DeterminismCallback(folder / "run", mode="record", level="state"), CSVLogger(folder, name="", version="csv")
    ).trainer
    names = {*trainer.callback_metrics, *trainer.logged_metrics, *trainer.progress_bar_metrics}
    assert "loss" in names
    assert not [name for name in names if "determinism" in name], "nothing of it can be monitored"
    return folder / "run"


def test_every_kind_of_logger_gets_the_metrics_in_its_form(reference: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    floats, board = FloatsOnly(), TensorBoardLogger(tmp_path, name="", version="events")
    callback = DeterminismCallback(reference, current=tmp_path / "current")
    fit(callback, CSVLogger(tmp_path, name="", version="csv"), floats, board)
    verdict: Any = callback.verdict
    chains = [Run.open(reference).rank(0).chain(0, step) for step in (2, 5, 7)]  # every third, and the last

    recorded, verified = ours_of(reference.parent / "csv"), ours_of(tmp_path / "csv")
    assert [row["step"] for row in recorded] == ["2", "5", "7"]
    assert [set(row) for row in recorded] == [{*COMMON, "steps_recorded", "step"}] * 3
    assert [set(row) for row in verified] == [{*COMMON, "steps_verified", "step"}] * 3
    assert [(row["steps_verified"], row["differing"]) for row in verified] == [("3", "0"), ("6", "0"), ("8", "0")]
    assert [row["chain"] for row in recorded] == [row["chain"] for row in verified] == [*map(format_digest, chains)]
    assert int(verified[-1]["sites"]) == verdict.counts.sites_compared == int(recorded[-1]["sites"])

    # a number that a plot of 32-bit floats holds
    assert [row["chain"] for _, row in floats.ours()] == [chain >> 40 for chain in chains]
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("determinism/chain")]
    assert shown == [(step, chain >> 40) for step, chain in zip((2, 5, 7), chains, strict=True)]
    (text,) = events.Tensors("determinism/verdict/text_summary")
    assert text.tensor_proto.string_val[0].decode() == f"match: {verdict.explanation}"


def test_what_differs_is_logged(reference: Path, tmp_path: Path) -> None:
    floats = FloatsOnly()
    callback = DeterminismCallback(reference, current=tmp_path / "current", on_divergence="collect")
    with pytest.raises(DivergenceError):
        fit(callback, floats, factor_at=4)
    verdict: Any = callback.verdict
    first, second, last = (row for _, row in floats.ours())
    assert (first["differing"], "chain" in first) == (0.0, True)
    assert second["differing"] > 0
    assert "chain" not in second  # the curve ends where the runs part
    # the loss of the epoch, a metric, differs too and is known when the fit has ended
    assert (last["differing"], last["steps_verified"]) == (verdict.counts.sites_differing - 1, 8.0)


@pytest.mark.parametrize("factor_at", [None, 4])
def test_stores_of_artifacts_get_the_verdict_and_the_report(
    factor_at: int | None, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Any, ...]] = []
    store = SimpleNamespace(log_artifact=lambda *args, **options: kept.append((*args, *options.values())))
    for kind in (WandbLogger, MLFlowLogger):
        monkeypatch.setattr(kind, "__init__", lambda self: None)
        monkeypatch.setattr(kind, "experiment", store)
        monkeypatch.setattr(kind, "save_dir", str(tmp_path))
        for name in ("log_metrics", "log_hyperparams", "save", "finalize", "after_save_checkpoint"):
            monkeypatch.setattr(kind, name, lambda *args, **options: None)
    monkeypatch.setattr(MLFlowLogger, "run_id", "run7")
    current = tmp_path / "current"
    with suppress(DivergenceError):
        loggers = [cast(Any, kind)() for kind in (WandbLogger, MLFlowLogger)]
        callback = DeterminismCallback(reference, current=current)
        fit(callback, *loggers, factor_at=factor_at, default_root_dir=tmp_path)
    files = [current / name for name in ("verdict.json", "report.html")[: 1 if factor_at is None else 2]]
    assert kept == [
        *((str(file), f"determinism-{file.stem}", "determinism") for file in files),
        *(("run7", str(file), "determinism") for file in files),
    ]


def states(trained: Fit) -> dict[str, Any]:
    weights = {name: value.numpy().tobytes() for name, value in trained.model.state_dict().items()}
    generators = [random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()]
    return {**weights, "generators": generators, "loss": trained.trainer.callback_metrics["loss"].item()}


def test_logging_changes_no_bit_no_column_and_is_not_in_the_trace(tmp_path: Path) -> None:
    """With a logger that draws and computes: those draws of its own that the user asked for stay."""
    options: dict[str, Any] = {"log_every_n_steps": 1, "max_epochs": 1}
    plain = states(fit(None, FloatsOnly(draws=True), **options))
    chains = []
    for name in ("with", "without"):
        logger = FloatsOnly(draws=True)
        callback = DeterminismCallback(tmp_path / name, mode="record", log_metrics=name == "with")
        assert states(fit(callback, logger, CSVLogger(tmp_path / "csv", name="", version=name), **options)) == plain
        assert len(logger.ours()) == (4 if name == "with" else 0)
        chains.append(Run.open(tmp_path / name).rank(0).fit(0).chains.tolist())
    assert chains[0] == chains[1]
    rows, without = (csv_rows(tmp_path / "csv" / name) for name in ("with", "without"))
    assert [{name: row[name] for name in without[0]} for row in rows if row["loss"]] == without
    assert len(without) == 4
    assert not any(name.startswith("determinism") for name in without[0])


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"log_every_n_steps": 2, "accumulate_grad_batches": 2}, [(1, 4), (3, 8)]),  # 8 batches, 4 optimizer steps
        ({"log_every_n_steps": 0, "max_epochs": 1}, [(3, 4)]),  # at the end
    ],
)
def test_it_is_logged_when_and_where_the_trainer_logs(options: Any, rows: Any, tmp_path: Path) -> None:
    logger = FloatsOnly()
    fit(DeterminismCallback(tmp_path / "run", mode="record", level="state"), logger, **options)
    if options["log_every_n_steps"]:
        assert [step for step, row in logger.logged if "loss" in row] == [step for step, _ in rows]
    assert [(step, row["steps_recorded"]) for step, row in logger.ours()] == rows


CONTROL = r"(?:\x1b\[[^A-Za-z]*[A-Za-z])"
"""A change of colour, or a move of the cursor."""


def see(*callbacks: pl.Callback, factor_at: int | None = None) -> tuple[str, str]:
    """Return our line, which stands on a line of its own, and the bar as it was last drawn at a terminal."""

    def body() -> None:
        # Lightning's own line at the end of a fit goes to the terminal past the bar
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        with suppress(DivergenceError):
            training(*callbacks, factor_at=factor_at, enable_progress_bar=True).run()

    written = terminal.written_by(body)
    (ours,) = re.findall(rf"[\r\n]{CONTROL}*(det_callbacks: [^\r\n]*)[\r\n]", written)
    bars = re.findall(r"(Epoch \d[^\r\n]*)", re.sub(CONTROL, "", written))
    return re.sub(CONTROL, "", ours), bars[-1]


@pytest.mark.parametrize("bar", [TQDMProgressBar, pytest.param(RichProgressBar, marks=pytest.mark.slow)])
def test_our_line_is_whole_and_the_bar_says_how_far_it_is(bar: type[ProgressBar], tmp_path: Path) -> None:
    run, current, other = (tmp_path / name for name in ("run", "current", "other"))
    see(DeterminismCallback(run, mode="record", level="state"), bar())
    line, drawn = see(DeterminismCallback(run, current=current), bar())
    assert line == (
        f"det_callbacks: match: verified 8 steps, 345 sites at level state, 2 metrics, against {run} "
        f"(verdict and diverging steps: {current})"
    )
    assert re.search(r"determinism[=:] ?8 steps match", drawn)
    assert "loss" in drawn
    line, _ = see(bar(), DeterminismCallback(run, current=other), factor_at=5)
    assert line.startswith("det_callbacks: diverged: verified 6 steps, ")
    assert line.endswith(f"(verdict and diverging steps: {other}; report: {other / 'report.html'})")


class Own(TQDMProgressBar):
    def get_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"mine": "yes"}


class OnlyNumbers(ProgressBar):
    """A bar of a user's, which need not take text."""


class Looks(pl.Callback):
    """Looks at what the bar shows after the second batch, and stops."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.shown = trainer.progress_bar_callback.get_metrics(trainer, pl_module)
            raise StopError


def test_what_a_user_shows_stays(tmp_path: Path) -> None:
    for bar, shown in (
        (Own(refresh_rate=0), {"mine": "yes", "determinism": "2 steps recorded"}),
        (OnlyNumbers(), {"loss": ANY}),
    ):
        callback = DeterminismCallback(tmp_path / type(bar).__name__, mode="record", level="state")
        looks = Looks()
        with pytest.raises(StopError):
            training(bar, callback, looks, enable_progress_bar=True).run()
        assert looks.shown == shown
        assert "get_metrics" not in vars(bar)
