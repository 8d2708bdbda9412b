"""The public demonstration's two ops on a GPU: one that raises, one that has another algorithm."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, DeterminismSettings, enforce_determinism
from det_callbacks.errors import NondeterministicOpError
from det_callbacks.runs.store import Run

pytestmark = [
    LIGHTNING_ADVICE,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Decoder(nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        if self.op == "kthvalue":
            return torch.kthvalue(scaled, 2).values
        return torch.bmm(torch.eye(4, device=x.device).expand(2, 4, 4).to_sparse(), scaled.expand(2, 4, 4))


class Model(LightningModule):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.decoder = Decoder(op)

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        return self.decoder(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def record(path: Path, op: str, *allow: str) -> Run:
    settings = DeterminismSettings(seed=0, allow=allow)
    with enforce_determinism(settings):
        callback = DeterminismCallback(path, mode="record", settings=settings)
        trainer = quiet_trainer(callback, accelerator="gpu", devices=1)
        trainer.fit(Model(op), DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4))
    return Run.open(path)


def test_kthvalue_is_refused_with_module_and_line(tmp_path: Path) -> None:
    with pytest.raises(NondeterministicOpError, match=r"aten\.kthvalue\.default in decoder at .*in forward") as caught:
        record(tmp_path / "run", "kthvalue")
    assert (caught.value.op, caught.value.module) == ("aten.kthvalue.default", "decoder")

    (found,) = record(tmp_path / "allowed", "kthvalue", "decoder:aten.kthvalue.default").nondeterministic_ops(0)
    assert (found["op"], found["is_allowed"], found["num_calls"]) == ("aten.kthvalue.default", True, 2)
    # an op that has another algorithm
    assert record(tmp_path / "bmm", "bmm").nondeterministic_ops(0) == []
