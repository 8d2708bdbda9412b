"""A process that saves checkpoints until it is killed: ``checkpoint_writer.py FOLDER``.

Each save overwrites ``last.ckpt`` and makes a new ``n.ckpt``; the fourth before it is removed, as top-k does.
"""

import sys
from pathlib import Path

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from det_callbacks.checkpoint import SaveContext, Sidecar
from det_callbacks.checkpoint.io import CheckpointWatch, DigestingIO


class Source:
    """A training that keeps nothing for an exact resume."""

    def context(self) -> SaveContext:
        return SaveContext()

    def keep(self, path: str, id: str) -> bool:
        return False

    def loaded(self, path: str, sidecar: Sidecar | None) -> None:
        pass


def write(folder: Path) -> None:
    io = DigestingIO(TorchCheckpointIO(), CheckpointWatch(Source()))
    number = 0
    while True:
        checkpoint = {"state_dict": {f"weight{index}": torch.full((2000,), float(number)) for index in range(20)}}
        for name in ("last", str(number)):
            io.save_checkpoint(checkpoint, folder / f"{name}.ckpt")
        if number > 2:
            io.remove_checkpoint(folder / f"{number - 3}.ckpt")
        number += 1


if __name__ == "__main__":
    write(Path(sys.argv[1]))
