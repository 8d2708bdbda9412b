"""Long trainings: memory stays flat."""

import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from fits import Classifier, Samples
from processes import run_ranks
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback


class Watched(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 100:
            self.before = resident_bytes()

    def on_train_end(self) -> None:
        # a single tensor of each step kept alive would be ten times as much
        assert (self.global_step, resident_bytes() - self.before < 8 * 2**20) == (2000, True)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.soak
@pytest.mark.timeout(900)  # thousands of traced steps, on a machine that may be busy
def test_memory_is_flat(tmp_path: Path) -> None:
    def train(mode: Any) -> None:
        pl.seed_everything(0, verbose=False)
        callback = DeterminismCallback(tmp_path / "run", mode=mode, current=tmp_path / "current")
        quiet_trainer(callback, max_epochs=250).fit(Watched(), DataLoader(Samples(), batch_size=4))

    for mode in ("record", "verify"):
        run_ranks(lambda _, mode=mode: train(mode), tmp_path / mode, world_size=1, seconds=400, status=0)
