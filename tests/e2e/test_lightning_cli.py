"""The callback, built by LightningCLI from arguments."""

import os
import sys
import textwrap
from pathlib import Path

from forks import fork_process

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


def test_lightning_cli_builds_it_from_arguments(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(textwrap.dedent(CLI_APPLICATION))

    def run(*arguments: str) -> tuple[int, str]:
        ours = ["--trainer.callbacks+=det_callbacks.DeterminismCallback", "--trainer.callbacks.reference=refs/run"]
        words = [sys.executable, str(tmp_path / "app.py"), "fit", "--seed_everything=3", *ours, *arguments]
        with (tmp_path / "printed").open("w+b") as printed:
            status = fork_process(words, variables=os.environ, folder=tmp_path, output=printed.fileno())
        return status, (tmp_path / "printed").read_text()

    status, printed = run(
        "--trainer.callbacks.mode=record",
        '--trainer.callbacks.modules=["net", "*"]',
        '--trainer.callbacks.settings={"seed": 3, "deterministic_algorithms": null, "cudnn_deterministic": null, '
        '"cublas_workspace_config": null}',
    )
    assert status == 0, printed
    assert "recorded 3 steps" in printed
    assert Run.open(tmp_path / "refs" / "run").selection.modules == ("net", "*")
    status, printed = run("--trainer.callbacks.current=now", "--trainer.callbacks.on_divergence=collect")
    assert status == 0, printed
    assert "det_callbacks: match: verified 3 steps" in printed
    for wrong in ("mode=on", "sync_every_n_steps=2"):
        status, printed = run(f"--trainer.callbacks.{wrong}")
        assert (status, wrong.partition("=")[0] in printed) == (2, True)
