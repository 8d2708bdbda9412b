"""A training on a GPU: level op waits for nothing inside a step, takes little memory, and a run repeats itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_fits import MIB, ImageModel, fit, fit_without_waits, peak_of_fit, within_steps
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # looked at in torch 2.13
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback
from det_callbacks.runs.store import Run

PROGRAM = Path(__file__).with_name("gpu_fits.py")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = LIGHTNING_ADVICE


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own: CUBLAS_WORKSPACE_CONFIG is read once, by the first context."""
    variables = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    path = os.pathsep.join([str(PROGRAM.parents[1]), str(PROGRAM.parents[2])])
    return subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=folder,
        env={**variables, "PYTHONPATH": path},
    )


def test_the_switch_encloses_the_training_and_nothing_of_the_callback(tmp_path: Path) -> None:
    is_traced: list[tuple[bool, bool]] = []

    def switch(is_on: bool) -> None:
        is_traced.append((is_on, bool(_get_current_dispatch_mode_stack())))

    ours = DeterminismCallback(tmp_path / "run", mode="record")
    fit(ImageModel(8), *within_steps(switch, ours, first_step=1), device="cpu", num_steps=3, batch_size=2)
    assert is_traced == [(False, True), *[(True, True), (False, True)] * 2]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("is_recorded", [False, True], ids=["plain", "level op"])
def test_nothing_waits_for_the_device_inside_a_step(tmp_path: Path, is_recorded: bool) -> None:
    ours = [DeterminismCallback(tmp_path / "run", mode="record", level="op")] if is_recorded else []
    fit_without_waits(ImageModel(), *ours)


@pytest.mark.gpu
@needs_gpu
def test_a_wait_inside_a_step_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        fit_without_waits(ImageModel(does_wait=True))


@pytest.mark.gpu
@needs_gpu
def test_recording_takes_little_of_the_devices_memory(tmp_path: Path) -> None:
    sizes = {"width": 256, "batch_size": 512}  # 16 MiB for each activation in bfloat16, hundreds of MiB in all
    peak_of_fit(**sizes)  # workspaces that the libraries keep
    plain = peak_of_fit(**sizes)
    recorded = peak_of_fit(DeterminismCallback(tmp_path / "run", mode="record", level="op"), **sizes)
    assert plain > 256 * MIB, "a training of which a copy would be noticed"
    assert recorded - plain <= 128 * MIB, f"{(recorded - plain) / MIB:.0f} MiB more than {plain / MIB:.0f} MiB"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("strategy", "namespace"), [("auto", "aten"), ("ddp", "c10d"), ("fsdp2", "fsdp")])
def test_a_recording_under_the_default_settings_matches(tmp_path: Path, strategy: str, namespace: str) -> None:
    """With DDP and FSDP2 also collectives and gathered weights on streams of their own."""
    for mode, said in (("record", "record"), ("verify", "match")):
        done = run(tmp_path, mode, tmp_path / "run", "cuda", "", strategy)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == said
    sites = Run.open(tmp_path / "run").view(0, 0, 1).program.sites
    assert namespace in {site.op.partition(".")[0] for site in sites}
    done = run(tmp_path, "verify", tmp_path / "run", "cuda", 2, strategy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Step 2, forward" in done.stdout
