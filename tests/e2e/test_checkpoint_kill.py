"""Whatever moment a kill comes at, every checkpoint that is there agrees with its digests, or has none."""

import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from det_callbacks import CheckpointNotFoundError, check_checkpoint

HERE = Path(__file__).parent
TRAIN = f"""
import sys
sys.path[:0] = {[str(HERE), str(HERE.parent)]!r}
from pathlib import Path
from lightning.pytorch.callbacks import ModelCheckpoint
from det_callbacks import DeterminismCallback
from fits import Fit
folder = Path(sys.argv[1])
saving = [ModelCheckpoint(folder, every_n_train_steps=n, save_last=last, monitor="step", mode="max", save_top_k=2,
          filename=f"{{last}}-{{{{step}}}}") for n, last in ((1, True), (2, "link"))]
saving[1].CHECKPOINT_NAME_LAST = "linked"
recording = DeterminismCallback(folder.parent / "run", mode="record", level="state")
Fit(recording, *saving, enable_checkpointing=True, max_epochs=2000).run()
"""


def kill_after(process: subprocess.Popen[bytes], folder: Path, seconds: float) -> None:
    try:
        deadline = time.monotonic() + 120
        while not list(folder.glob("*.ckpt")) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(seconds)
        assert process.poll() is None, "it ended before it was killed"
    finally:
        process.kill()
        process.wait()


def assert_all_agree(folder: Path) -> int:
    checkpoints = [path for path in folder.glob("*.ckpt") if path.exists()]  # a link to what is removed is none
    for path in checkpoints:
        torch.load(path, weights_only=True)
        with suppress(CheckpointNotFoundError):  # killed between the checkpoint and its digests
            assert check_checkpoint(path).equal, sorted(os.listdir(folder))
    others = {path.name for path in folder.iterdir()} - {path.name for path in folder.glob("*.ckpt")}
    endings = {name.partition(".ckpt")[2] for name in others}
    assert endings <= {"", ".digests.json", ".digests.json.tmp", ".resume"}  # "": what Lightning had begun
    return len(checkpoints)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(6))
def test_a_killed_training_leaves_pairs_that_agree(number: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", TRAIN, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kill_after(process, folder, random.uniform(0.5, 4))
    assert assert_all_agree(folder) >= 2
