"""Modules that TorchScript runs: what ran before in the process decides
which ops its executor runs.
"""

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, DivergenceError

pytestmark = [
    LIGHTNING_ADVICE,
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]


def scaled() -> nn.Module:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 8)
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.tanh(self.linear(inputs) * self.scale + self.scale)

    return Scaled()


class Model(pl.LightningModule):
    def __init__(self, *, is_scripted: bool) -> None:
        super().__init__()
        self.net = torch.jit.script(scaled()) if is_scripted else scaled()
        self.head = nn.Linear(8, 1)
        self.has_more = False

    def training_step(self, batch: tuple[Tensor], index: int) -> Tensor:
        hidden = self.net(batch[0])
        return self.head(hidden * 1 if self.has_more else hidden).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    callback: DeterminismCallback, *, is_scripted: bool, num_before: int = 0, has_more: bool = False
) -> None:
    torch.manual_seed(0)
    model = Model(is_scripted=is_scripted)
    model.has_more = has_more
    for _ in range(num_before):
        model.net(torch.ones(4, 4)).sum().backward()
    model.zero_grad()
    samples = torch.rand(16, 4, generator=torch.Generator().manual_seed(0))
    quiet_trainer(callback).fit(model, DataLoader(TensorDataset(samples), batch_size=4))


def test_what_ran_before_changes_nothing_where_no_executor_runs(tmp_path):
    fit(DeterminismCallback(tmp_path / "run", mode="record"), is_scripted=False)
    fit(
        DeterminismCallback(tmp_path / "run", current=tmp_path / "current"),
        is_scripted=False,
        num_before=3,
    )


def test_an_op_that_another_module_has_is_not_laid_to_it(tmp_path):
    """The executor has settled by then: both runs have its ops of a process in
    which it ran before.
    """
    fit(DeterminismCallback(tmp_path / "first", mode="record"), is_scripted=True, num_before=3)
    fit(DeterminismCallback(tmp_path / "run", mode="record"), is_scripted=True, num_before=3)
    current = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    with pytest.raises(DivergenceError) as caught:
        fit(current, is_scripted=True, num_before=3, has_more=True)
    verdict = caught.value.verdict
    assert (verdict.first_divergence.op, verdict.first_divergence.module) == ("aten.mul.Tensor", "")
    assert "TorchScript" not in verdict.explanation
