"""Trainings whose every step hangs on something that a checkpoint leaves out."""

import random
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

TEXT = Path(shutil.__file__).read_text(encoding="utf-8")[:8000]  # a text that every Python has
CONTEXT = 32


class AugmentedDigits(Dataset[tuple[Tensor, int]]):
    """scikit-learn's digits, shifted and noised at random each time they are read."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[:640], dtype=torch.float32).unsqueeze(1) / 16
        self.labels = digits.target[:640]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index].roll(random.randint(-1, 1), dims=2)
        return image + 0.05 * torch.randn_like(image), int(self.labels[index])


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text of the standard library, each with the characters that follow."""

    def __init__(self) -> None:
        self.letters = sorted(set(TEXT))
        self.text = torch.tensor([self.letters.index(letter) for letter in TEXT])

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class DigitsNetwork(pl.LightningModule):
    """A small convolutional network with batch norm, dropout and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TwoOptimizers(DigitsNetwork):
    """The same, with manual optimization: the head has an optimizer of its own,
    and steps every other batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        features, head = self.optimizers()
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        features.zero_grad()
        self.manual_backward(loss)
        features.step()
        if index % 2:
            head.step()
            head.zero_grad()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.AdamW(self.net[:-1].parameters(), lr=3e-3),
            torch.optim.SGD(self.net[-1].parameters(), lr=0.05, momentum=0.9),
        )


class CharacterModel(pl.LightningModule):
    """A small transformer with dropout that predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        num_letters = len(set(TEXT))
        self.embed = nn.Embedding(num_letters, 32)
        self.places = nn.Parameter(torch.randn(CONTEXT, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, num_letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        letters, following = batch
        hidden = self.layers(self.embed(letters) + self.places, mask=self.mask, is_causal=True)
        return cross_entropy(self.head(hidden).flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


MODELS = {"digits": DigitsNetwork, "characters": CharacterModel, "two_optimizers": TwoOptimizers}


def make_model(name: str) -> pl.LightningModule:
    return MODELS[name]()


def make_data(name: str, *, batch_size: int, num_workers: int) -> DataLoader[Any]:
    data: Dataset[Any] = Characters() if name == "characters" else AugmentedDigits()
    return DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=num_workers)
