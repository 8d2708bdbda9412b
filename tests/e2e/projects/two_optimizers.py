"""A generative adversarial network: two optimizers and manual optimization."""

import lightning.pytorch as pl
import torch
from synthetic import QUIET, loader, planted
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 192))
        self.critic = nn.Sequential(nn.Linear(192, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real, (of_generator, of_critic) = batch[0].flatten(1), self.optimizers()
        fake = self.generator(torch.randn(len(real), 8))
        loss = loss_of(self.critic(fake), torch.ones(len(real), 1))
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        right, wrong = self.critic(real), self.critic(fake.detach())
        loss = loss_of(right, torch.ones_like(right)) + loss_of(wrong, torch.zeros_like(wrong))
        of_critic.zero_grad()
        self.manual_backward(planted(loss, batch_idx))
        of_critic.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(it.parameters(), lr=1e-3, betas=(0.5, 0.9))
            for it in (self.generator, self.critic)
        ]


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    pl.Trainer(max_epochs=1, accelerator="cpu", **QUIET).fit(Net(), loader())
