"""Faults planted in loops without a Trainer: the verdict says what happened, and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Loop, train

from det_callbacks import DivergenceError
from det_callbacks.verdict import Verdict


def verify(make: Callable[[], Loop], folder: Path, reference: Callable[[], Loop] = Loop, **arguments: Any) -> Verdict:
    train(reference, folder / "reference", mode="record", **arguments)
    with pytest.raises(DivergenceError) as caught:
        train(make, folder / "reference", current=folder / "current")
    return caught.value.verdict


def in_step_2(plant: Callable[[], object], *, before_update: bool) -> type[Loop]:
    class Planted(Loop):
        def train_step(self, batch: Any) -> None:
            self.loss(batch).backward()
            if before_update and self.num_done == 2:
                plant()
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()
            if not before_update and self.num_done == 2:
                plant()

    return Planted


@pytest.mark.parametrize("before_update", [True, False])
def test_a_seed_at_the_end_of_a_step_is_no_draw(before_update, tmp_path):
    verdict = verify(in_step_2(lambda: torch.manual_seed(5), before_update=before_update), tmp_path)
    assert (verdict.cause, verdict.first_divergence.step) == ("rng", 2)
    assert "seeded with 11 in the reference and 5 in the current run" in verdict.explanation
    assert "draws from the generator" not in verdict.explanation


def test_a_draw_whose_state_is_restored_is_an_extra_draw(tmp_path):
    def draw() -> None:
        with torch.random.fork_rng():
            torch.rand(2)

    verdict = verify(in_step_2(draw, before_update=False), tmp_path)
    assert (verdict.cause, verdict.first_divergence.op) == ("rng", "aten.rand.default")
    assert "Remove the draw, or record the reference again" in verdict.explanation
    assert "Seed this generator" not in verdict.explanation
