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


# github.com/ashleve/lightning-hydra-template: its folders, its train.py, and what its configuration sets
TEMPLATE = {
    "src/train.py": """
        import logging

        import hydra
        import lightning as L
        from omegaconf import DictConfig

        log = logging.getLogger(__name__)

        def instantiate_callbacks(callbacks_cfg):
            callbacks = []
            for _, cb_conf in callbacks_cfg.items():
                if isinstance(cb_conf, DictConfig) and "_target_" in cb_conf:
                    callbacks.append(hydra.utils.instantiate(cb_conf))
            return callbacks

        def task_wrapper(task_func):
            def wrap(cfg):
                try:
                    metric_dict, object_dict = task_func(cfg=cfg)
                except Exception as ex:
                    log.exception("")
                    raise ex
                finally:
                    log.info(f"Output dir: {cfg.paths.output_dir}")
                return metric_dict, object_dict
            return wrap

        @task_wrapper
        def train(cfg):
            if cfg.get("seed"):
                L.seed_everything(cfg.seed, workers=True)
            datamodule = hydra.utils.instantiate(cfg.data)
            model = hydra.utils.instantiate(cfg.model)
            callbacks = instantiate_callbacks(cfg.get("callbacks"))
            trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=[])
            trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.get("ckpt_path"))
            train_metrics = trainer.callback_metrics
            trainer.test(model=model, datamodule=datamodule, ckpt_path=trainer.checkpoint_callback.best_model_path)
            return {**train_metrics, **trainer.callback_metrics}, {}

        @hydra.main(version_base="1.3", config_path="../configs", config_name="train.yaml")
        def main(cfg):
            train(cfg)

        if __name__ == "__main__":
            main()
        """,
    "src/module.py": """
        import torch
        from lightning import LightningModule
        from torchmetrics import MeanMetric
        from torchmetrics.classification.accuracy import Accuracy

        class MNISTLitModule(LightningModule):
            def __init__(self, net, optimizer, scheduler, compile):
                super().__init__()
                # the template saves all of them; Lightning 2.6 loads no checkpoint with pickled modules any more
                self.save_hyperparameters("compile", logger=False)
                self.net, self.make_optimizer, self.make_scheduler = net, optimizer, scheduler
                self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
                self.val_acc = Accuracy(task="multiclass", num_classes=3)
            def on_train_start(self):
                self.val_loss.reset()
                self.val_acc.reset()
            def training_step(self, batch, batch_idx):
                loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
                self.train_loss(loss)
                self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
                return loss
            def validation_step(self, batch, batch_idx):
                logits = self.net(batch[0])
                self.val_loss(torch.nn.functional.cross_entropy(logits, batch[1]))
                self.val_acc(torch.argmax(logits, dim=1), batch[1])
                self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
                self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)
            def test_step(self, batch, batch_idx):
                self.log("test/loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]), on_epoch=True)
            def configure_optimizers(self):
                optimizer = self.make_optimizer(params=self.trainer.model.parameters())
                scheduler = self.make_scheduler(optimizer=optimizer)
                return {"optimizer": optimizer, "lr_scheduler": {
                    "scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}}
        """,
    "src/data.py": """
        import torch
        from lightning import LightningDataModule
        from torch.utils.data import DataLoader, TensorDataset, random_split

        class MNISTDataModule(LightningDataModule):
            def __init__(self, batch_size=8):
                super().__init__()
                self.save_hyperparameters(logger=False)
            def setup(self, stage=None):
                data = TensorDataset(torch.linspace(0, 1, 40 * 6).view(40, 6), torch.arange(40) % 3)
                generator = torch.Generator().manual_seed(42)
                self.data_train, self.data_val, self.data_test = random_split(data, [24, 8, 8], generator=generator)
            def train_dataloader(self):
                return DataLoader(self.data_train, batch_size=self.hparams.batch_size, shuffle=True)
            def val_dataloader(self):
                return DataLoader(self.data_val, batch_size=self.hparams.batch_size)
            def test_dataloader(self):
                return DataLoader(self.data_test, batch_size=self.hparams.batch_size)
        """,
    "configs/train.yaml": """
        defaults:
          [_self_, data: mnist, model: mnist, callbacks: default, trainer: default, paths: default, hydra: default]
        task_name: train
        ckpt_path: null
        seed: null
        """,
    "configs/data/mnist.yaml": "_target_: data.MNISTDataModule\nbatch_size: 8\n",
    "configs/model/mnist.yaml": """
        _target_: module.MNISTLitModule
        optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.001, weight_decay: 0.0}
        scheduler:
          {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, mode: min, factor: 0.1, patience: 10}
        net: {_target_: torch.nn.Linear, in_features: 6, out_features: 3}
        compile: false
        """,
    "configs/callbacks/default.yaml": """
        model_checkpoint:
          _target_: lightning.pytorch.callbacks.ModelCheckpoint
          dirpath: ${paths.output_dir}/checkpoints
          filename: epoch_{epoch:03d}
          monitor: val/acc
          mode: max
          save_last: true
          auto_insert_metric_name: false
        early_stopping: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/acc, mode: max}
        model_summary: {_target_: lightning.pytorch.callbacks.RichModelSummary, max_depth: -1}
        rich_progress_bar: {_target_: lightning.pytorch.callbacks.RichProgressBar}
        """,
    "configs/trainer/default.yaml": """
        _target_: lightning.pytorch.trainer.Trainer
        default_root_dir: ${paths.output_dir}
        min_epochs: 1
        max_epochs: 2
        accelerator: cpu
        devices: 1
        check_val_every_n_epoch: 1
        deterministic: false
        """,
    "configs/paths/default.yaml": """
        root_dir: ${hydra:runtime.cwd}
        log_dir: ${paths.root_dir}/logs/
        output_dir: ${hydra:runtime.output_dir}
        """,
    "configs/hydra/default.yaml": """
        run: {dir: "${paths.log_dir}/${task_name}/runs/${now:%Y-%m-%d}_${now:%H-%M-%S-%f}"}
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

    status, printed = train("+determinism=record")
    assert status == 0, printed
    assert "recorded 6 steps" in printed
    assert "of trainer.test" in printed
    status, printed = train("+determinism=verify")
    assert status == 0, printed
    assert "match: verified 6 steps" in printed
    status, printed = train("+determinism=verify", "model.optimizer.lr=0.002")
    assert status == 1, printed
    assert "cause      settings" in printed
    assert "optimizer.Adam.lr: 0.001 in the reference, 0.002 now" in printed
