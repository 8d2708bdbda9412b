"""Ops of a GPU that are not deterministic: refused or let through by name, found by an audit, put back by replay."""

from pathlib import Path

import pytest
import torch
from gpu_fits import within_steps
from late_device import forbid_waiting
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, has_same_weights, quiet_trainer

from det_callbacks import DeterminismCallback, DivergenceError, DivergenceWarning

pytestmark = [
    LIGHTNING_ADVICE,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 64
LENGTH = 2048
INDEX_ADD = "aten.index_add_.default"
ATTENTION = "aten._scaled_dot_product_efficient_attention_backward.default"


class Scattered(LightningModule):
    """Long sequences and few heads, so that the attention's backward pass splits the keys; and colliding indices."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        inputs, places = batch
        query, key, value = (part.unsqueeze(1) for part in self.qkv(inputs).chunk(3, dim=2))
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            attended = scaled_dot_product_attention(query, key, value).flatten(0, 2)
        pooled = torch.zeros(8, WIDTH, device=inputs.device).index_add_(0, places.flatten(), attended)
        return self.head(pooled).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(*callbacks: Callback) -> Scattered:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(8, LENGTH, WIDTH, generator=generator), torch.randint(8, (8, LENGTH), generator=generator)
    )
    torch.manual_seed(0)
    model = Scattered()
    quiet_trainer(*callbacks, accelerator="gpu", devices=1).fit(model, DataLoader(data, batch_size=2))
    return model


def watched(callback: DeterminismCallback) -> Scattered:
    try:
        # in step 0 the digests' kernels are compiled, and tried on the device before they are taken
        return fit(*within_steps(forbid_waiting, callback, first_step=1))
    finally:
        forbid_waiting(False)


def test_what_the_audit_names_is_replayed_without_a_wait(tmp_path: Path) -> None:
    audit = DeterminismCallback(None, current=tmp_path / "audit", mode="audit", on_divergence="warn")
    with pytest.warns(DivergenceWarning):
        fit(audit)
    replay = tmp_path / "audit" / "replay.yaml"
    for op in (INDEX_ADD, ATTENTION):
        assert op in replay.read_text()

    recorded = watched(DeterminismCallback(tmp_path / "run", mode="record", replay=str(replay)))
    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    verified = watched(callback)
    assert callback.verdict.verdict == "match"
    assert callback.verdict.counts.sites_differing == 0
    replayed = callback.verdict.coverage.replayed
    assert {replayed[op]["count"] for op in (INDEX_ADD, ATTENTION)} >= {4}
    assert sum(entry["differing"] for entry in replayed.values()), "other bits were there"
    assert has_same_weights(recorded, verified)


def test_without_replay_they_diverge(tmp_path: Path) -> None:
    fit(DeterminismCallback(tmp_path / "run", mode="record"))
    with pytest.raises(DivergenceError):
        fit(DeterminismCallback(tmp_path / "run", current=tmp_path / "current"))
