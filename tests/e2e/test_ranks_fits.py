"""How fits of several processes end: together, whatever was found, and also one after the other."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from judged import require_one_verdict
from processes import Ended, run_ranks
from styles import Classifier, Samples
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback, DivergenceError
from det_callbacks.callback import take_unfinished, together
from det_callbacks.callback.fits import Waiting, wait
from det_callbacks.runs.store import Run

pytestmark = pytest.mark.ddp

STEPS = 8
SLOW = pytest.mark.slow


class Planted(Classifier):
    """Gets another batch on rank 1, in step 2 of the fit of that number; or has other weights after that step."""

    def __init__(self, fit: int | None, *, is_late: bool) -> None:
        super().__init__()
        self.planted = fit
        self.is_late = is_late
        self.fit = 0

    def on_train_start(self) -> None:
        self.fit += 1

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.is_due(index) and not self.is_late:
            batch[0].add_(1)

    def optimizer_step(self, epoch: int, index: int, *others: Any, **options: Any) -> None:
        super().optimizer_step(epoch, index, *others, **options)
        if self.is_due(index) and self.is_late:
            self.last.bias.detach().numpy()[0] += 1  # past torch: no op is to blame

    def is_due(self, index: int) -> bool:
        return self.planted == self.fit - 1 and index == 2 and self.global_rank == 1


def fits(
    callback: DeterminismCallback,
    *,
    planted: int | None = None,
    is_late: bool = False,
    num_fits: int = 1,
) -> None:
    pl.seed_everything(11, verbose=False)
    module = Planted(planted, is_late=is_late)
    trainer = quiet_trainer(callback, devices=2, strategy="ddp")
    for number in range(num_fits):
        trainer.fit_loop.max_epochs = number + 1
        try:
            trainer.fit(module, DataLoader(Samples(), batch_size=32 // STEPS // 2))
        finally:
            print(f"fit {number}: {trainer.global_step} steps, verdict {callback.verdict and callback.verdict.verdict}")


def record(folder: Path, **options: Any) -> list[Ended]:
    return run_ranks(lambda _: fits(DeterminismCallback(folder / "run", mode="record"), **options), folder / "record")


def verify(
    folder: Path, planted: int | None = None, *, is_late: bool = False, num_fits: int = 1, **options: Any
) -> list[Ended]:
    def body(_: int) -> None:
        callback = DeterminismCallback(folder / "run", current=folder / "current", **options)
        fits(callback, planted=planted, is_late=is_late, num_fits=num_fits)

    return run_ranks(body, folder / "verify")


def link(reference: Path, folder: Path) -> Path:
    (folder / "run").symlink_to(reference / "run")
    return folder


def verdict_in(folder: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads((folder / "current" / "verdict.json").read_text())
    return verdict


def closing_lines(ended: list[Ended]) -> list[list[str]]:
    return [[line for line in one.output.splitlines() if line.startswith("det_callbacks: ")] for one in ended]


@pytest.fixture(scope="module")
def one_fit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    assert [one.exit_code for one in record(folder)] == [0, 0]
    return folder


@pytest.fixture(scope="module")
def two_fits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    assert [one.exit_code for one in record(folder, num_fits=2)] == [0, 0]
    return folder


def test_two_fits_are_recorded_and_verified_together(two_fits: Path, tmp_path: Path) -> None:
    run = Run.open(two_fits / "run")
    assert run.is_complete
    assert [[len(run.rank(rank).steps(segment)) for segment in (0, 1)] for rank in (0, 1)] == [[STEPS, STEPS]] * 2
    ended = verify(link(two_fits, tmp_path), num_fits=2)
    assert [one.exit_code for one in ended] == [0, 0], ended
    verdict = verdict_in(tmp_path)
    assert (verdict["verdict"], verdict["counts"]["steps_compared"]) == ("match", 4 * STEPS)
    assert all("fit 0: 8 steps, verdict None" in one.output for one in ended)
    assert all("fit 1: 16 steps, verdict match" in one.output for one in ended)
    first, second = closing_lines(ended)
    assert [line.split(":")[1] for line in first] == [" fit 1 of 2 agrees", " match"]
    assert second == []


@SLOW
def test_what_differs_in_the_second_fit_is_found_there(two_fits: Path, tmp_path: Path) -> None:
    ended = verify(link(two_fits, tmp_path), 1, num_fits=2)
    assert [one.exit_code for one in ended] == [1, 1], ended
    verdict = verdict_in(tmp_path)
    assert (verdict["first_divergence"]["rank"], verdict["first_divergence"]["step"]) == (1, STEPS + 2)
    assert f"2 of 2 ranks differ (ranks 0, 1 from step {STEPS + 2} of fit 1 on)" in verdict["explanation"]
    require_one_verdict(verdict, tmp_path / "run", tmp_path / "current")


def test_a_second_fit_that_does_not_come_ends_all_ranks(two_fits: Path, tmp_path: Path) -> None:
    def body(_: int) -> None:
        fits(DeterminismCallback(two_fits / "run", current=tmp_path / "current"))
        if (error := take_unfinished()) is not None:  # as at the process's exit
            raise error

    ended = run_ranks(body, tmp_path / "verify")
    assert [one.exit_code for one in ended] == [1, 1], ended
    assert all("holds 2 fits, and this process ended after 1" in one.output for one in ended)
    assert verdict_in(tmp_path)["verdict"] == "diverged"


@pytest.mark.parametrize(("on_divergence", "exit_code"), [("collect", 1), pytest.param("warn", 0, marks=SLOW)])
def test_all_ranks_go_on_to_the_end(on_divergence: str, exit_code: int, one_fit: Path, tmp_path: Path) -> None:
    ended = verify(link(one_fit, tmp_path), 0, on_divergence=on_divergence)
    assert [one.exit_code for one in ended] == [exit_code] * 2, ended
    verdict = verdict_in(tmp_path)
    assert (verdict["verdict"], verdict["counts"]["steps_compared"]) == ("diverged", 2 * STEPS)
    assert (verdict["first_divergence"]["rank"], verdict["first_divergence"]["step"]) == (1, 2)
    assert all(f"fit 0: {STEPS} steps, verdict diverged" in one.output for one in ended)
    first, second = closing_lines(ended)
    assert (len(first), len(second)) == (1, 0), (first, second)
    assert first[0].startswith("det_callbacks: diverged: verified 16 steps of 2 ranks, ")


@pytest.mark.parametrize(
    ("every", "last", "is_late"),
    [
        (2, 3, False),
        (3, 2, True),  # only rank 1 differs by then
        pytest.param(5, 4, False, marks=SLOW),
    ],
)
def test_all_ranks_stop_at_the_same_sync(
    every: int, last: int, is_late: bool, one_fit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "SYNC_EVERY_N_STEPS", every)
    ended = verify(link(one_fit, tmp_path), 0, is_late=is_late)
    assert [one.exit_code for one in ended] == [1, 1], ended
    assert all(f"fit 0: {last + 1} steps, verdict diverged" in one.output for one in ended)
    verdict = verdict_in(tmp_path)
    assert (verdict["counts"]["steps_compared"], verdict["coverage"]["steps"]) == (2 * (last + 1), [0, last])
    assert not [row for row in verdict["origins"] if row["kind"] == "missing"]
    run = Run.open(tmp_path / "current")
    stored = [run.rank(rank).steps(0).tolist() for rank in (0, 1)]
    assert stored == ([[], [2]] if is_late else [list(range(2, last + 1))] * 2)
    if is_late:
        assert "it started on rank 1; 1 of 2 ranks differ (rank 1 from step 2 on)" in verdict["explanation"]
    require_one_verdict(verdict, tmp_path / "run", tmp_path / "current")


def wait_for_another_fit() -> None:
    wait(wait_for_another_fit, Waiting(error=DivergenceError("one fit of two"), is_fatal=True))


def test_a_rank_that_a_strategy_forks_ends_as_diverged_where_a_fit_is_left() -> None:
    child = multiprocessing.get_context("fork").Process(target=wait_for_another_fit)
    child.start()
    child.join()
    assert child.exitcode == 1
