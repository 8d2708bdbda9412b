"""Trainers that show and write nothing, and what Lightning would advise of them."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

# how to train faster: more workers of a loader, another logging interval
LIGHTNING_ADVICE = pytest.mark.filterwarnings(
    "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"
)


def quiet_trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """Return a Trainer for one epoch on the CPU; options replace these."""
    return pl.Trainer(
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        },
        callbacks=list(callbacks),
    )


def has_same_weights(one: pl.LightningModule, other: pl.LightningModule) -> bool:
    """Tell whether parameters and buffers of two modules are equal, none of them NaN."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)
