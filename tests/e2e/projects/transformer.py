"""GPT-2 and ViT of transformers, with random weights."""

import sys

import lightning.pytorch as pl
import torch
import transformers
from synthetic import QUIET, loader, planted
from torch import Tensor


class Net(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        sizes = {
            "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
        }
        if kind == "gpt2":
            self.net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes["gpt2"]))
        else:
            config = transformers.ViTConfig(
                hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                image_size=8, patch_size=4, num_labels=4,
            )  # fmt: skip
            self.net = transformers.ViTForImageClassification(config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        if self.kind == "gpt2":
            tokens = inputs.flatten(1)[:, :32].mul(8).long().remainder(64)
            return planted(self.net(input_ids=tokens, labels=tokens).loss, batch_idx)
        return planted(self.net(pixel_values=inputs, labels=labels).loss, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    pl.Trainer(max_epochs=1, accelerator="cpu", **QUIET).fit(Net(sys.argv[1]), loader())
