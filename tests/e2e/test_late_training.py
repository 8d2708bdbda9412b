"""A training whose digests are known at the end of each step only: as on the host, and nothing waits inside a step."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_fits import ImageModel, fit, within_steps
from judged import require_one_verdict
from late_device import LateDevice, as_in_a_step, late_device
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, DivergenceError

pytestmark = LIGHTNING_ADVICE


def train(
    callback: DeterminismCallback | None, device: LateDevice | None = None, *, fault_at: int | None = None
) -> ImageModel:
    """Train on the CPU; on a late device nothing of ours may wait for it between the first and last op of a step."""
    torch.manual_seed(3)
    model = ImageModel(16, fault_at=fault_at)
    ours = [] if callback is None else [callback]
    with ExitStack() as step:

        def switch(is_on: bool) -> None:
            if is_on:
                assert device is not None
                step.enter_context(as_in_a_step(device))
            else:
                step.close()

        callbacks = ours if device is None else within_steps(switch, *ours)
        fit(model, *callbacks, device="cpu", num_steps=3, batch_size=4)
    return model


@pytest.mark.parametrize("level", ["op", "module", "state"])
def test_a_recording_of_the_host_is_verified_on_a_late_device(tmp_path: Path, level: Any) -> None:
    recorded = train(DeterminismCallback(tmp_path / "run", mode="record", level=level))
    with late_device() as device:
        callback = DeterminismCallback(tmp_path / "run", level=level, current=tmp_path / "current")
        verified = train(callback, device)
        assert device.waits == []
        # what makes up the fit's start and end is fetched outside its steps
        assert 3 <= device.num_collected <= 12
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    plain = train(None)
    for one, other, untraced in zip(*(model.parameters() for model in (recorded, verified, plain)), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, untraced)


def test_a_fault_is_named_as_on_the_host_live_and_afterwards(tmp_path: Path) -> None:
    found = []
    for device in (None, LateDevice()):
        with ExitStack() as place:
            late = None if device is None else place.enter_context(late_device())
            folder = tmp_path / ("host" if late is None else "late")
            train(DeterminismCallback(folder / "run", mode="record"), late)
            with pytest.raises(DivergenceError) as caught:
                train(DeterminismCallback(folder / "run", current=folder / "live"), late, fault_at=1)
            assert late is None or late.waits == []
        live = caught.value.verdict
        assert live is not None
        require_one_verdict(live, folder / "run", folder / "live")
        found.append((live.first_divergence, live.origins, live.cause, live.explanation))
    assert found[0] == found[1]
    assert found[0][0].step == 1
    assert [origin.is_origin for origin in found[0][1]] == [True]
