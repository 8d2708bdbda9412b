"""Digests beside the checkpoints of real Trainers: every way of saving, removing and loading one."""

import io
import json
import os
import random
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from fits import Fit, Plain, RaiseAt, Steady, StopError
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DeterminismCallback,
    check_checkpoint,
)
from det_callbacks.checkpoint import SaveContext, Sidecar

# what Lightning says of resuming without the callbacks that saved, into a folder that is there
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
    LIGHTNING_ADVICE,
    pytest.mark.filterwarnings(r"ignore:`\.fit\(ckpt_path=None\)` was called without a model"),
]


def ours(folder: Path, **options: Any) -> DeterminismCallback:
    return DeterminismCallback(folder / "run", mode="record", level="state", overwrite=True, **options)


def fit(folder: Path, *callbacks: pl.Callback, **options: Any) -> Fit:
    return Fit(ours(folder), *callbacks, enable_checkpointing=True, default_root_dir=folder, **options)


def every(folder: Path, steps: int = 1, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "checkpoints", **{"every_n_train_steps": steps, **options})


def assert_all_agree(folder: Path, num_checkpoints: int) -> None:
    """Every checkpoint is what was saved, and nothing without one is left."""
    found = {path.name for path in folder.iterdir()}
    checkpoints = {name for name in found if name.endswith(".ckpt")}
    assert len(checkpoints) == num_checkpoints, found
    assert found == checkpoints | {f"{name}.digests.json" for name in checkpoints}
    assert all(check_checkpoint(folder / name).equal for name in checkpoints)


# saving


@pytest.mark.parametrize("save_last", [True, "link"])
def test_deletion_of_all_but_the_best_leaves_nothing(save_last: Any, tmp_path: Path) -> None:
    keeping = every(tmp_path, monitor="step", mode="max", save_top_k=2, save_last=save_last)
    fit(tmp_path, keeping, max_epochs=2).run()
    assert_all_agree(tmp_path / "checkpoints", 3)
    last = check_checkpoint(keeping.last_model_path).sidecar
    assert last is not None
    assert (last.context.step, last.context.epoch) == (7, 1)
    assert "_link_checkpoint" not in vars(keeping)


@pytest.mark.parametrize("save_last", [True, "link"])
def test_an_asynchronous_io_writes_what_was_true_at_the_save(save_last: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()  # otherwise Lightning's link may be earlier than the folder
    keeping = every(tmp_path, save_top_k=-1, save_last=save_last)
    fit(tmp_path, keeping, plugins=[AsyncCheckpointIO()]).run()
    assert_all_agree(tmp_path / "checkpoints", 5)
    steps = []
    for path in sorted((tmp_path / "checkpoints").glob("epoch*.ckpt")):
        sidecar = check_checkpoint(path).sidecar
        assert sidecar is not None
        steps.append((path.name, sidecar.context.step))
    assert steps == [(f"epoch=0-step={number + 1}.ckpt", number) for number in range(4)]


def test_saved_by_hand_during_and_after_a_fit_and_in_other_stages(tmp_path: Path) -> None:
    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "c" / "during.ckpt")

    done = fit(tmp_path, Saving(), max_epochs=1).run()
    done.trainer.save_checkpoint(tmp_path / "c" / "after.ckpt")
    done.trainer.save_checkpoint(tmp_path / "c" / "weights.ckpt", weights_only=True)
    done.model.test_step = lambda *_: None
    done.trainer.test(done.model, done.loader, verbose=False)
    done.trainer.save_checkpoint(tmp_path / "c" / "tested.ckpt")
    assert_all_agree(tmp_path / "c", 4)
    weights = check_checkpoint(tmp_path / "c" / "weights.ckpt")
    assert "optimizer_states" not in weights.sections
    sidecar = json.loads((tmp_path / "c" / "during.ckpt.digests.json").read_text())
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert sidecar["run"] == {"id": run["run_id"], "mode": "record", "reference": str(tmp_path / "run")}
    assert sidecar["environment"] == run["environment"]
    assert sidecar["entries"]["optimizer_states"]["0/state/0/exp_avg"]["parameter"] == "first.weight"
    stream = next((tmp_path / "run").rglob("*.arrows"))
    assert stream.stat().st_size > 0
    assert all(re.fullmatch("[0-9a-f]{16}", sidecar[name]) for name in ("chain", "program"))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["model", "exception"])
def test_a_checkpoint_of_an_exception_has_digests(kind: str, asynchronous: bool, tmp_path: Path) -> None:
    saving: pl.Callback = OnExceptionCheckpoint(tmp_path / "checkpoints")
    if kind == "model":
        saving = every(tmp_path, 100, save_on_exception=True)
    options = {"plugins": [AsyncCheckpointIO()]} if asynchronous else {}
    stopping = fit(tmp_path, saving, RaiseAt("on_train_batch_start", StopError("stop")), **options)
    with pytest.raises(StopError):
        stopping.run()
    assert_all_agree(tmp_path / "checkpoints", 1)
    (path,) = (tmp_path / "checkpoints").glob("*.ckpt")
    sidecar = check_checkpoint(path).sidecar
    assert sidecar is not None
    assert sidecar.context.step == 1
    if kind == "exception":  # its teardown, after ours, takes the checkpoint away
        fit(tmp_path, OnExceptionCheckpoint(tmp_path / "checkpoints")).run(ckpt_path=str(path))
        assert os.listdir(tmp_path / "checkpoints") == []


def test_a_remote_folder(tmp_path: Path) -> None:
    keeping = ModelCheckpoint("memory://remote", monitor="step", mode="max", save_top_k=1, every_n_train_steps=1)
    store = fsspec.filesystem("memory")
    try:
        done = fit(tmp_path, keeping).run()
        assert sorted(path.rpartition("/")[2] for path in store.find("/remote")) == [
            "epoch=0-step=4.ckpt",
            "epoch=0-step=4.ckpt.digests.json",
        ]
        path = keeping.best_model_path
        assert check_checkpoint(path).equal
        Fit(ours(tmp_path, require_digests=True), max_epochs=2).run(ckpt_path=path)
        damage(path, lambda checkpoint: checkpoint["state_dict"]["last.bias"].add_(1))
        with pytest.raises(CheckpointMismatchError, match=r"state_dict: last\.bias differs"):
            Fit(ours(tmp_path), max_epochs=2).run(ckpt_path=path)
        done.trainer.strategy.remove_checkpoint(path)
        assert store.find("/remote") == []
    finally:
        store.rm("/remote", recursive=True)


class Custom(TorchCheckpointIO):
    """Writes as the plain one does, in its own code."""


class Late(TorchCheckpointIO):
    """Returns before it has written anything, and is no wrapper."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.go = threading.Event()

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)

        def write() -> None:
            self.go.wait(60)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(buffer.getvalue())

        self.threads.append(threading.Thread(target=write))
        self.threads[-1].start()

    def teardown(self) -> None:
        self.go.set()
        for thread in self.threads:
            thread.join()


@pytest.mark.parametrize("plugin", [Custom, Late])
def test_what_another_io_writes_is_read_back(plugin: Callable[[], Any], tmp_path: Path) -> None:
    fit(tmp_path, every(tmp_path, save_top_k=-1), plugins=[plugin()]).run()
    assert_all_agree(tmp_path / "checkpoints", 4)


def test_an_io_that_writes_nothing_is_said_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Nothing(TorchCheckpointIO):
        def save_checkpoint(self, *_: Any, **__: Any) -> None:
            pass

    fit(tmp_path, every(tmp_path, 4), plugins=[Nothing()]).run()
    assert "has not written" in capsys.readouterr().out


def test_nothing_else_changes(tmp_path: Path) -> None:
    """The same bytes are saved, the same generator states and weights are there, with and without."""
    ends = []
    for name in ("with", "without"):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        callbacks = [ours(tmp_path)] if name == "with" else []
        keeping = every(tmp_path, save_top_k=-1, save_last="link")
        done = Fit(*callbacks, keeping, enable_checkpointing=True, default_root_dir=tmp_path).run()
        saved = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").glob("*.ckpt")}
        generators = (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())
        ends.append((saved, {key: value.clone() for key, value in done.model.state_dict().items()}, generators))
    assert ends[0][0] == ends[1][0]
    assert len(ends[0][0]) == 5
    assert all(torch.equal(value, ends[1][1][key]) for key, value in ends[0][1].items())
    assert ends[0][2] == ends[1][2]


def test_a_trainer_without_it_loads_the_checkpoint(tmp_path: Path) -> None:
    said = []
    for name in ("with", "without"):
        folder = tmp_path / name / "checkpoints"
        callbacks = [ours(tmp_path)] if name == "with" else []
        saving = Fit(*callbacks, every(folder.parent, 4, save_last=True), enable_checkpointing=True)
        saving.run()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plain = Fit(every(folder.parent, 100, save_last=True), enable_checkpointing=True, max_epochs=2)
            plain.run(ckpt_path="last")
        assert plain.trainer.global_step == 8
        assert plain.trainer.ckpt_path == str(folder / "last.ckpt")
        said.append([str(warning.message).replace(str(tmp_path / name), "") for warning in caught])
    assert said[0] == said[1]


# loading


@pytest.fixture
def saved(tmp_path: Path) -> str:
    keeping = every(tmp_path, 4)
    fit(tmp_path, keeping).run()
    return keeping.best_model_path


def damage(path: str, change: Callable[[Any], object]) -> None:
    with fsspec.open(path, "rb") as file:
        checkpoint = torch.load(file, weights_only=True)
    change(checkpoint)
    with fsspec.open(path, "wb") as file:
        torch.save(checkpoint, file)


def exchange(checkpoint: Any) -> None:
    state = checkpoint["state_dict"]
    state["norm.weight"], state["first.bias"] = state["first.bias"], state["norm.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one["state_dict"]["last.weight"][0].add_(1), r"state_dict: last\.weight differs"),
        (exchange, r"state_dict: (norm\.weight and first\.bias|first\.bias and norm\.weight) are exchanged"),
        (lambda one: one["state_dict"].pop("last.bias"), r"state_dict: last\.bias is missing"),
        (lambda one: one["state_dict"].update(more=torch.ones(1)), "state_dict: more was not saved, and is there"),
        (
            lambda one: one.pop("optimizer_states"),
            r"optimizer_states: 0/state/0/step \(step of first\.weight\) is miss",
        ),
        (lambda one: one["optimizer_states"][0]["param_groups"][0].update(lr=0.5), "0/param_groups/0/lr differs"),
        (lambda one: one.update(global_step=5), "global_step differs"),
        (lambda one: None, "The file's bytes differ, and yet"),
    ],
)
def test_a_changed_checkpoint_is_refused_before_a_step(change: Any, message: str, saved: str, tmp_path: Path) -> None:
    original = Path(saved).read_bytes()
    damage(saved, change)
    if Path(saved).read_bytes() == original:  # saved by torch again, and the same: change what no entry holds
        Path(saved).write_bytes(original + b"\0")
    resumed = Fit(ours(tmp_path), max_epochs=2)
    with pytest.raises(CheckpointMismatchError, match=message) as caught:
        resumed.run(ckpt_path=saved)
    assert (caught.value.exit_code, caught.value.path) == (1, saved)
    assert resumed.trainer.global_step == 0
    assert not check_checkpoint(saved).equal


def test_the_sidecar_of_another_checkpoint_is_refused(saved: str, tmp_path: Path) -> None:
    other = fit(tmp_path, every(tmp_path, 3)).run().trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    shutil.copy(f"{other}.digests.json", f"{saved}.digests.json")
    with pytest.raises(CheckpointMismatchError, match="those of another checkpoint"):
        Fit(ours(tmp_path), max_epochs=2).run(ckpt_path=saved)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_refuse_it_as_well(stage: str, saved: str, tmp_path: Path) -> None:
    model = Plain()
    model.validation_step = model.test_step = model.predict_step = lambda *_: None
    damage(saved, lambda one: one["state_dict"]["last.bias"].zero_())
    trainer = quiet_trainer(ours(tmp_path))
    with pytest.raises(CheckpointMismatchError, match=r"last\.bias"):
        getattr(trainer, stage)(model, Fit().loader, ckpt_path=saved)


def test_truncated_files_are_errors(saved: str, tmp_path: Path) -> None:
    content, sidecar = Path(saved).read_bytes(), Path(f"{saved}.digests.json")
    Path(saved).write_bytes(content[:5000])
    with pytest.raises(CheckpointFormatError, match=r"it has 5,000 bytes, and [\d,]+ were saved, so it is truncated"):
        Fit(ours(tmp_path), max_epochs=2).run(ckpt_path=saved)
    Path(saved).write_bytes(content)
    sidecar.write_bytes(sidecar.read_bytes()[:-100])
    with pytest.raises(CheckpointFormatError, match=r"digests\.json is damaged"):
        Fit(ours(tmp_path), max_epochs=2).run(ckpt_path=saved)


def test_a_missing_sidecar_is_said_and_an_error_where_one_is_required(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(f"{saved}.digests.json").unlink()
    Fit(ours(tmp_path), max_epochs=2).run(ckpt_path=saved)
    assert capsys.readouterr().out.count("was loaded unchecked") == 1
    with pytest.raises(CheckpointNotFoundError, match="nothing to compare"):
        Fit(ours(tmp_path, require_digests=True), max_epochs=2).run(ckpt_path=saved)


class Opaque:
    """What weights_only refuses."""


def test_a_users_weights_only_false_is_respected(tmp_path: Path) -> None:
    class Holding(Plain):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["thing"] = Opaque()

    keeping = every(tmp_path, 4)
    fit(tmp_path, keeping, model=Holding).run()
    report = check_checkpoint(keeping.best_model_path)
    assert (report.equal, report.is_opened) == (True, False)
    Fit(ours(tmp_path), model=Holding, max_epochs=2).run(ckpt_path=keeping.best_model_path, weights_only=False)
    with pytest.raises(Exception, match="Weights only load failed"):
        Fit(ours(tmp_path), model=Holding, max_epochs=2).run(ckpt_path=keeping.best_model_path)
    content = bytearray(Path(keeping.best_model_path).read_bytes())
    content[len(content) // 2] ^= 1
    Path(keeping.best_model_path).write_bytes(content)
    with pytest.raises(CheckpointFormatError):
        check_checkpoint(keeping.best_model_path)
    with pytest.raises(CheckpointFormatError):  # not even the user's choice unpickles what was not saved
        Fit(ours(tmp_path), model=Holding, max_epochs=2).run(ckpt_path=keeping.best_model_path, weights_only=False)


# what is kept beside a checkpoint


class Source:
    """Stands for what captures a training's state."""

    def context(self) -> SaveContext:
        return SaveContext(attachments={"rank-00000.safetensors": b"state"})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_attachments_are_kept_amended_and_handed_over(asynchronous: bool, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    callback = ours(tmp_path)
    watch = callback._checkpoints
    watch._source = Source()

    class Amending(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if watch.last_path is not None:
                watch.amend(watch.last_path, "late", b"more")

    options = {"plugins": [AsyncCheckpointIO()]} if asynchronous else {}
    # a callback that is no Checkpoint stands before it, so that it amends the save of the batch before
    keeping = every(tmp_path, 3, save_last="link", save_top_k=1)
    Fit(callback, Amending(), keeping, enable_checkpointing=True, default_root_dir=tmp_path, **options).run()
    resumed = ours(tmp_path)
    loaded: list[tuple[str, Sidecar | None, Any]] = []
    resumed._checkpoints.on_loaded = lambda path, sidecar, contents: loaded.append((path, sidecar, dict(contents)))
    Fit(resumed, max_epochs=2).run(ckpt_path=keeping.last_model_path)
    ((path, sidecar, contents),) = loaded
    assert path == keeping.last_model_path
    assert sidecar is not None
    assert contents == {"rank-00000.safetensors": b"state", "late": b"more"}
    (folder,) = (tmp_path / "checkpoints").glob("*.resume")
    assert len(list(folder.iterdir())) == 2
    next(folder.glob("late.*")).write_bytes(b"morE")
    with pytest.raises(CheckpointMismatchError, match="resume: late differs"):
        Fit(resumed, max_epochs=2).run(ckpt_path=keeping.last_model_path)


# strategies that write folders


@pytest.mark.ddp
@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_a_sharded_strategy(tmp_path: Path) -> None:
    def make() -> Fit:
        class Sharded(Steady):
            def configure_model(self) -> None:
                torch.distributed.fsdp.fully_shard(self, mesh=self.device_mesh["data_parallel"])

        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1, process_group_backend="gloo")
        return Fit(
            ours(tmp_path),
            every(tmp_path, 4),
            model=Sharded,
            enable_checkpointing=True,
            default_root_dir=tmp_path,
            strategy=strategy,
            devices=1,
            max_epochs=1,
        )

    variables = dict(os.environ)
    try:
        make().run()
        (path,) = (tmp_path / "checkpoints").glob("*.ckpt")
        assert path.is_dir()
        report = check_checkpoint(path)
        assert report.equal
        assert report.num_tensors > 20
        resumed = make()
        resumed.trainer.fit_loop.max_epochs = 2
        resumed.run(ckpt_path=str(path))
        shard = next(path.glob("__0_*.distcp"))
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        with pytest.raises(CheckpointMismatchError, match=rf"files: {shard.name} differs"):
            make().run(ckpt_path=str(path))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(variables)
