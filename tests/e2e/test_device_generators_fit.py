"""Trainings that draw from the generators of devices, stood in for: the verdict, and going on after a stop."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from device_stand_ins import StandInDevices
from fits import Steady
from resumes import SaveAfter
from styles import Samples
from torch.utils.data import DataLoader
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, DivergenceError, NotResumableError, environment

# Lightning's advice: a resume within an epoch
pytestmark = [LIGHTNING_ADVICE, pytest.mark.filterwarnings("ignore:.*dataloader is not resumable")]


class Drawing(Steady):
    """Adds noise to its inputs that depends on a device's generator, as dropout on the device would."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator: Any = torch.cuda.default_generators[self.index]
        noise = torch.rand(12, generator=torch.Generator().manual_seed(generator.seed + generator.offset))
        generator.draw()
        return super().training_step([batch[0] + noise, batch[1]], batch_idx)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> StandInDevices:
    """Two devices, both used; of the hardware there is nothing to tell."""
    monkeypatch.setattr(environment, "_gpu_facts", lambda: iter(()))
    found = StandInDevices(2, contexts=(0, 1)).install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # Lightning would say that it is not used
    return found


def fit(root: Path, *callbacks: pl.Callback, index: int = 0, ckpt_path: Path | None = None) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        model, data = Drawing(index), DataLoader(Samples(), batch_size=8)
        quiet_trainer(*callbacks, max_epochs=2, default_root_dir=root).fit(
            model, data, ckpt_path=None if ckpt_path is None else str(ckpt_path)
        )


def record(root: Path, *others: pl.Callback, index: int = 0, **options: Any) -> None:
    fit(root, DeterminismCallback(root / "reference", mode="record", **options), *others, index=index)


def test_another_seed_of_one_device_is_named(tmp_path: Path, devices: StandInDevices) -> None:
    index, name = 1, "torch.cuda:1"
    record(tmp_path, index=index, level="state")
    for generator in devices.generators:
        generator.offset = 0
    again = DeterminismCallback(tmp_path / "reference", level="state")
    fit(tmp_path, again, index=index)
    assert again.verdict is not None
    assert again.verdict.verdict == "match"
    for generator in devices.generators:
        generator.offset = 0
    devices.generators[index].manual_seed(7)
    with pytest.raises(DivergenceError) as caught:
        fit(tmp_path, DeterminismCallback(tmp_path / "reference", level="state"), index=index)
    verdict = caught.value.verdict
    assert verdict is not None
    assert (verdict.cause, verdict.first_divergence.name) == ("rng", name)
    assert f"{name} was in another state from the start of the fit on" in verdict.explanation
    assert "seeded with 67280421310721 in the reference, 7 now" in verdict.explanation


def test_a_resumed_training_goes_on_drawing_where_it_was_on_whichever_device_is_current(
    tmp_path: Path, devices: StandInDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.contexts = {0}
    record(tmp_path, SaveAfter(tmp_path, 3), resume="exact")
    assert devices.generators[0].offset == 32
    others = StandInDevices(3, contexts=(2,), current=2).install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    resumed = DeterminismCallback(tmp_path / "reference", resume="exact", steps="common")
    fit(tmp_path, resumed, index=2, ckpt_path=tmp_path / "3.ckpt")
    assert resumed.verdict is not None
    assert (resumed.verdict.verdict, resumed.verdict.coverage.steps) == ("match", (3, 7))
    assert [generator.offset for generator in others.generators] == [0, 0, 32]


def test_a_resume_without_one_of_the_devices_is_refused(
    tmp_path: Path, devices: StandInDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, SaveAfter(tmp_path, 3), resume="exact")
    StandInDevices(1).install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    resumed = DeterminismCallback(tmp_path / "reference", resume="exact", steps="common")
    with pytest.raises(
        NotResumableError, match=r"cannot be restored, or are not there: torch\.cuda:1\. Resume"
    ) as caught:
        fit(tmp_path, resumed, ckpt_path=tmp_path / "3.ckpt")
    assert len(caught.value.problems) == 1
