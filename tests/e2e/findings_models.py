"""Models and callbacks that make the mistakes that findings name, and the nearest innocent ones."""

from typing import Any

import lightning.pytorch as pl
import torch
from findings_data import without_dropout
from fits import Classifier
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Plain(Classifier):
    """Without random draws in its steps."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(inputs))))


class WithoutNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(inputs)))


class SeedsEpochs(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.manual_seed(0)


class SeedsSteps(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.manual_seed(0)
        return super().training_step(batch, batch_idx)


class Attends(Plain):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(without_dropout(inputs))


class AttendsAndSeeds(SeedsSteps):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(without_dropout(inputs))


class Forks(Classifier):
    """Draws the same noise in each step from a generator that is put back, beside its dropout."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            noise = torch.randn(12)
        return super().training_step((batch[0] + noise, batch[1]), batch_idx)


class InFloat32(Plain):
    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(inputs)


class WithoutHead(Plain):
    is_trained = True

    def configure_optimizers(self) -> Any:
        if not self.is_trained:
            self.last.requires_grad_(False)
        return torch.optim.SGD([*self.first.parameters(), *self.norm.parameters()], lr=0.1)


class Unused(Plain):
    is_used = False

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(16, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        is_used = self.is_used and batch_idx == 2  # an expert that one step of four takes
        return (
            loss + cross_entropy(self.unused(torch.relu(self.first(batch[0]))), batch[1])
            if is_used
            else loss
        )


class NeverCleared(Plain):
    def optimizer_zero_grad(self, *_: Any) -> None:
        pass


class ClearsToZero(Plain):
    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer
    ) -> None:
        optimizer.zero_grad(set_to_none=False)


class Adversarial(Plain):
    """Clears the gradients of its critic, the last layer, after those of its
    generator were added to them.
    """

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        inputs, labels = batch
        of_generator.zero_grad()
        self.manual_backward(-cross_entropy(self(inputs), labels))
        of_generator.step()
        of_critic.zero_grad()
        self.manual_backward(cross_entropy(self(inputs), labels))
        of_critic.step()

    def configure_optimizers(self) -> Any:
        generator = [*self.first.parameters(), *self.norm.parameters()]
        return torch.optim.Adam(generator, lr=1e-3), torch.optim.Adam(
            self.last.parameters(), lr=1e-3
        )


class SlowHead(Plain):
    """Trains its head with a learning rate of zero, for good or in the first two steps."""

    for_good = True

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.first.parameters(), *self.norm.parameters()]},
            {"params": self.last.parameters()},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        rates = [lambda step: 1.0, lambda step: 0.0 if self.for_good or step < 2 else 1.0]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Dead(Plain):
    """All its ReLUs are dead, or only half of them."""

    bias = -1e4

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        nn.init.zeros_(self.last.bias)
        if self.bias:
            nn.init.constant_(self.first.bias, self.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.act(self.first(inputs)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.first.parameters(), lr=1e-2)


class Padded(Plain):
    fills = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        padded = torch.empty(len(inputs), 18)
        padded[:, :16] = hidden
        if self.fills:
            padded[:, 16:] = 0
        return self.last(hidden) + padded.nan_to_num().sum() * 0


class InEval(Plain):
    affine_is_trained = True

    def on_train_start(self) -> None:
        self.norm.eval()
        self.norm.requires_grad_(self.affine_is_trained)


class EndsInEval(Plain):
    """Its statistics stand still after the first epoch, as after a
    validation that called eval().
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.norm.train(self.current_epoch == 0)
        return super().training_step(batch, batch_idx)


class Averaged(Plain):
    updates = False

    def __init__(self) -> None:
        super().__init__()
        self.head_ema = nn.Linear(16, 3).requires_grad_(False)
        self.head_ema.load_state_dict(self.last.state_dict())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.updates:
            for average, parameter in zip(
                self.head_ema.parameters(), self.last.parameters(), strict=True
            ):
                average.lerp_(parameter.detach(), 0.1)
