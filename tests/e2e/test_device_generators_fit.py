"""A training that draws from the generator of a device, which is stood in for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from device_stand_ins import StandInDevices
from resumes import RESUMING, Noisy, fit, record

from det_callbacks import DeterminismCallback, DivergenceError, environment

pytestmark = RESUMING


class Drawing(Noisy):
    """Adds noise to its inputs that depends on a device's generator, as dropout on the device would."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.generator: Any = torch.cuda.default_generators[1]
        if seed is not None:
            self.generator.manual_seed(seed)

    def training_step(self, batch: Any, index: int) -> Any:
        noise = torch.rand(4, generator=torch.Generator().manual_seed(self.generator.seed + self.generator.offset))
        self.generator.draw()
        return super().training_step(batch + noise, index)


def test_another_seed_of_one_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_gpu_facts", lambda: iter(()))  # of the hardware there is nothing to tell
    StandInDevices(2, contexts=(0, 1)).install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # Lightning would say that it is not used
    record(tmp_path, model=Drawing)
    again = DeterminismCallback(tmp_path / "run", current=tmp_path / "again", level="state")
    fit(again, model=Drawing)
    assert again.verdict.verdict == "match"
    other = DeterminismCallback(tmp_path / "run", current=tmp_path / "other", level="state")
    with pytest.raises(DivergenceError) as caught:
        fit(other, model=lambda: Drawing(seed=7))
    verdict = caught.value.verdict
    assert (verdict.cause, verdict.first_divergence.name) == ("rng", "torch.cuda:1")
    assert "torch.cuda:1 was in another state from the start of the fit on" in verdict.explanation
    assert "seeded with 1 in the reference, 7 now" in verdict.explanation
