"""What the projects share: images of noise, and a fault of one part in a
million in the third batch.
"""

import os

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


def images(number: int = 16, size: int = 8) -> Dataset[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(number, 3, size, size, generator=generator),
        torch.randint(4, (number,), generator=generator),
    )


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(images(), batch_size=4, shuffle=True)


def planted(value: Tensor, step: int) -> Tensor:
    return value.mul(1 + 2**-20) if "PLANTED" in os.environ and step == 2 else value.mul(1.0)
