"""A process that saves checkpoints until it is killed: ``checkpoint_writer.py FOLDER``.

Each save overwrites ``last.ckpt`` and makes a new ``n.ckpt``; the fourth before it is removed, as top-k does.
"""

import sys
from pathlib import Path

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from det_callbacks.checkpoint.entries import entries_of
from det_callbacks.checkpoint.saving import begin_save, end_save, new_id, remove_beside
from det_callbacks.checkpoint.sidecar import SaveContext


def write(folder: Path) -> None:
    number = 0
    while True:
        checkpoint = {"state_dict": {f"weight{index}": torch.full((2000,), float(number)) for index in range(20)}}
        for name in ("last", str(number)):
            path, id = folder / f"{name}.ckpt", new_id()
            context = SaveContext(step=number, attachments={"rank-00000.bin": bytes([number % 256]) * 1000})
            begin_save(path, id=id, context=context)
            TorchCheckpointIO().save_checkpoint(checkpoint, path)
            end_save(path, id=id, entries=entries_of(checkpoint), context=context)
        old = folder / f"{number - 3}.ckpt"
        old.unlink(missing_ok=True)
        remove_beside(old)
        number += 1


if __name__ == "__main__":
    write(Path(sys.argv[1]))
