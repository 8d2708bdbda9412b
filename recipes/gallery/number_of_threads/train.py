"""A network whose sums several threads share, as many as the last word says;
``--fixed`` gives torch one thread.
"""

import sys

import torch
from torch import nn

from det_callbacks import DetCallbacksError, TrainingRun

torch.set_num_threads(1 if "--fixed" in sys.argv else int(sys.argv[-1]))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(28, 64), nn.ReLU(), nn.Linear(64, 28))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images = torch.rand(4, 4000, 28)


def train(run: TrainingRun) -> None:
    for batch in images:
        with run.step((batch,)):
            loss = nn.functional.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


try:
    with TrainingRun(
        "refs/threads", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
