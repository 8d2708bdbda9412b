"""A training that a launcher starts: ``python ranks_program.py MODE FOLDER STRATEGY``."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fits import CLASSES, FEATURES, Classifier
from lightning.pytorch.strategies import ModelParallelStrategy
from processes import train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from det_callbacks import DeterminismCallback


class Sharded(Classifier):
    """FSDP2 over the data-parallel dimension, and tensor parallelism over the other, where it has several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES + 1)
        self.norm = self.drop = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(torch.relu(self.first(inputs)))
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
    "fsdp2": (lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), Sharded, 2),
    "mesh": (lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2), Sharded, 4),
}


def run(mode: Any, folder: Path, name: str) -> None:
    strategy, model, world_size = STRATEGIES[name]
    callback = DeterminismCallback(folder / "run", mode=mode, current=folder / "current")
    train(callback, model=model, strategy=strategy() if callable(strategy) else strategy, world_size=world_size)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
