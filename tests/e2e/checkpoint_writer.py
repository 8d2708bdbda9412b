"""A process that saves checkpoints until it is killed: ``checkpoint_writer.py FOLDER``.

Each save overwrites ``last.ckpt`` and makes a new ``n.ckpt``; the fourth before it is removed, as top-k does.
"""

import sys
from pathlib import Path

import torch

from det_callbacks.checkpoint.entries import entries_of
from det_callbacks.checkpoint.files import Place
from det_callbacks.checkpoint.saving import new_id, remove_beside, save_file
from det_callbacks.checkpoint.sidecar import SaveContext


def write(folder: Path) -> None:
    number = 0
    while True:
        checkpoint = {"state_dict": {f"weight{index}": torch.full((2000,), float(number)) for index in range(20)}}
        for name in ("last", str(number)):
            save_file(
                checkpoint,
                Place.of(folder / f"{name}.ckpt"),
                id=new_id(),
                entries=entries_of(checkpoint),
                context=SaveContext(step=number, attachments={"rank-00000.bin": bytes([number % 256]) * 1000}),
            )
        old = Place.of(folder / f"{number - 3}.ckpt")
        old.remove()
        remove_beside(old)
        number += 1


if __name__ == "__main__":
    write(Path(sys.argv[1]))
