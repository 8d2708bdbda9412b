"""One of two ranks dies in any phase: all ranks end, none says match,
and the next run can proceed.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from processes import Faulty, run_ranks, run_training, train
from tiers import rest_slow

from det_callbacks import DeterminismCallback, compare_runs
from det_callbacks.ranks import group
from det_callbacks.runs.store import Run
from det_callbacks.verify import verification

pytestmark = pytest.mark.ddp

DEATHS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exception": lambda: {}["the training's own"],
    "exit": lambda: sys.exit(0),
}
STEPS = {"first step": 0, "middle": 1, "last step": 3}
PHASES = ("setup", *STEPS, "after the fit", "judging", "sealed")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: Any) -> Path:
    run_training("record", folder := tmp_path_factory.mktemp("recorded"))
    return folder / "run"


def dying(
    phase: str, rank: int, die: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> LambdaCallback:
    """Return a callback, and patch what the forked processes call,
    such that the rank dies in the phase.
    """

    def die_if(is_due: bool) -> None:
        if is_due:
            die()

    if phase == "setup":
        return LambdaCallback(setup=lambda trainer, *_: die_if(trainer.global_rank == rank))
    if phase == "judging":  # only rank 0 does
        monkeypatch.setattr(verification, "compare_runs", lambda *_: die())
    if phase == "sealed":
        real = verification.write_record

        def write_and_die(folder: Path, record: Any) -> None:
            real(folder, record)
            die_if(record.rank == rank)

        monkeypatch.setattr(verification, "write_record", write_and_die)
    at = STEPS.get(phase)
    return LambdaCallback(
        on_train_batch_start=lambda trainer, module, batch, index: die_if(
            (index, trainer.global_rank) == (at, rank)
        )
    )


CASES = [
    (mode, phase, how, rank)
    for mode, phase, how, rank in product(("verify", "overwrite"), PHASES, DEATHS, (1, 0))
    if phase not in ("judging", "sealed") or mode == "verify"
    if phase != "judging" or rank == 0
]


@pytest.mark.parametrize("case", rest_slow(CASES, every=25), ids=str)
def test_a_rank_that_dies_ends_all_and_nothing_matches(case, recorded, tmp_path, monkeypatch):
    mode, phase, how, rank = case
    monkeypatch.setattr(group.RankGroup, "end_seconds", 2.0)  # for the forked processes
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    options: dict[str, Any] = {"mode": "record", "overwrite": True}
    if mode == "verify":
        options = {"mode": "verify", "current": tmp_path / "current"}
    earlier = Run.open(run).manifest.run_id

    def body(number: int) -> None:
        train(DeterminismCallback(run, **options), *callbacks, model=Faulty)
        if phase == "after the fit" and number == rank:
            DEATHS[how]()

    with monkeypatch.context() as patch:
        callbacks = [dying(phase, rank, DEATHS[how], patch)]
        ended = run_ranks(body, tmp_path / "dies", seconds=120)
    output = "\n----\n".join(one.output for one in ended)
    if phase != "after the fit":
        assert any(one.exit_code for one in ended) or how == "exit", output
        assert "match:" not in output
        assert not (tmp_path / "current" / "verdict.json").exists(), output
        assert Run.open(run).manifest.run_id == earlier, output
    callbacks = []
    run_ranks(
        lambda _: train(DeterminismCallback(run, **options), model=Faulty),
        tmp_path / "next",
        status=0,
    )
    if mode == "verify":
        assert compare_runs(run, tmp_path / "current").verdict == "match"
    else:
        assert Run.open(run).manifest.run_id != earlier
        assert compare_runs(recorded, run).verdict == "match"
