"""Small models, one for each style of training, and fits of them that can be repeated
and made to fail anywhere.
"""

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from faults import OnGradient
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from nondeterministic_ops import NoisyGradient, noisy, noisy_
from replaced_page import NAMES
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback
from det_callbacks.settings.generators import GeneratorStates
from det_callbacks.training.session import Steps

FEATURES = 12
CLASSES = 3


class Samples(TensorDataset):
    """32 random samples that are the same at every call."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(32, FEATURES, generator=generator)
        super().__init__(inputs, torch.randint(CLASSES, (32,), generator=generator))


class Classifier(pl.LightningModule):
    """The plainest style; the others change one thing."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        super().__init__()
        self.make_optimizer = partial(optimizer, **{"lr": 1e-2, **options})
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
        return self.make_optimizer(self.parameters())


class Noisy(Classifier):
    """Nondeterministic in its forward, in its backward, in place and in a
    number that it reads back.

    What a relu saves is an output put back.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = NoisyGradient.apply(torch.relu(noisy(self.first(inputs))))
        scratch = torch.zeros_like(hidden)
        noisy_(scratch[:, 1:])
        return self.last(hidden + scratch) * noisy(torch.ones(())).item()


class Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


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


class Scripted(Classifier):
    """Of ops whose bits are the same before and after TorchScript has optimised them."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # torch says this of TorchScript as a whole; what was compiled
            # before can still be trained
            warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated")
            self.first = torch.jit.script(
                nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU())
            )
            self.last = torch.jit.trace(self.last, torch.zeros(2, 16))


class Checkpointed(Classifier):
    """Checkpoints one region without reentry, and one with it;
    and the output of a module gets None for a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stopped = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs))
        hidden = checkpoint(
            lambda x: torch.tanh(self.drop(self.norm(x))) * 2, hidden, use_reentrant=False
        )
        undefined = OnGradient.apply(self.stopped(inputs), lambda gradient: None)
        return checkpoint(self.last, hidden, use_reentrant=True) + undefined


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
        super().__init__(torch.optim.SGD, lr=0.1)
        self.table = nn.Embedding(20, 16, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.table(inputs.abs().long() % 20).mean(1))


STYLES: dict[str, tuple[Callable[[], Classifier], dict[str, Any]]] = {
    "plain": (Classifier, {}),
    "accumulation": (Scheduled, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "lbfgs": (partial(Classifier, torch.optim.LBFGS, lr=0.1, max_iter=2), {}),
    "manual": (Manual, {}),
    "scripted": (Scripted, {}),
    "bf16_mixed": (Classifier, {"precision": "bf16-mixed"}),
    "checkpoint": (Checkpointed, {}),
    "sparse": (Sparse, {}),
    "skipping": (Skipping, {}),
    "validated": (
        Validated,
        {"val_check_interval": 2, "num_sanity_val_steps": 1, "limit_val_batches": 2},
    ),
}


class StopError(Exception):
    """What a test raises."""


class Plain(Classifier):
    """Of nothing but ops that other modes leave as they are."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(inputs)))


class Steady(Classifier):
    """Without random draws, so that a resumed run has the bits of an uninterrupted one."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(inputs))))


class RaiseAt(pl.Callback):
    """Raises at the third call of one hook, or in the backward pass of
    the third step ("backward").
    """

    def __init__(self, hook: str, error: BaseException, *, call: int = 3) -> None:
        self.num_calls = 0

        def raise_it(*_: Any, **__: Any) -> None:
            self.num_calls += 1
            if self.num_calls == call:
                raise error

        if hook == "backward":
            self.on_before_backward = lambda trainer, module, loss: loss.register_hook(raise_it)
        else:
            setattr(self, hook, raise_it)


class Fit:
    """One Trainer, one model and one loader, so that a test can fit more than once."""

    def __init__(
        self, *callbacks: pl.Callback, model: Callable[[], Any] = Classifier, **options: Any
    ) -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(11)
        self.model = model()
        self.trainer = quiet_trainer(*callbacks, **options)
        # a generator of its own: a loader draws from the global one at each epoch's start otherwise
        self.loader = DataLoader(Samples(), batch_size=8, generator=torch.Generator())

    def run(self, **options: Any) -> "Fit":
        self.trainer.fit(self.model, self.loader, **options)
        return self

    def again(self, *, epochs: int) -> "Fit":
        self.trainer.fit_loop.max_epochs = epochs
        return self.run()


def train(
    model: Callable[[], Any], *callbacks: pl.Callback, epochs: int = 2, **options: Any
) -> tuple[pl.LightningModule, list[Any], GeneratorStates]:
    losses = []

    def note_loss(trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        loss = (outputs or {}).get("loss")
        losses.append(loss if loss is None else loss.item())

    watching = LambdaCallback(on_train_batch_end=note_loss)
    fit = Fit(watching, *callbacks, model=model, max_epochs=epochs, **options)
    fit.loader = DataLoader(Samples(), batch_size=8, shuffle=True)
    return fit.run().model, losses, GeneratorStates.capture()


def record(folder: Path, **options: Any) -> Path:
    Fit(DeterminismCallback(folder, mode="record"), **options).run()
    return folder


def assert_nothing_left(fit: Fit, callback: DeterminismCallback) -> None:
    """Nothing that a fit needs is there after it; what is global is watched for
    every test by the conftest.
    """
    assert _get_current_dispatch_mode_stack() == []
    assert type(callback._hooks) is Steps
    loop = fit.trainer.fit_loop
    owners = (fit.trainer.strategy, loop, loop.epoch_loop, loop.epoch_loop._results)
    replaced = {name for owner in owners for name in NAMES if name in vars(owner)}
    assert replaced <= {"save_checkpoint", "load_checkpoint", "remove_checkpoint"}
    assert type(loop._combined_loader) in (CombinedLoader, type(None))
    assert type(fit.loader.batch_sampler) is BatchSampler
    # a verification has one
    writer = getattr(callback._session.run, "_writer", callback._session.run)
    assert writer is None or writer._file is None
