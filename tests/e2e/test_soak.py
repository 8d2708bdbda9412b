"""Long trainings: memory stays flat, and lengths that vary do not fill the disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import json, sys
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader
from trainers import quiet_trainer
from det_callbacks import DeterminismCallback

reference, current, mode, num_steps, varies = *sys.argv[1:4], int(sys.argv[4]), sys.argv[5] == "varies"


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.head = nn.Linear(32, 50)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.head(self.layer(self.embed(batch))).flatten(0, 1), batch.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(num_steps):
            length = int(torch.randint(8, 72, (), generator=generator)) if varies else 16
            yield torch.randint(50, (4, length), generator=generator)


def resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["VmRSS"].split()[0]) / 1024


class Watch(Callback):
    def __init__(self):
        self.resident = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 in (100, num_steps):
            self.resident[batch_idx + 1] = resident()


seed_everything(0)
watch = Watch()
tracer = DeterminismCallback(reference, mode=mode, current=current or None)
quiet_trainer(tracer, watch).fit(Model(), DataLoader(Batches(), batch_size=None))
print(json.dumps(watch.resident))
"""

MAX_GROWTH_MIB = 8
"""Over 1,900 steps; a single tensor of a step kept alive would be ten times as much."""


def train(reference: Path, mode: str, num_steps: int, lengths: str, current: Path | str = "") -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-c", TRAIN, reference, current, mode, num_steps, lengths]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=500, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.soak
@pytest.mark.timeout(900)  # 4,000 traced steps, on a machine that may be busy
def test_memory_is_flat_from_step_100_to_step_2000(tmp_path):
    for mode, current in (("record", ""), ("verify", tmp_path / "current")):
        resident = train(tmp_path / "run", mode, 2000, "fixed", current)
        assert resident["2000"] - resident["100"] < MAX_GROWTH_MIB, (mode, resident)


@pytest.mark.soak
def test_lengths_that_vary_keep_programs_and_layouts_small(tmp_path):
    resident = train(tmp_path / "run", "record", 500, "varies")
    assert resident["500"] - resident["100"] < MAX_GROWTH_MIB, resident
    assert len(list((tmp_path / "run/programs").iterdir())) <= 4
    files = [*(tmp_path / "run/programs").iterdir(), *(tmp_path / "run/layouts").iterdir()]
    assert sum(file.stat().st_size for file in files) < 20_000_000
