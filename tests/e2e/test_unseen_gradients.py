"""NumPy changes a gradient between the backward pass and the optimizer: nobody who reads it then is an origin."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from faults import Deep, Training, first_of, verify
from trainers import LIGHTNING_ADVICE

from det_callbacks import compare_runs

pytestmark = LIGHTNING_ADVICE


class FlipABit(pl.Callback):
    """Flips a bit of a gradient before the second update."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        if trainer.global_step == 1:
            module.head.weight.grad.numpy().view(np.int32).flat[3] ^= 1 << 12


@pytest.mark.parametrize("optimizer", [partial(torch.optim.AdamW, fused=True), partial(torch.optim.LBFGS, max_iter=3)])
def test_the_gradient_is_named_and_no_op_of_the_optimizer(optimizer: Any, tmp_path: Path) -> None:
    plain = Training(model=partial(Deep, optimizer=optimizer, lr=0.1), options={"max_steps": 2})
    flipped = replace(plain, callbacks=(FlipABit(),))
    reference = plain.record(tmp_path / "reference")
    verdict = verify(reference, flipped, tmp_path / "current")
    offline = compare_runs(reference, flipped.record(tmp_path / "second"))
    for name in ("first_divergence", "origins", "cause", "explanation"):
        assert getattr(offline, name) == getattr(verdict, name)
    first = first_of(verdict)
    assert (first.step, first.phase, first.name) == (1, "gradient", "grad of head.weight")
    assert (first.kind, first.is_origin, verdict.origins, verdict.cause) == ("content", None, (), "backward")
    assert "what wrote it agrees" in verdict.explanation
