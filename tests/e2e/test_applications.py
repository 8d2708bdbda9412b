"""Applications as others write them, untouched: LightningCLI, and the layout of lightning-hydra-template."""

import os
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
from forks import fork_process

from det_callbacks.runs.store import Run


def run(script: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit status of a program and what it prints."""
    with script.with_suffix(".txt").open("w+b") as printed:
        words = [sys.executable, str(script), *arguments]
        variables = {**os.environ, "TQDM_DISABLE": "1"}
        status = fork_process(words, variables=variables, folder=script.parent, output=printed.fileno())
    return status, script.with_suffix(".txt").read_text()


CALLBACK = """
trainer:
  deterministic: false
  callbacks:
    - class_path: det_callbacks.DeterminismCallback
      init_args:
        reference: refs/run
        mode: record
        modules: [net, "*"]
        settings: {seed: 7, float32_matmul_precision: highest}
"""


def test_lightning_cli_builds_it_from_yaml_and_from_arguments(tmp_path: Path) -> None:
    for name in ("cli.py", "cli.yaml", "synthetic.py"):
        shutil.copy(Path(__file__).parent / "projects" / name, tmp_path)
    (tmp_path / "callback.yaml").write_text(CALLBACK)
    app, ours = tmp_path / "cli.py", ("fit", "--config=cli.yaml")
    status, printed = run(app, *ours, "--config=callback.yaml")
    assert status == 0, printed
    recorded = Run.open(tmp_path / "refs" / "run")
    assert recorded.manifest.selection.modules == ("net", "*")
    # set by the callback: Trainer(deterministic=False) had switched them off
    assert recorded.manifest.environment["settings.deterministic_algorithms"].value == "error"
    ours += ("--trainer.callbacks+=det_callbacks.DeterminismCallback", "--trainer.callbacks.reference=refs/run")
    settings = '--trainer.callbacks.settings={"seed": 7, "float32_matmul_precision": "highest"}'
    status, printed = run(app, *ours, settings, "--trainer.callbacks.current=now")
    assert status == 0, printed
    assert "det_callbacks: match: verified " in printed
    for wrong in ("mode=on", "sync_every_n_steps=2"):
        status, printed = run(app, *ours, f"--trainer.callbacks.{wrong}")
        assert (status, wrong.partition("=")[0] in printed) == (2, True)


# github.com/ashleve/lightning-hydra-template: its folders, how its train.py goes about it, and what its
# configuration sets, with less of everything
TEMPLATE = {
    "src/train.py": """
        import hydra
        import lightning as L

        @hydra.main(version_base="1.3", config_path="../configs", config_name="train.yaml")
        def main(cfg):
            if cfg.get("seed"):
                L.seed_everything(cfg.seed, workers=True)
            datamodule = hydra.utils.instantiate(cfg.data)
            model = hydra.utils.instantiate(cfg.model)
            callbacks = [hydra.utils.instantiate(conf) for _, conf in cfg.callbacks.items() if "_target_" in conf]
            trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=[])
            trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.get("ckpt_path"))
            trainer.test(model=model, datamodule=datamodule, ckpt_path=trainer.checkpoint_callback.best_model_path)

        if __name__ == "__main__":
            main()
        """,
    "src/module.py": """
        import torch
        from lightning import LightningDataModule, LightningModule
        from torch.utils.data import DataLoader, TensorDataset, random_split
        from torchmetrics import MeanMetric

        class MNISTLitModule(LightningModule):
            def __init__(self, net, optimizer, scheduler):
                super().__init__()
                # the template saves its arguments; Lightning 2.6 loads no checkpoint with pickled modules any more
                self.net, self.make_optimizer, self.make_scheduler = net, optimizer, scheduler
                self.val_loss = MeanMetric()
            def training_step(self, batch, batch_idx):
                return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            def validation_step(self, batch, batch_idx):
                self.val_loss(self.training_step(batch, batch_idx))
                self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
            def test_step(self, batch, batch_idx):
                self.log("test/loss", self.training_step(batch, batch_idx), on_epoch=True)
            def configure_optimizers(self):
                optimizer = self.make_optimizer(params=self.trainer.model.parameters())
                scheduler = {"scheduler": self.make_scheduler(optimizer=optimizer), "monitor": "val/loss"}
                return {"optimizer": optimizer, "lr_scheduler": scheduler}

        class MNISTDataModule(LightningDataModule):
            def setup(self, stage=None):
                data = TensorDataset(torch.linspace(0, 1, 40 * 6).view(40, 6), torch.arange(40) % 3)
                self.parts = random_split(data, [24, 8, 8], generator=torch.Generator().manual_seed(42))
            def train_dataloader(self):
                return DataLoader(self.parts[0], batch_size=8, shuffle=True)
            def val_dataloader(self):
                return DataLoader(self.parts[1], batch_size=8)
            def test_dataloader(self):
                return DataLoader(self.parts[2], batch_size=8)
        """,
    "configs/train.yaml": """
        defaults: [_self_, model: mnist, callbacks: default, trainer: default, hydra: default]
        data: {_target_: module.MNISTDataModule}
        ckpt_path: null
        seed: null
        """,
    "configs/model/mnist.yaml": """
        _target_: module.MNISTLitModule
        optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.001, weight_decay: 0.0}
        scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, mode: min, factor: 0.1}
        net: {_target_: torch.nn.Linear, in_features: 6, out_features: 3}
        """,
    "configs/callbacks/default.yaml": """
        model_checkpoint:
          {_target_: lightning.pytorch.callbacks.ModelCheckpoint, monitor: val/loss, save_last: true}
        early_stopping: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss}
        rich_progress_bar: {_target_: lightning.pytorch.callbacks.RichProgressBar}
        """,
    "configs/trainer/default.yaml": """
        _target_: lightning.pytorch.trainer.Trainer
        default_root_dir: ${hydra:runtime.output_dir}
        max_epochs: 2
        accelerator: cpu
        deterministic: false
        """,
    "configs/hydra/default.yaml": """
        run: {dir: "logs/runs/${now:%Y-%m-%d}_${now:%H-%M-%S-%f}"}
        job_logging: {root: {level: WARNING}}
        """,
}


@pytest.mark.parametrize("seed", ["determinism.settings.seed=5", pytest.param("seed=5", marks=pytest.mark.slow)])
def test_an_untouched_template_records_verifies_and_finds(seed: str, tmp_path: Path) -> None:
    """Seeded by the preset, or by itself."""
    for name, text in TEMPLATE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text).lstrip())

    def train(*arguments: str) -> tuple[int, str]:
        ours = ("hydra.searchpath=[pkg://det_callbacks.conf]", "determinism.reference=../refs/run", seed)
        return run(tmp_path / "src" / "train.py", *ours, *arguments)

    for words, wanted, said in (
        (["+determinism=record"], 0, ["recorded 6 steps", "of trainer.test"]),
        (["+determinism=verify"], 0, ["match: verified 6 steps"]),
        (
            ["+determinism=verify", "model.optimizer.lr=0.002"],
            1,
            ["cause      settings", "optimizer.Adam.lr: 0.001 in the reference, 0.002 now"],
        ),
    ):
        status, printed = train(*words)
        assert status == wanted, printed
        assert all(one in printed for one in said), printed
