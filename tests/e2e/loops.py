"""Training loops without a Trainer, by style, that can be recorded,
verified and made to fail anywhere.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks import TrainingRun

FEATURES, CLASSES = 12, 3
Plant = Callable[[int], None]


def samples() -> TensorDataset:
    """24 random samples that are the same at every call."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(24, FEATURES, generator=generator),
        torch.randint(CLASSES, (24,), generator=generator),
    )


def seed() -> None:
    for function in (random.seed, np.random.seed, torch.manual_seed):
        function(11)


class Net(nn.Module):
    """With dropout, whose draws are recorded, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, CLASSES)
        self.factor = 1.0  # a test plants a fault by it

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(inputs))))) * self.factor


class Loop:
    """A model, its optimizers and a loader, and one step of each style."""

    def __init__(
        self, model: nn.Module | None = None, *, optimizer: Any = torch.optim.AdamW
    ) -> None:
        seed()
        self.model = Net() if model is None else model
        self.optimizers: Sequence[Any] = [optimizer(self.model.parameters(), lr=1e-2)]
        self.loader = DataLoader(samples(), batch_size=4, shuffle=True)
        self.losses: list[float] = []
        self.plant: Plant = lambda step: None
        self.num_done = 0

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        loss = cross_entropy(self.model(inputs), labels)
        self.losses.append(loss.item())
        return loss

    def train_step(self, batch: Any) -> None:
        """The plainest style."""
        self.loss(batch).backward()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()

    def run(self, run: Any = None, *, epochs: int = 1, until: int | None = None) -> "Loop":
        for _ in range(epochs):
            for batch in self.loader if run is None else run.batches(self.loader):
                if self.num_done == until:
                    break
                self.plant(self.num_done)
                with nullcontext() if run is None else run.step(batch):
                    self.train_step(batch)
                self.num_done += 1
        return self


class Clipped(Loop):
    """Two batches of one optimizer's step within one step, whose gradients are clipped."""

    def train_step(self, batch: Any) -> None:
        inputs, labels = batch
        for part in ((inputs[:2], labels[:2]), (inputs[2:], labels[2:])):
            self.loss(part).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()


class Accumulating(Loop):
    """An optimizer's step every second step."""

    def train_step(self, batch: Any) -> None:
        self.loss(batch).backward()
        if self.num_done % 2:
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()


class Scaled(Loop):
    """Autocast and a GradScaler."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def train_step(self, batch: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizers[0])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self.optimizers[0].zero_grad()


class Adversarial(Loop):
    """Two models that are trained in turn, in one step."""

    def __init__(self) -> None:
        seed()
        generator, critic = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)
        super().__init__(nn.ModuleDict({"generator": generator, "critic": critic}))
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (critic, generator)]

    def train_step(self, batch: Any) -> None:
        inputs, _ = batch
        models: Any = self.model
        for number, optimizer in enumerate(self.optimizers):
            made = models["generator"](inputs)
            score = models["critic"](made if number else made.detach()).mean()
            loss = -score if number else score - models["critic"](inputs).mean()
            self.losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class Closure(Loop):
    """LBFGS, which calls forward and backward itself."""

    def __init__(self) -> None:
        super().__init__(
            optimizer=lambda parameters, lr: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)
        )

    def train_step(self, batch: Any) -> None:
        def closure() -> Tensor:
            self.optimizers[0].zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        self.optimizers[0].step(closure)


class Compiled(Loop):
    """A model that is compiled, and wrapped by it."""

    def __init__(self) -> None:
        seed()
        super().__init__(torch.compile(Net(), backend="aot_eager"))  # type: ignore[arg-type]


STYLES: dict[str, Callable[[], Loop]] = {
    "plain": Loop,
    "clipped": Clipped,
    "accumulating": Accumulating,
    "scaled": Scaled,
    "adversarial": Adversarial,
    "closure": Closure,
}


def train(
    make: Callable[[], Loop],
    reference: Path,
    *,
    plant: Any = None,
    epochs: int = 1,
    **arguments: Any,
) -> Any:
    loop = make()
    if plant is not None:
        loop.plant = lambda step: plant(loop, step)
    run = TrainingRun(reference, model=loop.model, optimizers=loop.optimizers, **arguments)
    with run:
        loop.run(run, epochs=epochs)
    return loop, run
