"""A language model on padded documents, whose loss mask is cached; ``--fixed`` masks a copy."""

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from det_callbacks import DetCallbacksError, TrainingRun

PAD, LENGTH = 0, 12


class Documents(Dataset[dict[str, Tensor]]):
    """Tokens, and which of them count for the loss."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, 20, (32, LENGTH), generator=generator)
        for tokens, length in zip(
            self.tokens, torch.randint(6, LENGTH + 1, (32,), generator=generator), strict=True
        ):
            tokens[length:] = PAD
        self.cached_loss_mask = torch.ones(LENGTH)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        loss_mask = (
            self.cached_loss_mask.clone() if "--fixed" in sys.argv else self.cached_loss_mask
        )
        loss_mask[self.tokens[index] == PAD] = 0.0
        return {"tokens": self.tokens[index], "loss_mask": loss_mask}


torch.manual_seed(0)
loader = DataLoader(
    Documents(), batch_size=4, shuffle=True, num_workers=2 * ("--workers" in sys.argv)
)
model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(run: TrainingRun) -> None:
    for batch in run.batches(loader):
        with run.step(batch):
            tokens, mask = batch["tokens"], batch["loss_mask"][:, 1:].flatten()
            logits = model(tokens[:, :-1]).flatten(0, 1)
            losses = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
            optimizer.zero_grad()
            ((losses * mask).sum() / mask.sum().clamp(min=1)).backward()
            optimizer.step()


try:
    with TrainingRun(
        "refs/mask", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
