"""Trainings that draw from the generators of devices, stood in for: the verdict, and going on after a stop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_stand_ins import StandInDevices
from resumes import RESUMING, Noisy, SaveAfter, fit, record, refused, resume

from det_callbacks import DeterminismCallback, DivergenceError, environment

pytestmark = RESUMING


class Drawing(Noisy):
    """Adds noise to its inputs that depends on a device's generator, as dropout on the device would."""

    def __init__(self, index: int = 0, seed: int | None = None) -> None:
        super().__init__()
        self.generator: Any = torch.cuda.default_generators[index]
        if seed is not None:
            self.generator.manual_seed(seed)

    def training_step(self, batch: Any, index: int) -> Any:
        noise = torch.rand(4, generator=torch.Generator().manual_seed(self.generator.seed + self.generator.offset))
        self.generator.draw()
        return super().training_step(batch + noise, index)


Install = Callable[..., StandInDevices]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put devices in the place of those before; of the hardware there is nothing to tell."""
    monkeypatch.setattr(environment, "_gpu_facts", lambda: iter(()))

    def install(num_devices: int, **options: Any) -> StandInDevices:
        devices = StandInDevices(num_devices, **options).install(monkeypatch)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # Lightning would say that it is not used
        return devices

    return install


def test_another_seed_of_one_device_is_named(tmp_path: Path, install: Install) -> None:
    install(2, contexts=(0, 1))
    record(tmp_path, model=lambda: Drawing(1))
    again = DeterminismCallback(tmp_path / "run", current=tmp_path / "again", level="state")
    fit(again, model=lambda: Drawing(1))
    assert again.verdict.verdict == "match"
    assert again.verdict.coverage.digested_on == {"cuda": "a copy to the host; there is no such device"}
    other = DeterminismCallback(tmp_path / "run", current=tmp_path / "other", level="state")
    with pytest.raises(DivergenceError) as caught:
        fit(other, model=lambda: Drawing(1, seed=7))
    verdict = caught.value.verdict
    assert (verdict.cause, verdict.first_divergence.name) == ("rng", "torch.cuda:1")
    assert "torch.cuda:1 was in another state from the start of the fit on" in verdict.explanation
    assert "seeded with 1 in the reference, 7 now" in verdict.explanation


def test_a_resumed_training_goes_on_drawing_on_whichever_device_is_current_if_all_are_there(
    tmp_path: Path, install: Install
) -> None:
    install(2, contexts=(0, 1), current=1)
    record(tmp_path, SaveAfter(tmp_path, 3), model=lambda: Drawing(1))
    others = install(3, contexts=(0, 2), current=2)
    assert resume(tmp_path, "3.ckpt", model=lambda: Drawing(2)) == (3, 13)
    assert [generator.offset for generator in others.generators] == [0, 0, 4 * 14]
    install(1)
    problem = refused(tmp_path, "3.ckpt", model=Drawing)
    assert "cannot be restored, or are not there: torch.cuda:0" in problem
