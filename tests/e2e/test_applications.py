"""Applications as others write them: LightningCLI, lightning-hydra-template, transformers,
a loop without a Trainer.

Each is recorded, repeated with the same bits, and a fault of one part in a million is found.
"""

import os
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from checking import Run as RunCommand
from forks import fork_process
from versions import LIGHTNING

from det_callbacks.runs.store import Run

PROJECTS = Path(__file__).with_name("projects")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "projects.md"
ADDED = "# added for det_callbacks"


@pytest.fixture(autouse=True)
def _in_the_projects(run_command: RunCommand) -> None:
    shutil.copytree(PROJECTS, Path.cwd(), dirs_exist_ok=True)


def start(command: str, *, status: int = 0, **variables: str) -> str:
    with Path("printed").open("w+b") as printed:
        words = [sys.executable, *command.split()]
        variables = {**os.environ, "TQDM_DISABLE": "1", **variables}
        ended = fork_process(words, variables=variables, output=printed.fileno())
    text = Path("printed").read_text()
    assert ended == status, text
    return text


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


def test_lightning_cli_builds_it_from_yaml_and_from_arguments():
    Path("callback.yaml").write_text(CALLBACK)
    app = "cli.py fit --config=cli.yaml"
    start(f"{app} --config=callback.yaml")
    recorded = Run.open(Path("refs/run"))
    assert recorded.manifest.selection.modules == ("net", "*")
    # set by the callback: Trainer(deterministic=False) had switched them off
    assert recorded.manifest.environment["settings.deterministic_algorithms"].value == "error"
    app += (
        " --trainer.callbacks+=det_callbacks.DeterminismCallback "
        "--trainer.callbacks.reference=refs/run"
    )
    settings = '--trainer.callbacks.settings={"seed":7,"float32_matmul_precision":"highest"}'
    assert "det_callbacks: match: verified " in start(
        f"{app} {settings} --trainer.callbacks.current=now"
    )
    for wrong in ("mode=on", "sync_every_n_steps=2"):
        assert wrong.partition("=")[0] in start(f"{app} --trainer.callbacks.{wrong}", status=2)


# github.com/ashleve/lightning-hydra-template: its folders, how its train.py goes about it, and what
# its configuration sets, with less of everything
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
        """,  # noqa: E501  # a text
    "src/module.py": """
        import torch
        from lightning import LightningDataModule, LightningModule
        from torch.utils.data import DataLoader, TensorDataset, random_split
        from torchmetrics import MeanMetric

        class MNISTLitModule(LightningModule):
            def __init__(self, net, optimizer):
                super().__init__()
                # the template saves its arguments; Lightning 2.6 loads no checkpoint with pickled modules any more
                self.net, self.make_optimizer = net, optimizer
                self.val_loss = MeanMetric()
            def training_step(self, batch, batch_idx):
                return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            def validation_step(self, batch, batch_idx):
                self.val_loss(self.training_step(batch, batch_idx))
                self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
            def test_step(self, batch, batch_idx):
                self.log("test/loss", self.training_step(batch, batch_idx), on_epoch=True)
            def configure_optimizers(self):
                return self.make_optimizer(params=self.trainer.model.parameters())

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
        """,  # noqa: E501  # a text
    "configs/train.yaml": """
        defaults: [_self_, model: mnist, callbacks: default, trainer: default, hydra: default]
        data: {_target_: module.MNISTDataModule}
        ckpt_path: null
        seed: null
        """,
    "configs/model/mnist.yaml": """
        _target_: module.MNISTLitModule
        optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.001, weight_decay: 0.0}
        net: {_target_: torch.nn.Linear, in_features: 6, out_features: 3}
        """,
    "configs/callbacks/default.yaml": """
        model_checkpoint:
          {_target_: lightning.pytorch.callbacks.ModelCheckpoint, monitor: val/loss, save_last: true}
        early_stopping: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss}
        rich_progress_bar: {_target_: lightning.pytorch.callbacks.RichProgressBar}
        """,  # noqa: E501  # a text
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


@pytest.mark.parametrize(
    "seed", ["determinism.settings.seed=5", pytest.param("seed=5", marks=pytest.mark.slow)]
)
def test_an_untouched_template_records_verifies_and_finds(seed):
    """Seeded by the preset, or by itself."""
    for name, text in TEMPLATE.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(textwrap.dedent(text).lstrip())
    if LIGHTNING < (2, 5, 3):  # its RichProgressBar fails with rich 14.1 and newer
        Path("configs/callbacks/default.yaml").write_text(
            TEMPLATE["configs/callbacks/default.yaml"].replace(".Rich", ".TQDM")
        )
    train = (
        "src/train.py hydra.searchpath=[pkg://det_callbacks.conf] determinism.reference=refs/run "
        f"{seed}"
    )
    text = start(f"{train} +determinism=record")
    assert "recorded 6 steps" in text
    assert "of trainer.test" in text
    assert "match: verified 6 steps" in start(f"{train} +determinism=verify")
    text = start(f"{train} +determinism=verify model.optimizer.lr=0.002", status=1)
    assert "cause      settings" in text
    assert "optimizer.Adam.lr is 0.001 in the reference and 0.002 in the current run" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "cli.py fit --config cli.yaml",
        "transformer.py gpt2",
        "transformer.py vit",
        "resnet.py",
        "two_optimizers.py",
    ],
)
def test_without_a_changed_line(command, run_command, monkeypatch):
    script, *arguments = command.split()
    assert ADDED not in Path(script).read_text()
    if script == "transformer.py":
        pytest.importorskip("transformers", reason="transformers is not installed")
    for words in (("record", "run"), ("verify", "run")):
        done = run_command(*words, script=script, faults=arguments)
        assert done.status == 0, done.text + done.errors
    monkeypatch.setenv("PLANTED", "1")
    done = run_command("verify", "run", script=script, faults=arguments)
    assert done.status == 1, done.text + done.errors
    assert "\nDIVERGED\nStep 2, forward: aten.mul.Tensor " in done.text
    assert "synthetic.py" in done.text


@pytest.mark.slow
def test_what_is_not_deterministic_is_found_and_replayed_and_a_loop_needs_no_trainer():
    start("message_passing.py", MODE="audit", status=1)
    assert "project.scatter_sum.default" in Path("audit/replay.yaml").read_text()
    for mode in ("record", "verify"):
        start("message_passing.py", MODE=mode, RUN="run", REPLAY="audit/replay.yaml")
    text = start(
        "message_passing.py",
        MODE="verify",
        RUN="run",
        REPLAY="audit/replay.yaml",
        PLANTED="1",
        status=1,
    )
    assert "Step 2, forward: aten.mul.Tensor " in text
    start("plain_loop.py first")
    start("plain_loop.py second runs/first")
    text = start("plain_loop.py third runs/first", PLANTED="1", status=1)
    assert "DivergenceError" in text
    assert "Step 2" in text


def test_the_page_counts_the_lines():
    rows: dict[str, Any] = dict(
        re.findall(r"(?m)^\| `([\w.]+)` \|.*\| (\d+) \|$", PAGE.read_text())
    )
    counted = {path.name: path.read_text().count(ADDED) for path in PROJECTS.glob("*.py")}
    del counted["synthetic.py"]
    assert {name: int(number) for name, number in rows.items()} == counted
