"""A training whose digests are known at the end of each step only: as on the host, and nothing waits inside a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_fits import ImageModel, fit
from late_device import in_every_step, late_device
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, DivergenceError

pytestmark = LIGHTNING_ADVICE


def train(callback: DeterminismCallback | None, *, fault_at: int | None = None) -> ImageModel:
    torch.manual_seed(3)
    model = ImageModel(16, fault_at=fault_at)
    fit(model, *([] if callback is None else [callback]), device="cpu", num_steps=3, batch_size=4)
    return model


def fault_of(reference: Path, current: Path) -> tuple[Any, ...]:
    with pytest.raises(DivergenceError) as caught:
        train(DeterminismCallback(reference, current=current), fault_at=1)
    live = caught.value.verdict
    assert live is not None
    return live.first_divergence, live.origins, live.cause, live.explanation


def test_a_late_device_verifies_what_the_host_recorded_and_names_a_fault_as_it_does(tmp_path: Path) -> None:
    reference = tmp_path / "run"
    recorded = train(DeterminismCallback(reference, mode="record"))
    with late_device() as device, in_every_step(device):
        callback = DeterminismCallback(reference, current=tmp_path / "current")
        verified = train(callback)
        assert (device.waits, device.num_watched) == ([], 3)
        # what makes up the fit's start and end is fetched outside its steps
        assert 3 <= device.num_collected <= 12
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    for one, other, plain in zip(*(model.parameters() for model in (recorded, verified, train(None))), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, plain)

    found = [fault_of(reference, tmp_path / "on the host")]
    with late_device() as device, in_every_step(device):
        found.append(fault_of(reference, tmp_path / "late"))
    assert (device.waits, device.num_watched) == ([], 2)
    assert found[0] == found[1]
    assert found[0][0].step == 1
    assert [origin.is_origin for origin in found[0][1]] == [True]
