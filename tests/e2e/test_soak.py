"""Long trainings: memory stays flat, and lengths that vary do not fill the disk."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from processes import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]  # thousands of traced steps, on a machine that may be busy

MAX_GROWTH_BYTES = 8 * 2**20
"""Over 1,900 steps; a single tensor of a step kept alive would be ten times as much."""


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


class Batches(IterableDataset[Tensor]):
    def __init__(self, num_steps: int, *lengths: int) -> None:
        self.num_steps, self.lengths = num_steps, lengths

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.num_steps):
            yield torch.randint(50, (4, int(torch.randint(*self.lengths, (), generator=generator))))


class Watch(pl.Callback):
    """Fails where the memory of the process has grown since step 100."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 100:
            self.before = resident_bytes()

    def on_train_end(self, *_: Any) -> None:
        assert resident_bytes() - self.before < MAX_GROWTH_BYTES


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def train(folder: Path, mode: Any, batches: Batches) -> None:
    def body(_: int) -> None:
        pl.seed_everything(0, verbose=False)
        callback = DeterminismCallback(folder / "run", mode=mode, current=folder / "current")
        quiet_trainer(callback, Watch()).fit(Model(), DataLoader(batches, batch_size=None))

    run_ranks(body, folder / mode, world_size=1, seconds=900, status=0)


def test_memory_is_flat_from_step_100_to_step_2000(tmp_path: Path) -> None:
    for mode in ("record", "verify"):
        train(tmp_path, mode, Batches(2000, 16, 17))


def test_lengths_that_vary_keep_programs_and_layouts_small(tmp_path: Path) -> None:
    train(tmp_path, "record", Batches(500, 8, 72))
    assert len(list((tmp_path / "run/programs").iterdir())) <= 4
    files = [*(tmp_path / "run/programs").iterdir(), *(tmp_path / "run/layouts").iterdir()]
    assert sum(file.stat().st_size for file in files) < 20_000_000
