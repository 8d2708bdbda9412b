"""Where a difference is passed on, or cannot be followed, nobody is called its origin.

A batch with another structure or other lengths passes it on through Python, past every edge.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from faults import Deep, Training, below, first_of, verify
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


class ThroughNumpy(nn.Module):
    """A tensor that NumPy writes between two ops, where the trace cannot see it."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs * 2
        values.detach().numpy()[:] += self.shift
        return values.tanh()


def test_an_unseen_writer_makes_no_origin(tmp_path: Path, references: Callable[..., Path]) -> None:
    reference = references(partial(Deep, middle=partial(ThroughNumpy, 0.0)))
    training = Training(model=partial(Deep, middle=partial(ThroughNumpy, 1e-3)))
    verdict = verify(reference, training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.module, first.op, first.kind, first.is_origin) == ("middle", "aten.tanh.default", "content", None)
    assert verdict.origins == ()
    assert "something that the trace did not see wrote what it reads" in verdict.explanation
    assert "cannot be proven" in verdict.explanation


def test_an_unselected_module_in_between_makes_no_origin(tmp_path: Path, references: Callable[..., Path]) -> None:
    modules = ("net.[0-3]*", "net.[6-9]*", "head")
    reference = references(Deep, modules=modules)
    training = Training(around=below(op="aten.addmm", module="net.4.up", step=1, is_gross=True))
    verdict = verify(reference, training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.step, first.phase, first.module, first.is_origin) == (1, "input", "net.6.norm", False)
    assert verdict.origins == ()
    assert "an op that is not recorded (modules, phases) may have written it" in verdict.explanation
    seen = {site.module for site in Run.open(reference).view(0, 0, 1).program.sites if site.op}
    assert "net.3.up" in seen
    assert not seen & {"net.4.up", "net.5.up"}


@pytest.mark.parametrize("level", ["module", "state"])
def test_lower_levels_find_the_step_and_blame_no_op(
    level: str, tmp_path: Path, references: Callable[..., Path]
) -> None:
    training = Training(around=below(op="aten.addmm", step=2, module="net.5.up", is_gross=True))
    verdict = verify(references(Deep, level=level), training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.step, first.phase) == (2, "forward")
    assert first.module == ("net.5.up" if level == "module" else "")
    assert first.name == ("output" if level == "module" else "loss")
    assert not any(origin.op for origin in verdict.origins)


# what Python passes on


class Characters(pl.LightningModule):
    """Positions, dropout, a mean and slices: all of them follow the length of the sequence."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.positions = nn.Embedding(32, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 11)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.embed(batch) + self.positions(torch.arange(batch.shape[1]))
        logits = self.head(self.drop(self.norm(hidden)))[:, :-1]
        return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + logits.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def tokens(length: int) -> Tensor:
    return torch.randint(11, (3, length), generator=torch.Generator().manual_seed(length))


@dataclass(frozen=True, slots=True, kw_only=True)
class OfBatches:
    """A training on batches that are made before it."""

    batches: list[Tensor]
    dropout: float = 0.1

    def fit(self, callback: DeterminismCallback) -> None:
        torch.manual_seed(0)
        loader = DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]  # a list will do
        quiet_trainer(callback).fit(Characters(self.dropout), loader)

    def record(self, folder: Path) -> Path:
        self.fit(DeterminismCallback(folder, mode="record"))
        return folder


def test_only_what_a_batch_does_not_explain_is_an_origin(tmp_path: Path) -> None:
    """A longer sequence changes arguments of many ops; another dropout, among batches of other lengths, is one."""
    batches = [tokens(6), tokens(6), tokens(7)]
    reference = OfBatches(batches=batches).record(tmp_path / "reference")
    longer = OfBatches(batches=[tokens(6), tokens(8), tokens(7)])
    verdict = verify(reference, longer, tmp_path / "longer")
    first = first_of(verdict)
    assert (first.step, first.phase, first.is_origin, verdict.cause) == (1, "data", False, "data_content")
    assert verdict.origins == ()
    assert "no op is to blame." in verdict.explanation
    verdict = verify(reference, OfBatches(batches=batches, dropout=0.2), tmp_path / "dropout")
    first = first_of(verdict)
    assert (first.step, first.module, first.kind, first.is_origin) == (0, "drop", "argument", True)
    assert {(origin.module, origin.kind) for origin in verdict.origins} == {("drop", "argument")}
    assert (verdict.cause, "(p: " in verdict.explanation) == ("forward", True)
