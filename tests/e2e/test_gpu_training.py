"""A training on a GPU: level op waits for nothing inside a step and takes
little memory; a run repeats.

Also a program, which records or verifies a fit under the default settings:
MODE PATH STRATEGY [FAULT_AT].
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from late_device import forbid_waiting
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, has_same_weights, quiet_trainer

from det_callbacks import (
    DeterminismCallback,
    DeterminismSettings,
    DivergenceError,
    DivergenceWarning,
    enforce_determinism,
)
from det_callbacks.runs.store import Run

pytestmark = [LIGHTNING_ADVICE, pytest.mark.gpu]

MIB = 1024 * 1024

STRATEGIES: dict[str, tuple[Callable[[], Any], str]] = {
    "auto": (lambda: "auto", "bf16-mixed"),
    "ddp": (DDPStrategy, "bf16-mixed"),
    "fsdp2": (
        lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
        "32-true",
    ),
}
"""Name -> strategy and precision; of one process, so that on one GPU NCCL is what runs."""


class ImageModel(LightningModule):
    """Classifies images of 3 x 32 x 32, of which 64 patches are taken; a step may be faulty."""

    def __init__(self, width: int = 64, *, fault_at: int | None = None) -> None:
        super().__init__()
        self.fault_at = fault_at
        self.patches = nn.Sequential(
            nn.Conv2d(3, width, 4, 4), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, width, **options) for _ in range(2))
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.patches(images).flatten(2).transpose(1, 2))
        if self.global_step == self.fault_at:
            x = x * 1.5
        return self.head(x.mean(1))

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for part in (*self.blocks, self.head, self):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(
    model: LightningModule, *callbacks: Callback, batch_size: int = 16, strategy: str = "auto"
) -> pl.Trainer:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4 * batch_size, 3, 32, 32, generator=generator)
    classes = torch.randint(10, (4 * batch_size,), generator=generator)
    made, precision = STRATEGIES[strategy]
    trainer = quiet_trainer(
        *callbacks, accelerator="gpu", devices=1, precision=precision, strategy=made()
    )
    trainer.fit(model, DataLoader(TensorDataset(images, classes), batch_size=batch_size))
    return trainer


@contextmanager
def without_waits(*callbacks: Callback) -> Iterator[list[Callback]]:
    off = LambdaCallback(on_train_batch_end=lambda *_: forbid_waiting(False))
    on = LambdaCallback(on_train_batch_start=lambda *given: forbid_waiting(given[-1] > 0))
    try:
        yield [off, *callbacks, on]
    finally:
        forbid_waiting(False)


def fit_without_waits(model: LightningModule, *callbacks: Callback) -> None:
    with without_waits(*callbacks) as watched:
        fit(model, *watched)


def peak_of_fit(*callbacks: Callback, width: int, batch_size: int) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fit(ImageModel(width), *callbacks, batch_size=batch_size)
    return torch.cuda.max_memory_allocated() - before


def run(folder: Path, *arguments: object, status: int = 0) -> str:
    variables = {
        name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"
    }
    path = os.pathsep.join(str(folder) for folder in Path(__file__).parents[1:3])
    words, variables["PYTHONPATH"] = [sys.executable, __file__, *map(str, arguments)], path
    done = subprocess.run(
        words, cwd=folder, env=variables, timeout=280, capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_nothing_waits_for_the_device_inside_a_step_unnoticed(tmp_path):
    fit_without_waits(ImageModel())
    fit_without_waits(
        ImageModel(), DeterminismCallback(tmp_path / "run", mode="record", level="op")
    )
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        fit_without_waits(
            ImageModel(),
            LambdaCallback(on_before_backward=lambda trainer, module, loss: loss.item()),
        )


def test_recording_takes_little_of_the_devices_memory(tmp_path):
    # 16 MiB for each activation in bfloat16, hundreds of MiB in all
    sizes = {"width": 256, "batch_size": 512}
    peak_of_fit(**sizes)  # workspaces that the libraries keep
    plain = peak_of_fit(**sizes)
    recorded = peak_of_fit(
        DeterminismCallback(tmp_path / "run", mode="record", level="op"), **sizes
    )
    assert plain > 256 * MIB, "a training of which a copy would be noticed"
    assert recorded - plain <= 128 * MIB, (
        f"{(recorded - plain) / MIB:.0f} MiB more than {plain / MIB:.0f} MiB"
    )


@pytest.mark.parametrize(
    ("strategy", "namespace"), [("auto", "aten"), ("ddp", "c10d"), ("fsdp2", "fsdp")]
)
def test_a_recording_under_the_default_settings_matches(tmp_path, strategy, namespace):
    """With DDP and FSDP2 also collectives and gathered weights on streams of their own."""
    for mode, said in (("record", "record"), ("verify", "match")):
        assert run(tmp_path, mode, tmp_path / "run", strategy).splitlines()[-1] == said
    sites = Run.open(tmp_path / "run").view(0, 0, 1).program.sites
    assert namespace in {site.op.partition(".")[0] for site in sites}
    assert "Step 2, forward" in run(tmp_path, "verify", tmp_path / "run", strategy, 2, status=1)


# ops of a GPU that are not deterministic: found by an audit, put back by replay

WIDTH = 64
LENGTH = 2048
INDEX_ADD = "aten.index_add_.default"
ATTENTION = "aten._scaled_dot_product_efficient_attention_backward.default"


class Scattered(LightningModule):
    """Long sequences and few heads, so that the attention's backward pass splits the keys;
    and colliding indices.
    """

    configure_optimizers = ImageModel.configure_optimizers

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        inputs, places = batch
        query, key, value = (part.unsqueeze(1) for part in self.qkv(inputs).chunk(3, dim=2))
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            attended = scaled_dot_product_attention(query, key, value).flatten(0, 2)
        pooled = torch.zeros(8, WIDTH, device=inputs.device).index_add_(
            0, places.flatten(), attended
        )
        return self.head(pooled).square().mean()


def fit_scattered(*callbacks: Callback) -> Scattered:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(8, LENGTH, WIDTH, generator=generator),
        torch.randint(8, (8, LENGTH), generator=generator),
    )
    torch.manual_seed(0)
    model = Scattered()
    quiet_trainer(*callbacks, accelerator="gpu", devices=1).fit(
        model, DataLoader(data, batch_size=2)
    )
    return model


def test_what_the_audit_names_is_replayed_without_a_wait(tmp_path):
    audit = DeterminismCallback(
        None, current=tmp_path / "audit", mode="audit", on_divergence="warn"
    )
    with pytest.warns(DivergenceWarning):
        fit_scattered(audit)
    replay = tmp_path / "audit" / "replay.yaml"
    for op in (INDEX_ADD, ATTENTION):
        assert op in replay.read_text()

    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    recording = DeterminismCallback(tmp_path / "run", mode="record", replay=str(replay))
    with without_waits(recording) as first, without_waits(callback) as second:
        recorded, verified = fit_scattered(*first), fit_scattered(*second)
    assert callback.verdict.verdict == "match"
    assert callback.verdict.counts.sites_differing == 0
    replayed = callback.verdict.coverage.replayed
    assert {replayed[op]["count"] for op in (INDEX_ADD, ATTENTION)} >= {4}
    assert sum(entry["differing"] for entry in replayed.values()), "other bits were there"
    assert has_same_weights(recorded, verified)

    fit_scattered(DeterminismCallback(tmp_path / "unreplayed", mode="record"))
    with pytest.raises(DivergenceError):
        fit_scattered(DeterminismCallback(tmp_path / "unreplayed", current=tmp_path / "other"))


def main(mode: str, path: str, strategy: str, fault_at: str | None = None) -> int:
    settings = DeterminismSettings(seed=0)
    enforce_determinism(settings)
    callback = DeterminismCallback(path, mode=mode, settings=settings)
    try:
        fit(
            ImageModel(fault_at=None if fault_at is None else int(fault_at)),
            callback,
            strategy=strategy,
        )
    except DivergenceError as error:
        print(error)
        return error.exit_code
    print(mode if callback.verdict is None else callback.verdict.verdict)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
