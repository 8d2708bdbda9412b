"""Trainings of ``pytorch_lightning``, whose classes are twins of those of ``lightning.pytorch``."""

import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, NotResumableError, ReplicaAuditCallback, compare_runs
from det_callbacks.compare.evidence import read_window
from det_callbacks.errors import UnsupportedVersionError
from det_callbacks.internals import versions
from det_callbacks.internals.lightning import LIGHTNING, checkpoint_connector
from det_callbacks.runs.store import Run as StoredRun

PACKAGES: dict[str, Any] = {
    name: import_module(name) for name in ("lightning.pytorch", "pytorch_lightning")
}
twin = PACKAGES["pytorch_lightning"]

pytestmark = [
    LIGHTNING_ADVICE,
    pytest.mark.filterwarnings("ignore::pytorch_lightning.utilities.warnings.PossibleUserWarning"),
]


def model_of(package: Any) -> Any:
    class Model(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            inputs, targets = batch
            loss = nn.functional.mse_loss(self.net(inputs), targets)
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return Model()


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    samples = TensorDataset(
        torch.rand(32, 8, generator=generator), torch.rand(32, 1, generator=generator)
    )
    return DataLoader(samples, batch_size=8, shuffle=True)


def trainer_of(package: Any, *callbacks: Any, **options: Any) -> Any:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return package.Trainer(
        **{"max_epochs": 1, "accelerator": "cpu", **quiet, **options}, callbacks=[*callbacks]
    )


def fit(package: Any, *callbacks: Any, **options: Any) -> Any:
    checkpoint = options.pop("ckpt_path", None)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    trainer = trainer_of(package, *callbacks, **options)
    trainer.fit(model_of(package), data(), ckpt_path=checkpoint)
    return trainer


def test_a_script_is_recorded_verified_and_checked_as_it_is(run_command):
    done = run_command("record", "run", faults=["twin"])
    assert (done.status, done.errors) == (0, "")
    facts = StoredRun.open(Path("run")).manifest.environment
    assert (facts["pytorch_lightning.version"].value, "lightning.version" in facts) == (
        twin.__version__,
        False,
    )
    assert run_command("verify", "run", faults=["twin"]).status == 0
    done = run_command("verify", "run", "--current", "other", faults=["twin", "planted"])
    assert (done.status, "\nDIVERGED\nStep 1" in done.text) == (1, True)
    assert run_command("check", "--level", "state", faults=["twin"]).status == 0
    done = run_command(
        "check", "--level", "state", "--vary", "workers", faults=["twin", "augmentation"]
    )
    assert (done.status, "its results depend on workers" in done.last) == (1, True)


def test_what_one_package_recorded_the_other_repeats(tmp_path):
    """In one process, under either one's Trainer, in either order."""
    lightning, other = PACKAGES.values()
    runs = [tmp_path / name for name in ("lightning", "twin")]
    for package, run, second in ((lightning, runs[0], other), (other, runs[1], lightning)):
        fit(package, DeterminismCallback(run, mode="record"))
        callback = DeterminismCallback(run, current=tmp_path / f"{run.name}-verified")
        fit(second, callback)
        assert (callback.verdict.verdict, callback.verdict.counts.steps_compared) == ("match", 4)
    verdict = compare_runs(*runs)
    names = {one.name for one in verdict.environment}
    assert (verdict.verdict, names) == ("match", {"lightning.version", "pytorch_lightning.version"})
    assert [StoredRun.open(run).rank(0).num_steps for run in runs] == [4, 4]


def test_fits_of_both_packages_are_one_run(run_command):
    """As ``det-callbacks record`` has it: one callback in each Trainer of the process."""
    Path("both.py").write_text(
        "import sys\n"
        f"sys.path.append({str(Path(__file__).parent)!r})\n"
        "from test_pytorch_lightning import PACKAGES, fit\n"
        "for package in PACKAGES.values():\n    fit(package)\n"
    )
    assert run_command("record", "run", script="both.py").status == 0
    assert StoredRun.open(Path("run")).rank(0).segments == [0, 1]
    assert run_command("verify", "run", script="both.py").status == 0


def test_max_steps_and_what_cannot_be_resumed_are_seen_in_its_loops(tmp_path):
    """Lightning would train a batch too many where an epoch's end met ``max_steps``."""
    checkpoint = tmp_path / "end.ckpt"
    fit(twin, DeterminismCallback(tmp_path / "run", mode="record"), max_epochs=2)
    trainer = fit(
        twin, DeterminismCallback(tmp_path / "part", mode="record"), max_epochs=-1, max_steps=4
    )
    trainer.save_checkpoint(checkpoint)
    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    fit(twin, callback, max_epochs=2, ckpt_path=checkpoint)
    assert (callback.verdict.verdict, callback.verdict.coverage.steps) == ("match", (4, 7))

    schedule = twin.callbacks.GradientAccumulationScheduler({0: 2})
    trainer = fit(twin, DeterminismCallback(tmp_path / "other", mode="record"), schedule)
    trainer.save_checkpoint(tmp_path / "no.ckpt")
    with pytest.raises(NotResumableError, match="GradientAccumulationScheduler is not supported"):
        fit(
            twin,
            DeterminismCallback(tmp_path / "other"),
            max_epochs=2,
            ckpt_path=tmp_path / "no.ckpt",
        )


def test_its_callbacks_bars_and_loggers_are_known(tmp_path, capsys):
    """Only hooks that a callback has of its own are listed; bars, which draw nothing,
    are left out.
    """

    class Drawing(twin.Callback):
        def on_train_start(self, *_: Any) -> None:
            torch.rand(1)

    callback = DeterminismCallback(tmp_path / "run", mode="record")
    words: list[str] = []

    class Bar(twin.callbacks.TQDMProgressBar):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            words.append(trainer.progress_bar_metrics.get("determinism", ""))
            super().on_train_batch_end(trainer, *rest)

    options = {
        "enable_progress_bar": True,
        "logger": twin.loggers.TensorBoardLogger(tmp_path / "logs"),
    }
    fit(twin, callback, Drawing(), Bar(), **options)
    assert any(words)
    window = read_window(StoredRun.open(tmp_path / "run"), 0, 0, 0)
    found = {hook: text.rpartition(".")[2] for hook, text in window.hooks.items()}
    assert found == {("on_train_start", "after"): "Drawing"}


def test_ours_are_callbacks_of_both_packages_whichever_came_first():
    for callback in (DeterminismCallback(None, mode="disabled"), ReplicaAuditCallback(10)):
        for package in PACKAGES.values():
            assert isinstance(callback, package.Callback)
            assert issubclass(type(callback), package.Callback), "as LightningCLI asks"
            assert (
                callback
                in package.Trainer(callbacks=callback, accelerator="cpu", logger=False).callbacks
            )


@pytest.mark.ddp
def test_ranks_start_alike_and_their_replicas_are_compared(tmp_path):
    def body(rank: int) -> None:
        torch.manual_seed(rank)  # DDP takes rank 0's weights
        callback = DeterminismCallback(
            tmp_path / "run", mode="record", audit_replicas_every_n_steps=1
        )
        trainer = trainer_of(twin, callback, strategy="ddp", devices=2)
        trainer.fit(model_of(twin), DataLoader(data().dataset, batch_size=4))
        assert callback.replica_report.equal

    ended = run_ranks(body, tmp_path, status=0)
    assert "replicas agree: " in ended[0].output
    assert StoredRun.open(tmp_path / "run").ranks == [0, 1]


def test_versions_and_what_is_missing_are_those_of_the_package_that_trains(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setitem(versions.TESTED, "lightning", ("2.5", "2.4"))
    fit(twin, DeterminismCallback(tmp_path / "run", mode="record", level="state"))
    assert (
        f"det_callbacks: pytorch_lightning {twin.__version__} is newer than any"
        in capsys.readouterr().out
    )
    trainer = trainer_of(twin)
    monkeypatch.setattr(LIGHTNING, "missing", [])
    monkeypatch.delattr(trainer, "_checkpoint_connector")
    with pytest.raises(
        UnsupportedVersionError,
        match=f"^Not supported: pytorch_lightning {twin.__version__} has no",
    ):
        checkpoint_connector(trainer)
