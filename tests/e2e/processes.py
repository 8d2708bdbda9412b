"""Trainings on several real processes: forked, since an interpreter that imports torch takes longer than the test."""

import faulthandler
import json
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from styles import Classifier, Samples
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback

SECONDS = 60.0
"""Within which every process has to end, whatever happens to the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended: its exit code (negative: a signal) and what it printed."""

    exit_code: int
    output: str


def run_ranks(
    body: Callable[[int], Any],
    folder: Path,
    *,
    world_size: int = 2,
    seconds: float = SECONDS,
    status: int | None = None,
) -> list[Ended]:
    """Run a body on each rank, with the environment that a launcher gives it.

    A process that hangs fails the test, and one that ends with another exit code, where all have to end with one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    processes = [
        context.Process(target=_start, args=(body, rank, world_size, port, folder / f"output-{rank}.txt"))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    outputs = [(folder / f"output-{rank}.txt").read_text() for rank in range(world_size)]
    assert not hanging, f"ranks {hanging} hang:\n" + "\n----\n".join(outputs)
    codes = [process.exitcode or 0 for process in processes]
    assert status is None or codes == [status] * world_size, f"{codes}:\n" + "\n----\n".join(outputs)
    return [Ended(exit_code=code, output=output) for code, output in zip(codes, outputs, strict=True)]


def _start(body: Callable[[int], Any], rank: int, world_size: int, port: int, output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # not those that pytest put there to capture what is printed
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    os.environ.update(
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
        }
    )
    warnings.simplefilter("ignore")  # a rank's own: what it prints is compared
    torch.set_num_threads(1)  # threads of the parent's pool are not there
    status = 0
    try:
        body(rank)
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException as error:  # what ends the process is what is tested
        traceback.print_exc()
        # of a program that ends with the exit code of an error of ours; in a forked process no exit handlers run
        status = getattr(error, "exit_code", 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def train(
    callback: DeterminismCallback | None,
    *others: pl.Callback,
    model: Callable[[], Any] = Classifier,
    batches: int = 4,
    strategy: Any = "ddp",
    world_size: int = 2,
    fit: Any = None,
    **options: Any,
) -> tuple[pl.Trainer, Any]:
    """Train on as many processes as there are, with batches that are equally many on each."""
    pl.seed_everything(11, verbose=False)
    module = model()
    callbacks = [*others] if callback is None else [*others, callback]
    trainer = quiet_trainer(*callbacks, devices=world_size, strategy=strategy, **options)
    size = 32 // (batches * world_size)
    trainer.fit(module, DataLoader(Samples(), batch_size=size), **(fit or {}))
    return trainer, module


def linked(reference: Path, folder: Path) -> Path:
    """Return a folder in which the recorded run is the reference."""
    (folder / "run").symlink_to(reference / "run")
    return folder


def verdict_in(folder: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads((folder / "current" / "verdict.json").read_text())
    return verdict
