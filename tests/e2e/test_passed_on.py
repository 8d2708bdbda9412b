"""A batch with another structure or other lengths: what Python makes of it is called nobody's origin."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from finding import first_of, verify
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback

pytestmark = LIGHTNING_ADVICE


class Trained(pl.LightningModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Characters(Trained):
    """Positions, dropout, a mean and slices: all of them follow the length of the sequence."""

    def __init__(self, *, dropout: float = 0.1) -> None:
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


class Recurrent(Trained):
    """An LSTM over packed sequences, whose kernel reads their lengths on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.lstm(batch)[0].data.square().mean()


class Split(Trained):
    """Python reads the lengths without an op."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        values, lengths = batch
        sizes = lengths.tolist()
        return torch.stack([self.linear(part).mean() * len(part) for part in values.split(sizes)]).sum()


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens(length: int) -> Tensor:
    return torch.randint(11, (3, length), generator=torch.Generator().manual_seed(length))


def packed(*lengths: int) -> Any:
    return pack_sequence(list(drawn(sum(lengths), 4).split(list(lengths))))


def stacked(*lengths: int) -> tuple[Tensor, Tensor]:
    return drawn(sum(lengths), 4), torch.tensor(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training on batches that are made before it."""

    model: Callable[[], pl.LightningModule]
    batches: list[Any]

    def fit(self, callback: DeterminismCallback) -> None:
        torch.manual_seed(0)
        loader = DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]  # a list will do
        quiet_trainer(callback).fit(self.model(), loader)

    def record(self, folder: Path) -> Path:
        self.fit(DeterminismCallback(folder, mode="record"))
        return folder


OTHER_BATCHES = {
    "a longer sequence": (Characters, tokens(6), tokens(7)),
    "other lengths of a packed sequence": (Recurrent, packed(4, 3, 2), packed(4, 4, 1)),
    "lengths that Python reads": (Split, stacked(4, 3, 2), stacked(5, 2, 2)),
}


@pytest.mark.parametrize("case", OTHER_BATCHES)
def test_what_follows_from_a_batch_is_no_origin(case: str, tmp_path: Path) -> None:
    model, usual, other = OTHER_BATCHES[case]
    reference = Training(model=model, batches=[usual, usual]).record(tmp_path / "reference")
    verdict = verify(reference, Training(model=model, batches=[usual, other]), tmp_path / "current")
    first = first_of(verdict)
    assert (first.step, first.phase, first.is_origin, verdict.cause) == (1, "data", False, "data_content")
    assert verdict.origins == ()
    assert "no op is to blame." in verdict.explanation


def test_another_argument_among_batches_of_other_lengths_is_an_origin(tmp_path: Path) -> None:
    batches = [tokens(6), tokens(7)]
    reference = Training(model=Characters, batches=batches).record(tmp_path / "reference")
    other = Training(model=partial(Characters, dropout=0.2), batches=batches)
    verdict = verify(reference, other, tmp_path / "current")
    first = first_of(verdict)
    assert (first.step, first.module, first.kind, first.is_origin) == (0, "drop", "argument", True)
    assert {(origin.module, origin.kind) for origin in verdict.origins} == {("drop", "argument")}
    assert (verdict.cause, "(p: " in verdict.explanation) == ("forward", True)
