"""Trainings on several real processes: forked, since an interpreter that imports torch
takes longer than the test.

Also a program that a launcher starts: ``python processes.py MODE FOLDER STRATEGY``.
"""

import faulthandler
import inspect
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fits import CLASSES, FEATURES, Classifier, Samples
from forks import end_with
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from det_callbacks import DetCallbacksError, DeterminismCallback

ARGUMENTS = inspect.signature(DeterminismCallback).parameters


class Ended(NamedTuple):
    """How a process ended: its exit code (negative: a signal) and what it printed."""

    exit_code: int
    output: str


def run_ranks(
    body: Callable[[int], Any],
    folder: Path,
    *,
    world_size: int = 2,
    seconds: float = 240.0,
    status: int | None = None,
) -> list[Ended]:
    """Run a body on each rank, with the environment that a launcher gives it.

    A process that hangs for so many seconds fails the test, and one that ends with another exit
    code, where all have to end with one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    processes = [
        context.Process(
            target=_start, args=(body, rank, world_size, port, folder / f"output-{rank}.txt")
        )
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
    assert status is None or codes == [status] * world_size, f"{codes}:\n" + "\n----\n".join(
        outputs
    )
    return [
        Ended(exit_code=code, output=output) for code, output in zip(codes, outputs, strict=True)
    ]


def _start(body: Callable[[int], Any], rank: int, world_size: int, port: int, output: Path) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    os.environ.update(address | {"WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)})

    def program() -> None:
        faulthandler.enable(2)
        try:
            body(rank)
        except DetCallbacksError as error:
            # the program ends with its exit code; a forked one has no exit handlers
            traceback.print_exc()
            sys.exit(error.exit_code)

    end_with(program, os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))


def train(
    callback: DeterminismCallback | None,
    *others: pl.Callback,
    model: Callable[[], Any] = Classifier,
    batches: int = 4,
    strategy: Any = "ddp",
    world_size: int = 2,
    **options: Any,
) -> tuple[pl.Trainer, Any]:
    pl.seed_everything(11, verbose=False)
    module = model()
    callbacks = [*others] if callback is None else [*others, callback]
    trainer = quiet_trainer(*callbacks, devices=world_size, strategy=strategy, **options)
    size = 32 // (batches * world_size)
    trainer.fit(module, DataLoader(Samples(), batch_size=size))
    return trainer, module


def run_training(
    mode: Any, folder: Path, fault: str = "none", *, status: int | None = 0, **options: Any
) -> list[Ended]:
    given = {name: options.pop(name) for name in [*options] if name in ARGUMENTS}

    def body(rank: int) -> None:
        callback = DeterminismCallback(
            folder / "run", mode=mode, **{"current": folder / "current", **given}
        )
        try:
            train(callback, **{"model": partial(Faulty, fault), **options})
        finally:
            print(f"the verdict: {callback.verdict and callback.verdict.verdict}")

    return run_ranks(body, folder / mode, world_size=options.get("world_size", 2), status=status)


class Faulty(Classifier):
    """Does something else on rank 1, in step 2; where the collective is at fault,
    all ranks get something else.

    With the fault "rate", rank 1 builds its optimizer with another learning rate.
    """

    def __init__(self, fault: str = "none") -> None:
        super().__init__()
        self.fault = fault
        self.register_buffer("scale", torch.ones(2))

    def training_step(self, batch: Any, index: int) -> Tensor:
        total = batch[0].sum(0)
        dist.all_reduce(total)
        if self.fault == "collective" and self.trainer.fit_loop.epoch_loop.total_batch_idx == 2:
            # past torch, so that it came out of the collective
            total.numpy().view(np.int32)[0] += 1
        loss: Tensor = super().training_step(batch, index)
        return loss + 0 * total.sum()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.fault == "rate" and self.global_rank == 1:
            optimizer.param_groups[0]["lr"] *= 2
        return optimizer

    def is_due(self, fault: str, *, step: int = 2) -> bool:
        now = self.trainer.fit_loop.epoch_loop.total_batch_idx
        return self.fault == fault and self.global_rank == 1 and now == step

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, labels = batch
        # the batch is drawn before its step is counted
        return inputs + 1 if self.is_due("data", step=1) else inputs, labels

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        place = {"weights": self.last.bias, "buffer": self.scale}.get(self.fault)
        if place is not None and self.is_due(self.fault):
            bits = place.detach().numpy().view(np.int32)  # past torch, so that no op is to blame
            bits[0] += 1 << 16  # enough for the other ranks to notice


def linked(reference: Path, folder: Path) -> Path:
    (folder / "run").symlink_to(reference / "run")
    return folder


def verdict_in(folder: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads((folder / "current" / "verdict.json").read_text())
    return verdict


class Sharded(Classifier):
    """FSDP2 over the data-parallel dimension, and tensor parallelism over the other,
    where it has several ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES + 1)
        self.norm = self.drop = None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.relu(self.first(inputs)))
        return outputs

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        if self.device_mesh["tensor_parallel"].size() > 1:
            plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
            parallelize_module(self, self.device_mesh["tensor_parallel"], plan)
        for layer in (self.first, self.last):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


STRATEGIES: dict[str, tuple[Any, Any, int]] = {
    "ddp": ("ddp", Classifier, 2),
    "ddp_spawn": ("ddp_spawn", Classifier, 2),
    "fsdp2": (
        lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        Sharded,
        2,
    ),
    "mesh": (
        lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2),
        Sharded,
        4,
    ),
}


def run_strategy(mode: Any, folder: Path, name: str) -> None:
    strategy, model, world_size = STRATEGIES[name]
    callback = DeterminismCallback(folder / "run", mode=mode, current=folder / "current")
    train(
        callback,
        model=model,
        strategy=strategy() if callable(strategy) else strategy,
        world_size=world_size,
    )


if __name__ == "__main__":
    run_strategy(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
