"""A fit that replays CUDA graphs, on the stand-in: what it says, and where a difference inside one is looked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from host_graphs import host_graphs, nudge_last
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, DivergenceError

pytestmark = LIGHTNING_ADVICE


class Graphed(LightningModule):
    """Replays the forward and backward pass of its first layer, which gives other bits in one step."""

    def __init__(self, fault_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault_at = fault_at
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.layers[0] = torch.cuda.make_graphed_callables(self.layers[0], (torch.ones(2, 3),))

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(path: Path, mode: str, graphs: Any, fault_at: int | None = None) -> Any:
    model = Graphed()

    def nudge(calls: Any) -> None:
        if model.trainer.global_step == fault_at:
            nudge_last(calls)

    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 18).reshape(6, 3)), batch_size=2)
    graphs.after_replay = nudge
    quiet_trainer(DeterminismCallback(path, mode=mode)).fit(model, loader)


def test_a_fit_with_graphed_callables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # verdicts are written there
    with host_graphs() as graphs:
        fit(tmp_path / "run", "record", graphs)
        assert "at level op (2 CUDA graphs seen from outside)" in capsys.readouterr().out
        fit(tmp_path / "run", "verify", graphs)
        assert "match: verified 3 steps" in capsys.readouterr().out
        with pytest.raises(DivergenceError) as raised:
            fit(tmp_path / "run", "verify", graphs, fault_at=1)
    verdict = raised.value.verdict
    assert verdict is not None
    first = verdict.first_divergence
    assert first is not None
    assert (first.step, first.phase, first.module, first.is_origin) == (1, "forward", "layers.0", None)
    assert verdict.origins == ()
    assert verdict.coverage.opaque_regions == ("cuda_graph.1", "cuda_graph.2")
    assert "a CUDA graph, of which nothing is seen inside, may have written it" in verdict.explanation
    assert f"record step {first.step} of both without CUDA graphs" in verdict.explanation
