"""A seed decides what is drawn in every process: the main one, and the workers of a DataLoader."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import fork_process

SCRIPT = """
import json, random, sys
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset
from det_callbacks import enforce_determinism

def draw():
    return [random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))]

class Drawn(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return torch.tensor([index, *draw()], dtype=torch.float64)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1, dtype=torch.float64)
        self.seen = []
    def training_step(self, batch, batch_idx):
        self.seen.extend(batch.tolist())
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

found = []
for seed in json.loads(sys.argv[1]):
    enforced = enforce_determinism({"seed": seed})
    begin, model = draw(), Model()
    weights = model.layer.weight.tolist()
    trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, DataLoader(Drawn(), batch_size=2, num_workers=2, shuffle=True))
    found.append([begin, weights, model.seen, model.layer.weight.tolist(), draw()])
    enforced.restore()
print(json.dumps(found))
"""


def run(folder: Path, *seeds: int) -> list[Any]:
    script, output = folder / "train.py", folder / "output.txt"
    script.write_text(SCRIPT)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "PYTHONHASHSEED"))}
    with output.open("wb") as file:
        words = [sys.executable, str(script), json.dumps(seeds)]
        assert fork_process(words, variables=variables, folder=folder, output=file.fileno()) == 0, output.read_text()
    return json.loads(output.read_text().splitlines()[-1])


@pytest.mark.slow
def test_a_seed_decides_what_is_drawn(tmp_path: Path) -> None:
    zero, one = run(tmp_path, 0, 1)
    assert run(tmp_path, 1, 0) == [one, zero], "the second process draws seed 1 first"
    # every generator: Python's, NumPy's and torch's, here and in the workers, weights and order
    assert all(a != b for a, b in zip(zero[0], one[0], strict=True))
    assert zero[1] != one[1]
    assert [row[0] for row in zero[2]] != [row[0] for row in one[2]]
    for position in (1, 2, 3):
        drawn, others = ({row[position] for row in seed[2]} for seed in (zero, one))
        assert drawn.isdisjoint(others)
        assert len(drawn) == len(zero[2]) == 12, "no two workers or epochs share a seed"
