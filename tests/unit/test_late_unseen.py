"""Where no dispatch mode sees what writes memory, what a device is to digest is launched at once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from late_device import LateDevice, late_device
from torch import Tensor, nn

from det_callbacks import HashMode, ObserverContext, disable_hash_mode, enable_hash_mode, observe
from det_callbacks.runs.store import Run


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).add_(1).relu_()


def of_observation(folder: Path) -> list[int]:
    with ObserverContext(folder, "run"):
        x = torch.ones(4)
        observe("x", x)
        x.add_(1)
    return Run.open(folder / "run").view(0, 0, 0).record.digests.tolist()


def of_region(folder: Path) -> list[int]:
    with ObserverContext(folder, "run"):
        enable_hash_mode()
        x = torch.ones(4)
        disable_hash_mode()
        x.add_(1)
    return Run.open(folder / "run").view(0, 0, 0).record.digests.tolist()


def of_modules(_: Path) -> list[int]:
    torch.manual_seed(0)
    model = InPlace()
    with HashMode(model, level="module") as mode:
        model(torch.ones(2, 4)).sum().backward()
    assert mode.trace is not None
    return mode.trace.digests.tolist()


def of_left_out(_: Path) -> list[int]:
    with HashMode() as mode:
        x = torch.ones(4)
        mode.leaves_out(lambda: x.add_(1))()
    assert mode.trace is not None
    return mode.trace.digests.tolist()


@pytest.mark.parametrize("run", [of_observation, of_region, of_modules, of_left_out])
def test_what_is_written_unseen_is_read_before(tmp_path: Path, run: Callable[[Path], list[int]]) -> None:
    on_host = run(tmp_path / "host")
    with late_device() as device:
        assert run(tmp_path / "late") == on_host
    assert device.num_launched


def test_what_is_asked_for_together_is_launched_together() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    with late_device() as device, HashMode(model, level="state"):
        pass
    assert num_launched(device) == [10]


def test_where_every_op_is_seen_outputs_wait_for_each_other() -> None:
    with late_device() as device, HashMode():
        x = torch.ones(2)
        for _ in range(5):
            x = x * 2
    assert num_launched(device) == [6], "the ones and the five products"


def num_launched(device: LateDevice) -> list[int]:
    return [number for number in device.num_launched if number]
