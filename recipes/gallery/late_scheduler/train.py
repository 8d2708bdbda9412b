"""Saves the checkpoint of an epoch before the scheduler steps; ``--fixed`` saves it after."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks import DetCallbacksError, TrainingRun

CHECKPOINT, PER_EPOCH = Path("epoch=2.ckpt"), 2
torch.manual_seed(0)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4], gamma=0.1)
loader = DataLoader(TensorDataset(torch.rand(8, 8)), batch_size=4, generator=torch.Generator())
parts = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}


def save_checkpoint(epoch: int) -> None:
    if epoch == 2 and "record" in sys.argv:
        torch.save({name: part.state_dict() for name, part in parts.items()}, CHECKPOINT)


def train(run: TrainingRun, first_epoch: int) -> None:
    for epoch in range(first_epoch, 6):
        for (rows,) in run.batches(loader):
            with run.step((rows,)):
                loss = nn.functional.mse_loss(model(rows), torch.ones(4, 2))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        if "--fixed" not in sys.argv:
            save_checkpoint(epoch)
        scheduler.step()
        if "--fixed" in sys.argv:
            save_checkpoint(epoch)


mode, first_epoch = ("record" if "record" in sys.argv else "verify"), 3 * ("resume" in sys.argv)
run = TrainingRun("refs/scheduler", mode=mode, model=model, optimizers=optimizer, overwrite=True)
if "resume" in sys.argv:
    checkpoint = torch.load(CHECKPOINT)
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    run.resume_from(PER_EPOCH * first_epoch, epoch=first_epoch)
try:
    with run:
        train(run, first_epoch)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
