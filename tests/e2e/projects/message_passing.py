"""Message passing as torch_geometric has it; the sum over a node's messages takes them
in any order, as on a GPU.
"""

import os

import lightning.pytorch as pl
import torch
from synthetic import QUIET, planted
from torch import Tensor, library, nn
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks import DeterminismCallback  # added for det_callbacks

EDGES = torch.randint(12, (2, 60), generator=torch.Generator().manual_seed(2))


@library.custom_op("project::scatter_sum", mutates_args=())
def scatter_sum(messages: Tensor, target: Tensor) -> Tensor:
    order = torch.tensor(sorted(range(len(target)), key=lambda _: os.urandom(4)))
    return torch.zeros(12, messages.shape[1]).index_add_(0, target[order], messages[order])


def keep(ctx: object, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.target = inputs[1]  # type: ignore[attr-defined]


scatter_sum.register_autograd(
    lambda ctx, gradient: (gradient[ctx.target], None), setup_context=keep
)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(8, 16), nn.Linear(16, 4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        nodes, labels = batch[0][0], batch[1][0]
        sums = scatter_sum(torch.relu(self.message(nodes[EDGES[0]])), EDGES[1])
        return nn.functional.cross_entropy(self.update(planted(sums, batch_idx)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(4, 12, 8), torch.randint(4, (4, 12)))
    # added for det_callbacks
    mode, run, replay = (os.environ.get(name) for name in ("MODE", "RUN", "REPLAY"))
    # added for det_callbacks
    callback = DeterminismCallback(run, mode=mode, current=mode, replay=replay)
    # added for det_callbacks
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **QUIET)
    trainer.fit(Net(), DataLoader(data))
