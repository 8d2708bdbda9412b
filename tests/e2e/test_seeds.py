"""A seed decides what is drawn in every process: the main one, and the workers of a DataLoader."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from checking import fork_process

pytestmark = pytest.mark.slow

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

def main():
    found = {}
    for seed in json.loads(sys.argv[1]):
        for num_workers in (0, 1, 3):
            enforced = enforce_determinism({"seed": seed})
            begin, model = draw(), Model()
            weights = model.layer.weight.tolist()
            trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                              enable_progress_bar=False, enable_model_summary=False)
            trainer.fit(model, DataLoader(Drawn(), batch_size=2, num_workers=num_workers, shuffle=True))
            found[f"{seed} with {num_workers}"] = [begin, weights, model.seen, model.layer.weight.tolist(), draw()]
            enforced.restore()
    print(json.dumps(found))

if __name__ == "__main__":
    main()
"""


def run(folder: Path, *seeds: int) -> dict[str, Any]:
    script, output = folder / "train.py", folder / "output.txt"
    script.write_text(SCRIPT)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "PYTHONHASHSEED"))}
    with output.open("wb") as file:
        words = [sys.executable, str(script), json.dumps(seeds)]
        assert fork_process(words, variables=variables, folder=folder, output=file.fileno()) == 0, output.read_text()
    return json.loads(output.read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same script in two processes; the second one draws seed 1 first."""
    folder = tmp_path_factory.mktemp("seeds")
    return run(folder, 0, 1), run(folder, 1, 0)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_two_processes_draw_the_same(
    seed: int, num_workers: int, two_runs: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    first, second = (found[f"{seed} with {num_workers}"] for found in two_runs)
    assert first == second


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_seed_0_is_a_seed_and_no_other_one(num_workers: int, two_runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    zero, one = (two_runs[0][f"{seed} with {num_workers}"] for seed in (0, 1))
    # every generator: Python's, NumPy's and torch's, here and in the workers, weights and order
    assert all(a != b for a, b in zip(zero[0], one[0], strict=True))
    assert zero[1] != one[1]
    for position in (1, 2, 3):
        assert {row[position] for row in zero[2]}.isdisjoint(row[position] for row in one[2])
    assert [row[0] for row in zero[2]] != [row[0] for row in one[2]]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_no_sample_is_drawn_as_another_was(num_workers: int, two_runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    rows = two_runs[0][f"0 with {num_workers}"][2]
    assert len(rows) == 12
    for position in (1, 2, 3):
        assert len({row[position] for row in rows}) == 12, "workers or epochs that share a seed"
