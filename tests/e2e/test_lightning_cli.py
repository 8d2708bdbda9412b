"""The callback, built by LightningCLI from arguments."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from det_callbacks.runs.store import Run

CLI_APPLICATION = """
import lightning.pytorch as pl, torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, width)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(48.0).view(12, 4)), batch_size=4)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

LightningCLI(Model, save_config_callback=None, trainer_defaults={
    "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "accelerator": "cpu"})
"""


@pytest.mark.slow
def test_lightning_cli_builds_it_from_arguments(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(textwrap.dedent(CLI_APPLICATION))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                "app.py",
                "fit",
                "--seed_everything=3",
                "--trainer.callbacks+=det_callbacks.DeterminismCallback",
                "--trainer.callbacks.reference=refs/run",
                *arguments,
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    recording = run(
        "--trainer.callbacks.mode=record",
        '--trainer.callbacks.modules=["net", "*"]',
        '--trainer.callbacks.settings={"seed": 3, "deterministic_algorithms": null, "cudnn_deterministic": null, '
        '"cublas_workspace_config": null}',
    )
    assert recording.returncode == 0, recording.stderr
    assert "recorded 3 steps" in recording.stdout
    assert Run.open(tmp_path / "refs" / "run").selection.modules == ("net", "*")
    verifying = run("--trainer.callbacks.current=now", "--trainer.callbacks.on_divergence=collect")
    assert verifying.returncode == 0, verifying.stderr
    assert "det_callbacks: match: verified 3 steps" in verifying.stdout
    wrong = run("--trainer.callbacks.mode=on")
    assert wrong.returncode == 2
    assert "mode" in wrong.stderr
    gone = run("--trainer.callbacks.sync_every_n_steps=2")
    assert gone.returncode == 2
    assert "sync_every_n_steps" in gone.stderr
