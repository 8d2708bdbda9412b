"""Small LightningModules, one for each style of training, and a function that trains one."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from trainers import quiet_trainer

FEATURES = 12
CLASSES = 3


class Samples(Dataset[Any]):
    """32 random samples that are the same at every call."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(32, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (32,), generator=generator)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.labels[index]


class Classifier(pl.LightningModule):
    """The plainest style; the others change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(inputs)))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        return cross_entropy(self(inputs), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Lbfgs(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Manual(Classifier):
    """Manual optimization with two optimizers and two backward passes through one graph."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        body, head = self.optimizers()
        logits = self(inputs)
        loss = cross_entropy(logits, labels)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(logits.square().mean() * 0.1)
        body.step()
        if batch_idx % 2:
            head.step()
        body.zero_grad()
        head.zero_grad()

    def configure_optimizers(self) -> Any:
        body = torch.optim.AdamW([*self.first.parameters(), *self.norm.parameters()], lr=1e-2)
        return body, torch.optim.SGD(self.last.parameters(), lr=1e-2)


class Undefined(torch.autograd.Function):
    """Has no gradient, which autograd hands on as None."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class UndefinedGradients(Classifier):
    """A module whose output gets None for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = nn.Linear(FEATURES, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + Undefined.apply(self.stopped(batch[0])).mean()


class Scripted(Classifier):
    """Of ops whose bits are the same before and after TorchScript has optimised them."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch says this of TorchScript as a whole
            self.first = torch.jit.script(nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU()))
            self.last = torch.jit.trace(self.last, torch.zeros(2, 16))


class Checkpointed(Classifier):
    """Checkpoints one region without reentry, and one with it."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs))
        hidden = checkpoint(lambda x: torch.tanh(self.drop(self.norm(x))) * 2, hidden, use_reentrant=False)
        return checkpoint(self.last, hidden, use_reentrant=True)


class Skipping(Classifier):
    """Ends each epoch after two batches by returning -1."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None


class Validated(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        self.log("loss", cross_entropy(self(inputs), labels))

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=16)


class Sparse(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.table(inputs.abs().long() % 20).mean(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


STYLES: dict[str, tuple[type[Classifier], dict[str, Any]]] = {
    "plain": (Classifier, {}),
    "accumulation": (Scheduled, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "lbfgs": (Lbfgs, {}),
    "manual": (Manual, {}),
    "undefined_gradients": (UndefinedGradients, {}),
    "scripted": (Scripted, {}),
    "bf16_mixed": (Classifier, {"precision": "bf16-mixed"}),
    "checkpoint": (Checkpointed, {}),
    "sparse": (Sparse, {}),
    "skipping": (Skipping, {}),
    "validated": (Validated, {"val_check_interval": 2, "num_sanity_val_steps": 1, "limit_val_batches": 2}),
}


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else None
        self.values.append(None if loss is None else loss.detach().clone())


def train(
    module: Callable[[], pl.LightningModule], *callbacks: pl.Callback, epochs: int = 2, **options: Any
) -> tuple[pl.LightningModule, list[Any], dict[str, Any]]:
    """Train from fixed seeds; return the module, its losses and the generator states afterwards."""
    torch.manual_seed(11)
    np.random.seed(11)
    model = module()
    losses = Losses()
    loader = DataLoader(Samples(), batch_size=8, shuffle=True, collate_fn=getattr(model, "collate", None))
    quiet_trainer(losses, *callbacks, max_epochs=epochs, **options).fit(model, loader)
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state()[1].tolist()}
    return model, losses.values, states
