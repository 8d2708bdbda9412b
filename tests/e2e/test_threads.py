"""Another number of threads: a machine fact that excuses other bits, and only those."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback, NotComparableError, enforce_determinism
from det_callbacks.verdict import Verdict


class Mean(LightningModule):
    """Its loss is a mean over all elements, which torch splits among threads from 32,768 elements on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        return (batch[0] * self.scale).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def fit(path: Path, mode: str, width: int, num_threads: int) -> Verdict | None:
    with enforce_determinism({"seed": 0, "num_threads": num_threads}):
        callback = DeterminismCallback(path / "reference", mode=mode, current=path / "current")
        quiet_trainer(callback).fit(Mean(width), DataLoader(TensorDataset(torch.randn(4, width)), batch_size=2))
    return callback.verdict


def test_other_bits_under_another_thread_count_are_not_comparable(tmp_path: Path) -> None:
    fit(tmp_path, "record", 500_000, 2)
    with pytest.raises(NotComparableError, match=r"torch\.num_threads: 2 in the reference, 1 now") as caught:
        fit(tmp_path, "verify", 500_000, 1)
    assert caught.value.exit_code == 3
    verdict = caught.value.verdict
    assert verdict is not None
    assert verdict.verdict == "not_comparable"
    assert [(entry.name, entry.reference, entry.current) for entry in verdict.environment] == [
        ("torch.num_threads", 2, 1)
    ]
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.op == "aten.sum.default"
    assert verdict.first_divergence.is_origin


def test_equal_bits_under_another_thread_count_are_a_match_that_says_so(tmp_path: Path) -> None:
    fit(tmp_path, "record", 64, 2)
    verdict = fit(tmp_path, "verify", 64, 1)
    assert verdict is not None
    assert verdict.verdict == "match"
    assert [entry.name for entry in verdict.environment] == ["torch.num_threads"]
