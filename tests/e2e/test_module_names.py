"""Names of modules are data: torch forbids the dot only."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, compare_runs
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE

pl = pytest.importorskip("lightning.pytorch")
NAMES = (
    "Layer 0",
    "mean of all",
    "a/b",
    "a:b",
    "generator on cpu",
    "out[0]",
    "it's",
    "grad of output",
)


class Named(pl.LightningModule):
    """One linear layer for each name, in turn."""

    def __init__(self, changed: str = "") -> None:
        super().__init__()
        self.net = nn.Sequential()
        for name in NAMES:
            self.net.add_module(name, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
            self.net.get_submodule(name)[0].bias.requires_grad_(name != changed)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def fit(callback: Any, model: Any) -> None:
    torch.manual_seed(0)
    model = model()
    torch.manual_seed(1)
    quiet_trainer(callback, max_epochs=1).fit(
        model, DataLoader(TensorDataset(torch.randn(16, 3)), 4)
    )


@pytest.mark.parametrize("level", ["op", "state"])
def test_every_tensor_has_its_own_module(level, tmp_path):
    fit(DeterminismCallback(tmp_path / "run", mode="record", level=level), Named)
    run = Run.open(tmp_path / "run")
    with torch.device("meta"):
        modules = {name for name, _ in Named().named_modules()}
    for step in (0, 1):
        sites = run.view(0, 0, step).program.sites
        assert {site.module for site in sites} - {"?"} <= modules
        for name in NAMES:
            weight = f"net.{name}.0.weight"
            named = {
                site.name: site.module for site in sites if site.name and site.name.endswith(weight)
            }
            wanted = {weight, f"grad of {weight}", f"exp_avg of {weight}"}
            assert wanted <= named.keys()
            assert {named[one] for one in wanted} == {f"net.{name}.0"}


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("unchanged") / "run"
    fit(DeterminismCallback(path, mode="record", level="state"), Named)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_verdict_names_the_module(name, unchanged, tmp_path):
    """A parameter that is frozen in one run has no gradient there."""
    fit(DeterminismCallback(tmp_path, mode="record", level="state"), lambda: Named(changed=name))
    verdict = compare_runs(unchanged, tmp_path)
    first = verdict.first_divergence
    place = (first.step, first.phase, first.module, first.name, first.kind)
    assert place == (0, "gradient", f"net.{name}.0", f"grad of net.{name}.0.bias", "missing")
    assert f"net.{name}.0.bias" in verdict.explanation
