"""Resumes in the middle of the second epoch by skipping its first batches;
``--fixed`` restores the order first.
"""

import sys
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks import DetCallbacksError, TrainingRun

CHECKPOINT, SAVED = Path("mid_epoch.pt"), 5
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
shuffling = torch.Generator().manual_seed(1)
rows = torch.rand(16, 5, generator=torch.Generator().manual_seed(2))
loader = DataLoader(TensorDataset(rows), batch_size=4, shuffle=True, generator=shuffling)


def train(run: TrainingRun, first: int) -> None:
    for epoch in range(first // 4, 3):
        at_start = shuffling.get_state()
        skipped = max(first - 4 * epoch, 0)  # as accelerate.skip_first_batches does
        for number, (batch,) in enumerate(
            islice(run.batches(loader), skipped, None), start=4 * epoch + skipped
        ):
            with run.step((batch,)):
                loss = nn.functional.mse_loss(model(batch[:, :4]), batch[:, 4:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if number + 1 == SAVED and run.mode == "record":
                states = model.state_dict(), optimizer.state_dict(), at_start
                torch.save(
                    dict(zip(("model", "optimizer", "shuffling"), states, strict=True)), CHECKPOINT
                )


mode = "record" if "record" in sys.argv else "verify"
run = TrainingRun("refs/mid_epoch", mode=mode, model=model, optimizers=optimizer, overwrite=True)
if "resume" in sys.argv:
    checkpoint = torch.load(CHECKPOINT)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if "--fixed" in sys.argv:
        shuffling.set_state(checkpoint["shuffling"])
    run.resume_from(SAVED, epoch=SAVED // 4)
try:
    with run:
        train(run, SAVED if "resume" in sys.argv else 0)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
