"""A process that saves checkpoints until it is killed: ``checkpoint_writer.py FOLDER``.

Each save overwrites ``last.ckpt`` and makes a new ``n.ckpt``; the fourth before it is removed, as top-k does.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from det_callbacks.checkpoint.watch import CheckpointWatch
from det_callbacks.runs.peers import ALONE


def write(folder: Path) -> None:
    progress = SimpleNamespace(total=SimpleNamespace(processed=1))
    trainer: Any = SimpleNamespace(  # what the watch asks of one in which no fit is under way
        strategy=SingleDeviceStrategy(),
        state=SimpleNamespace(fn=None),
        world_size=1,
        is_global_zero=True,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        lightning_module=None,
        optimizers=[],
    )
    CheckpointWatch("exact", ALONE).begin_stage(trainer)
    number = 0
    while True:
        checkpoint = {"state_dict": {f"weight{index}": torch.full((2000,), float(number)) for index in range(20)}}
        for name in ("last", str(number)):
            trainer.strategy.save_checkpoint(checkpoint, folder / f"{name}.ckpt")
        if number > 2:
            trainer.strategy.remove_checkpoint(folder / f"{number - 3}.ckpt")
        number += 1


if __name__ == "__main__":
    write(Path(sys.argv[1]))
