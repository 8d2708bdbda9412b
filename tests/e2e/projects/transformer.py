"""GPT-2 of transformers with random weights, in bfloat16, with accumulated and clipped gradients."""

import lightning.pytorch as pl
import torch
import transformers
from synthetic import QUIET, loader, planted
from torch import Tensor


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
        self.net = transformers.GPT2LMHeadModel(config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens = batch[0].flatten(1)[:, :32].mul(8).long().remainder(64)
        return planted(self.net(input_ids=tokens, labels=tokens).loss, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    options = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    pl.Trainer(max_epochs=1, accelerator="cpu", **options, **QUIET).fit(Net(), loader())
