"""What a Trainer's loggers and progress bars show of a run,
and that the training does not notice.
"""

import random
import re
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from fits import Fit, Steady, StopError
from lightning.pytorch.callbacks import (
    LambdaCallback,
    ProgressBar,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, DivergenceError
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE
COMMON = ("chain", "differing", "replayed_mib", "sites")


class Logging(Steady):
    """Logs its loss at every step."""

    factor_at: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return (
            loss * 2 if self.trainer.fit_loop.epoch_loop.total_batch_idx == self.factor_at else loss
        )


class FloatsOnly(Logger):
    """Takes nothing but floats; if asked to, draws from every generator and
    computes whenever it is called.
    """

    name = version = "floats"

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()
        self._draws = (random.random, np.random.rand, lambda: torch.rand(3).sum()) if draws else ()
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert all(type(value) is float for name, value in metrics.items() if name != "epoch"), (
            metrics
        )
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


def fit(*callbacks: pl.Callback, factor_at: int | None = None, **options: Any) -> Fit:
    made = Fit(*callbacks, model=Logging, **{"max_epochs": 2, "log_every_n_steps": 3, **options})
    made.model.factor_at = factor_at
    return made.run()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    logger = FloatsOnly()
    trainer = fit(DeterminismCallback(path, mode="record", level="state"), logger=logger).trainer
    assert [(step, set(row)) for step, row in logger.ours()] == [
        (at, {*COMMON, "steps_recorded"}) for at in (2, 5, 7)
    ]
    names = {*trainer.callback_metrics, *trainer.logged_metrics, *trainer.progress_bar_metrics}
    assert "loss" in names
    assert not [name for name in names if "determinism" in name], "nothing of it can be monitored"
    return path


@pytest.mark.parametrize("factor_at", [None, 4])
def test_loggers_get_numbers_that_a_plot_of_32_bit_floats_holds_and_stores_the_verdict(
    factor_at, reference, tmp_path, monkeypatch
):
    given: list[tuple[Any, ...]] = []
    note = lambda *args, **options: given.append((*args, *options.values()))  # noqa: E731
    stores = (WandbLogger, MLFlowLogger, TensorBoardLogger)
    for kind in stores:
        monkeypatch.setattr(kind, "__init__", lambda self: None)
        monkeypatch.setattr(kind, "experiment", SimpleNamespace(log_artifact=note, add_text=note))
        monkeypatch.setattr(kind, "save_dir", str(tmp_path))
        for name in (
            "log_metrics",
            "log_hyperparams",
            "log_graph",
            "save",
            "finalize",
            "after_save_checkpoint",
        ):
            monkeypatch.setattr(kind, name, lambda *args, **options: None)
    monkeypatch.setattr(MLFlowLogger, "run_id", "run7")
    floats, current = FloatsOnly(), tmp_path / "current"
    callback = DeterminismCallback(reference, current=current, on_divergence="collect")
    with nullcontext() if factor_at is None else pytest.raises(DivergenceError):
        loggers = [floats, *(cast(Any, kind)() for kind in stores)]
        fit(callback, logger=loggers, factor_at=factor_at, default_root_dir=tmp_path)
    verdict: Any = callback.verdict
    files = [
        current / name for name in ("verdict.json", "report.html")[: 1 if factor_at is None else 2]
    ]
    assert given == [
        *((str(file), f"determinism-{file.stem}", "determinism") for file in files),
        *(("run7", str(file), "determinism") for file in files),
        ("determinism/verdict", f"{verdict.verdict}: {verdict.explanation}", 7),
    ]
    assert [(step, row["steps_verified"]) for step, row in floats.ours()] == [
        (2, 3),
        (5, 6),
        (7, 8),
    ]
    first, second, last = (row for _, row in floats.ours())
    # every third, the last
    chains = [Run.open(reference).rank(0).chain(0, step) >> 40 for step in (2, 5, 7)]
    assert (set(first), first["chain"], first["differing"]) == (
        {*COMMON, "steps_verified"},
        chains[0],
        0,
    )
    if factor_at is None:
        assert [second["chain"], last["chain"]] == chains[1:]
        assert (last["differing"], last["sites"]) == (0, verdict.counts.sites_compared)
    else:
        assert second["differing"] > 0
        assert "chain" not in second  # the curve ends where the runs part
        # the loss of the epoch, a metric, differs too and is known when the fit has ended
        assert last["differing"] == verdict.counts.sites_differing - 1


def states(trained: Fit) -> dict[str, Any]:
    weights = {name: value.numpy().tobytes() for name, value in trained.model.state_dict().items()}
    generators = [
        random.getstate(),
        np.random.get_state()[1].tobytes(),
        torch.get_rng_state().numpy().tobytes(),
    ]
    return {
        **weights,
        "generators": generators,
        "loss": trained.trainer.callback_metrics["loss"].item(),
    }


def test_logging_changes_no_bit_and_is_not_in_the_trace(tmp_path):
    """With a logger that draws and computes: those draws of its own that the
    user asked for stay.
    """
    options: dict[str, Any] = {"log_every_n_steps": 1, "max_epochs": 1}
    plain = states(fit(logger=FloatsOnly(draws=True), **options))
    chains = []
    for name, num_rows in (("with", 4), ("without", 0)):
        logger = FloatsOnly(draws=True)
        callback = DeterminismCallback(tmp_path / name, mode="record", log_metrics=name == "with")
        assert states(fit(callback, logger=logger, **options)) == plain
        assert len(logger.ours()) == num_rows
        chains.append(Run.open(tmp_path / name).rank(0).fit(0).chains.tolist())
    assert chains[0] == chains[1]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        # 8 batches, 4 optimizer steps
        ({"log_every_n_steps": 2, "accumulate_grad_batches": 2}, [(1, 4), (3, 8)]),
        ({"log_every_n_steps": 0, "max_epochs": 1}, [(3, 4)]),  # at the end
    ],
)
def test_it_is_logged_when_and_where_the_trainer_logs(options, rows, tmp_path):
    logger = FloatsOnly()
    fit(
        DeterminismCallback(tmp_path / "run", mode="record", level="state"),
        logger=logger,
        **options,
    )
    if options["log_every_n_steps"]:
        assert [step for step, row in logger.logged if "loss" in row] == [step for step, _ in rows]
    assert [(step, row["steps_recorded"]) for step, row in logger.ours()] == rows


CONTROL = r"(?:\x1b\[[^A-Za-z]*[A-Za-z])"
"""A change of colour, or a move of the cursor."""


@pytest.mark.parametrize(
    "bar", [TQDMProgressBar, pytest.param(RichProgressBar, marks=pytest.mark.slow)]
)
def test_our_line_is_whole_and_the_bar_says_how_far_it_is(bar, tmp_path, monkeypatch, capsys):
    """At a terminal of 60 rows and 600 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"COLUMNS": "600", "LINES": "60", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    def see(*callbacks: pl.Callback, factor_at: int | None = None) -> tuple[str, str]:
        with suppress(DivergenceError):
            fit(*callbacks, factor_at=factor_at, enable_progress_bar=True)
        written = capsys.readouterr().out
        (ours,) = re.findall(rf"[\r\n]{CONTROL}*(det_callbacks: [^\r\n]*)[\r\n]", written)
        bars = re.findall(r"(Epoch \d[^\r\n]*)", re.sub(CONTROL, "", written))
        return re.sub(CONTROL, "", ours), bars[-1]

    run, current, other = (tmp_path / name for name in ("run", "current", "other"))
    see(DeterminismCallback(run, mode="record", level="state"), bar())
    line, drawn = see(DeterminismCallback(run, current=current), bar())
    assert line == (
        "det_callbacks: match: verified 8 steps, 369 sites at level state, 2 metrics, against "
        f"{run} (verdict: {current})"
    )
    assert re.search(r"determinism[=:] ?8 steps match", drawn)
    assert "loss" in drawn
    line, _ = see(bar(), DeterminismCallback(run, current=other), factor_at=5)
    assert line.startswith("det_callbacks: diverged: verified 6 steps, ")
    assert line.endswith(f"(verdict and diverging steps: {other}; report: {other / 'report.html'})")


class Own(TQDMProgressBar):
    def get_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"mine": "yes", **super().get_metrics(*args, **kwargs)}


def test_what_a_user_shows_stays(tmp_path):
    def stop(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, module))
            raise StopError

    shown: list[dict[str, Any]] = []
    stopping = LambdaCallback(on_train_batch_end=stop)
    # the second is none of Lightning's, and need not take text
    for bar in (Own(refresh_rate=0), ProgressBar()):
        callback = DeterminismCallback(tmp_path / type(bar).__name__, mode="record", level="state")
        with pytest.raises(StopError):
            fit(bar, callback, stopping, enable_progress_bar=True)
    assert shown == [{"mine": "yes", "loss": ANY, "determinism": "2 steps recorded"}, {"loss": ANY}]
