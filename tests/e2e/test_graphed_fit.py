"""A fit that replays CUDA graphs, on the stand-in: what it says, and where a difference inside one is looked for."""

from pathlib import Path

import pytest
import torch
from host_graphs import graph_of, host_graphs
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, DivergenceError

pytestmark = LIGHTNING_ADVICE


class Graphed(LightningModule):
    """Replays what its first layer does, which gives other bits in one step."""

    def __init__(self, fault_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault_at = fault_at
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.given, self.hidden = torch.zeros(2, 3), torch.zeros(2, 4)
        self.graph = graph_of(self._work)

    def _work(self) -> None:
        self.hidden.copy_(self.layers[0](self.given).tanh())
        if self.global_step == self.fault_at:
            self.hidden[0, 0] += 1

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        self.given.copy_(batch[0])
        self.graph.replay()
        return self.layers[1](self.hidden).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layers[1].parameters(), lr=0.1)


def fit(path: Path, mode: str, fault_at: int | None = None) -> None:
    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 18).reshape(6, 3)), batch_size=2)
    callback = DeterminismCallback(path, mode=mode)
    quiet_trainer(callback, default_root_dir=path.parent).fit(Graphed(fault_at), loader)


def test_a_fit_that_replays_a_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with host_graphs():
        fit(tmp_path / "run", "record")
        assert "at level op (seen only from outside: cuda_graph)" in capsys.readouterr().out
        fit(tmp_path / "run", "verify")
        assert "match: verified 3 steps" in capsys.readouterr().out
        with pytest.raises(DivergenceError) as raised:
            fit(tmp_path / "run", "verify", fault_at=1)
    verdict = raised.value.verdict
    first = verdict.first_divergence
    assert (first.step, first.phase, first.module, first.is_origin) == (1, "other", "layers.1", None)
    assert (verdict.origins, verdict.cause) == ((), "unknown")
    assert verdict.coverage.opaque_regions == ("cuda_graph",)
    assert verdict.coverage.ops_skipped["replayed"] == 2
    assert "a CUDA graph, of which nothing is seen inside, may have written it" in verdict.explanation
