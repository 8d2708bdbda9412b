"""Long trainings: memory stays flat."""

import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from processes import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback

NUM_STEPS = 2000
MAX_GROWTH_BYTES = 8 * 2**20
"""After step 100; a single tensor of each step kept alive would be ten times as much."""


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.head = nn.Linear(32, 50)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layer(self.embed(batch))).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if index == 100:
            self.before = resident_bytes()

    def on_train_end(self) -> None:
        assert resident_bytes() - self.before < MAX_GROWTH_BYTES


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.soak
@pytest.mark.timeout(900)  # thousands of traced steps, on a machine that may be busy
def test_memory_is_flat(tmp_path: Path) -> None:
    def train(mode: Any) -> None:
        pl.seed_everything(0, verbose=False)
        callback = DeterminismCallback(tmp_path / "run", mode=mode, current=tmp_path / "current")
        batches = torch.randint(50, (NUM_STEPS, 4, 16))
        quiet_trainer(callback).fit(Model(), DataLoader(batches, batch_size=None))

    for mode in ("record", "verify"):
        run_ranks(lambda _, mode=mode: train(mode), tmp_path / mode, world_size=1, seconds=400, status=0)
