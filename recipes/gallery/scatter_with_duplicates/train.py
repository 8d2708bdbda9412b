"""Messages gathered by an index with duplicates; ``--fixed`` asks torch for
deterministic algorithms.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from det_callbacks import DetCallbacksError, TrainingRun

torch.set_num_threads(2)  # one thread would add in one order
if "--fixed" in sys.argv:
    torch.use_deterministic_algorithms(True)


class MessagePassing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.node, self.head = nn.Linear(8, width), nn.Linear(width, 1)

    def forward(self, nodes: Tensor, source: Tensor) -> Tensor:
        # the backward pass of the index adds up what the edges of a node send back
        return self.head(torch.tanh(self.node(nodes)[source]))


torch.manual_seed(0)
nodes, source, targets = torch.rand(40, 8), torch.randint(40, (60_000,)), torch.rand(60_000, 1)
model = MessagePassing(16)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def train(run: TrainingRun) -> None:
    for _step in range(12):
        with run.step((nodes, source, targets)):
            loss = mse_loss(model(nodes, source), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


try:
    with TrainingRun(
        "refs/scatter", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
