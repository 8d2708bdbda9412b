"""What a Trainer's loggers are told of a run, and that the training does not notice."""

import csv
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fits import Fit, Steady
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, DivergenceError, SelectionError
from det_callbacks.callback import progress as reporting
from det_callbacks.callback.progress import ProgressReporter
from det_callbacks.callback.session import Progress
from det_callbacks.digest import format_digest
from det_callbacks.runs.store import Run
from det_callbacks.trace import hash_mode

pytestmark = LIGHTNING_ADVICE

COMMON = ("chain", "differing", "overhead_seconds", "replayed_mib", "sites")


LIGHTNINGS = ("epoch",)
"""A whole number, from Lightning itself."""


class Logging(Steady):
    """Logs its loss at every step."""

    factor_at: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss * 2 if self.trainer.fit_loop.epoch_loop.total_batch_idx == self.factor_at else loss


class FloatsOnly(Logger):
    """Takes nothing but floats; if asked to, draws from every generator and computes whenever it is told something."""

    name = version = "floats"

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()
        self._draws = (random.random, np.random.rand, lambda: torch.rand(3).sum()) if draws else ()
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        assert all(type(value) is float for name, value in metrics.items() if name not in LIGHTNINGS), metrics
        for draw in self._draws:
            draw()
        self.logged.append((step, dict(metrics)))

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        pass

    def ours(self) -> list[tuple[int, dict[str, float]]]:
        return [
            (step, {name.removeprefix("determinism/"): value for name, value in row.items()})
            for step, row in self.logged
            if any(name.startswith("determinism/") for name in row)
        ]


class TextToo(TensorBoardLogger):
    """A TensorBoardLogger that keeps what it would write."""

    def __init__(self) -> None:
        Logger.__init__(self)
        self.texts: list[tuple[str, str, int]] = []
        self.scalars: list[tuple[str, float, int]] = []

    name = version = ""
    log_dir = root_dir = save_dir = ""
    log_hyperparams = log_graph = lambda *_, **__: None
    save = finalize = lambda *_, **__: None

    @property
    def experiment(self) -> Any:
        return SimpleNamespace(
            add_text=lambda *row: self.texts.append(row),
            add_scalar=lambda *row: self.scalars.append(row),
        )

    _prefix = ""


def fit(callback: DeterminismCallback | None, *loggers: Logger, factor_at: int | None = None, **options: Any) -> Fit:
    def make() -> Logging:
        model = Logging()
        model.factor_at = factor_at
        return model

    callbacks = [] if callback is None else [callback]
    options = {"max_epochs": 2, "log_every_n_steps": 3, "logger": list(loggers), **options}
    return Fit(*callbacks, model=make, **options).run()


def rows(folder: Path) -> list[dict[str, str]]:
    """Return the lines of a metrics.csv that are ours, without the prefix."""
    with (folder / "metrics.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row.get("determinism/sites")]
    return [{name.removeprefix("determinism/"): value for name, value in row.items() if value} for row in found]


def csv_logger(folder: Path) -> CSVLogger:
    return CSVLogger(folder, name="", version="")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference, and in ``csv`` beside it what the logger of its recording was told."""
    folder = tmp_path_factory.mktemp("reference")
    fit(DeterminismCallback(folder / "run", mode="record", level="state"), csv_logger(folder / "csv"))
    return folder / "run"


def test_a_csv_file_gets_the_metrics_with_the_chain_as_text(reference: Path, tmp_path: Path) -> None:
    recorded = rows(reference.parent / "csv")
    callback = DeterminismCallback(reference, current=tmp_path / "current")
    fit(callback, csv_logger(tmp_path / "csv"))
    verified = rows(tmp_path / "csv")
    assert [row["step"] for row in recorded] == ["2", "5", "7"]  # every third, and the last
    assert [set(row) for row in recorded] == [{*COMMON, "steps_recorded", "step"}] * 3
    assert [set(row) for row in verified] == [{*COMMON, "steps_verified", "step"}] * 3
    assert [row["steps_verified"] for row in verified] == ["3", "6", "8"]
    assert [row["differing"] for row in verified] == ["0", "0", "0"]
    chains = [format_digest(Run.open(reference).rank(0).chain(0, step)) for step in (2, 5, 7)]
    assert [row["chain"] for row in recorded] == [row["chain"] for row in verified] == chains
    assert callback.verdict is not None
    assert int(verified[-1]["sites"]) == callback.verdict.counts.sites_compared == int(recorded[-1]["sites"])


def test_the_users_columns_stay_as_they_are(tmp_path: Path) -> None:
    for name, is_on in (("with", True), ("without", False)):
        callback = DeterminismCallback(tmp_path / f"run-{name}", mode="record", level="state", log_metrics=is_on)
        fit(callback, csv_logger(tmp_path / name))
    with (tmp_path / "with" / "metrics.csv").open() as file:
        lines = [row for row in csv.DictReader(file) if row["loss"]]
    with (tmp_path / "without" / "metrics.csv").open() as file:
        plain = list(csv.DictReader(file))
    assert [{name: row[name] for name in plain[0]} for row in lines] == plain
    assert len(plain) == 2
    assert not any(name.startswith("determinism") for name in plain[0])


def test_a_logger_of_floats_gets_floats_and_a_chain_that_a_plot_holds(reference: Path, tmp_path: Path) -> None:
    logger = FloatsOnly()
    fit(DeterminismCallback(reference, current=tmp_path / "current"), logger)
    chains = [Run.open(reference).rank(0).chain(0, step) for step in (2, 5, 7)]
    logged = [row["chain"] for _, row in logger.ours()]
    assert logged == [chain >> 40 for chain in chains]
    assert [float(np.float32(value)) for value in logged] == logged


def test_what_differs_is_told_with_the_verdict(reference: Path, tmp_path: Path) -> None:
    floats, texts = FloatsOnly(), TextToo()
    callback = DeterminismCallback(reference, current=tmp_path / "current", on_divergence="collect")
    with pytest.raises(DivergenceError):
        fit(callback, floats, texts, factor_at=4)
    verdict = callback.verdict
    assert verdict is not None
    first, second, last = (row for _, row in floats.ours())
    assert (first["differing"], "chain" in first) == (0.0, True)
    assert second["differing"] > 0
    assert "chain" not in second  # the curve ends where the runs part
    # of the steps; the loss of the epoch, a metric, differs too and is known when the fit has ended
    assert (last["differing"], last["steps_verified"]) == (verdict.counts.sites_differing - 1, 8.0)
    assert texts.texts == [("determinism/verdict", f"diverged: {verdict.explanation}", 7)]


def test_a_run_that_is_stopped_tells_its_last_state(reference: Path, tmp_path: Path) -> None:
    floats, texts = FloatsOnly(), TextToo()
    callback = DeterminismCallback(reference, current=tmp_path / "current")
    with pytest.raises(DivergenceError):
        fit(callback, floats, texts, factor_at=4)
    assert [step for step, _ in floats.ours()] == [2, 4]
    assert floats.ours()[-1][1]["differing"] > 0
    assert [text.partition(":")[0] for _, text, _ in texts.texts] == ["diverged"]


def test_the_verdict_is_text_where_a_logger_takes_it(reference: Path, tmp_path: Path) -> None:
    texts = TextToo()
    callback = DeterminismCallback(reference, current=tmp_path / "current")
    fit(callback, texts)
    assert callback.verdict is not None
    assert texts.texts == [("determinism/verdict", f"match: {callback.verdict.explanation}", 7)]
    assert {name for name, _, _ in texts.scalars} >= {f"determinism/{name}" for name in COMMON}


def test_tensorboard_shows_it(reference: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    callback = DeterminismCallback(reference, current=tmp_path / "current")
    fit(callback, TensorBoardLogger(tmp_path, name="", version="events"))
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    steps = [(event.step, event.value) for event in events.Scalars("determinism/steps_verified")]
    assert steps == [(2, 3.0), (5, 6.0), (7, 8.0)]
    chain = Run.open(reference).rank(0).chain(0, 7)
    assert events.Scalars("determinism/chain")[-1].value == chain >> 40
    (text,) = events.Tensors("determinism/verdict/text_summary")
    assert text.tensor_proto.string_val[0].startswith(b"match: All ")


# the training does not notice


def states(trained: Fit) -> dict[str, Any]:
    weights = {name: value.numpy().tobytes() for name, value in trained.model.state_dict().items()}
    generators = [random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()]
    return {**weights, "generators": generators, "loss": trained.trainer.callback_metrics["loss"].item()}


@pytest.mark.parametrize("level", ["state", pytest.param("op", marks=pytest.mark.slow)])
def test_logging_changes_no_bit_and_is_not_in_the_trace(tmp_path: Path, level: str) -> None:
    """With a logger that draws and computes: those draws of its own that the user asked for stay."""
    plain = states(fit(None, FloatsOnly(draws=True), log_every_n_steps=1))
    chains = []
    for is_on in (True, False):
        logger = FloatsOnly(draws=True)
        callback = DeterminismCallback(tmp_path / f"{is_on}", mode="record", level=level, log_metrics=is_on)
        assert states(fit(callback, logger, log_every_n_steps=1)) == plain
        assert len(logger.ours()) == (8 if is_on else 0)
        chains.append(Run.open(tmp_path / f"{is_on}").rank(0).fit(0).chains.tolist())
    assert chains[0] == chains[1]


def test_nothing_of_it_can_be_monitored(tmp_path: Path) -> None:
    trained = fit(DeterminismCallback(tmp_path / "run", mode="record", level="state"), FloatsOnly())
    trainer = trained.trainer
    names = {*trainer.callback_metrics, *trainer.logged_metrics, *trainer.progress_bar_metrics}
    assert "loss" in names
    assert not [name for name in names if "determinism" in name]


def test_it_is_logged_when_and_where_the_trainer_logs(tmp_path: Path) -> None:
    logger = FloatsOnly()
    callback = DeterminismCallback(tmp_path / "run", mode="record", level="state")
    fit(callback, logger, log_every_n_steps=2, accumulate_grad_batches=2)
    users = [step for step, row in logger.logged if "loss" in row]
    # of 8 batches, 4 optimizer steps
    assert users == [1, 3]
    assert [(step, row["steps_recorded"]) for step, row in logger.ours()] == [(1, 4), (3, 8)]


def test_without_an_interval_it_is_logged_at_the_end(tmp_path: Path) -> None:
    logger = FloatsOnly()
    callback = DeterminismCallback(tmp_path / "run", mode="record", level="state")
    fit(callback, logger, log_every_n_steps=0, max_epochs=1)
    assert [step for step, _ in logger.ours()] == [3]


def test_only_the_first_rank_tells(tmp_path: Path) -> None:
    progress = Progress(num_steps=1, num_sites=1, num_differing=0, num_bytes=0, chain=1)
    for is_first in (True, False):
        logger = FloatsOnly()
        loop = SimpleNamespace(
            epoch_loop=SimpleNamespace(_batches_that_stepped=0),
            _should_accumulate=lambda: False,
        )
        trainer: Any = SimpleNamespace(
            is_global_zero=is_first,
            loggers=[logger],
            fit_loop=loop,
            log_every_n_steps=1,
            progress_bar_callback=None,
        )
        told = ProgressReporter()
        told.begin_fit(trainer, is_recording=True)
        told.after_step(progress, 0.0)
        told.end_fit(None)
        assert len(logger.ours()) == is_first


def test_the_time_of_every_hook_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that goes on by a second at each look, a hook takes one."""
    clock = iter(range(10**6))
    look: Callable[[], float] = lambda: float(next(clock))  # noqa: E731  # a clock, read where it stands
    for module in (reporting, hash_mode):
        monkeypatch.setattr(module, "perf_counter", look)
    logger = FloatsOnly()
    fit(DeterminismCallback(tmp_path / "run", mode="record", level="state"), logger, log_every_n_steps=1, max_epochs=1)
    seconds = [row["overhead_seconds"] for _, row in logger.ours()]
    # the batch's start and end, before and after backward, before the optimizer, and its gradients
    assert np.diff(seconds).tolist() == [6.0, 6.0, 6.0]


@pytest.mark.parametrize("log_metrics", [1, "yes", None])
def test_another_value_is_refused(log_metrics: Any) -> None:
    with pytest.raises(SelectionError, match="log_metrics must be True or False"):
        DeterminismCallback("run", log_metrics=log_metrics)
