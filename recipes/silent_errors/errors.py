"""TrainCheck's silent errors by mechanism, each in a small training with and without the mistake.

One training has what all have; an error changes a part of it.
"""

import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from det_callbacks import TrainingRun

FEATURES, CLASSES = 12, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 16), nn.LayerNorm(16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(inputs))))


class Training:
    """A correct training; ``is_fixed`` is whether an error is left out."""

    world_size = 1
    num_workers = 0

    def __init__(self, is_fixed: bool) -> None:
        self.is_fixed = is_fixed
        self.rank = int(os.environ.get("RANK", "0"))
        self.num_done = 0
        torch.manual_seed(0)
        self.net = Net()
        self.build()

    def build(self) -> None:
        self.model: nn.Module = self.net

    def make_optimizer(self) -> torch.optim.Optimizer:
        trained = [one for one in self.net.parameters() if one.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)

    def data(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(256, FEATURES, generator=generator)
        return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))

    def loader(self) -> DataLoader[Any]:
        """Return a loader of the rank's share."""
        data = self.data()
        share = range(self.rank, len(data), self.world_size)  # type: ignore[arg-type]
        return DataLoader(data, batch_size=8, sampler=share, num_workers=self.num_workers)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.model(inputs), labels)

    def update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def step(self, batch: Any) -> None:
        self.update(self.loss(*batch))
        self.num_done += 1

    def record(self, folder: Path) -> None:
        self.optimizer = self.make_optimizer()
        run = TrainingRun(folder, mode="record", model=self.model, optimizers=self.optimizer)
        with run:
            for batch in run.batches(self.loader()):
                with run.step(batch):
                    self.step(batch)


class FrozenLayers(Training):
    """All layers but the norms are frozen, the new last layer too."""

    def build(self) -> None:
        super().build()
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(self.is_fixed or "norm" in name)


class NoZeroGrad(Training):
    """zero_grad is missing."""

    def update(self, loss: Tensor) -> None:
        if self.is_fixed:
            self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class Replicated(Training):
    world_size = 2

    def build(self) -> None:
        self.model = DistributedDataParallel(self.net)


class MovedAfterWrapping(Replicated):
    """The model moves to another device after DDP wrapped it,
    so DDP's hooks are on parameters that nothing uses.
    """

    def build(self) -> None:
        super().build()
        if not self.is_fixed:
            for module in self.net.modules():
                for name, parameter in [*module.named_parameters(recurse=False)]:
                    setattr(module, name, nn.Parameter(parameter.detach().clone()))


class Unwrapped(Replicated):
    """From step 8 on the loss comes from the inner module, so DDP averages no gradient."""

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        model = self.net if not self.is_fixed and self.num_done >= 8 else self.model
        return cross_entropy(model(inputs), labels)


class LostTransfer(Training):
    """Gradients are averaged, and from step 6 on what rank 1 receives of
    one of them is lost: zeros.
    """

    world_size = 2

    def update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        for name, parameter in self.net.named_parameters():
            dist.all_reduce(parameter.grad)
            if not self.is_fixed and self.rank == 1 and self.num_done > 5 and name == "last.weight":
                parameter.grad.zero_()
            parameter.grad /= 2
        self.optimizer.step()


class ClippedOnOneRank(LostTransfer):
    """Each rank has a part of the first layer; the clipping of the shared norms
    forgets all ranks but the first.
    """

    def build(self) -> None:
        torch.manual_seed(self.rank)
        nn.init.normal_(self.net.first.weight)
        super().build()

    def update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        shared = [one for name, one in self.net.named_parameters() if not name.startswith("first")]
        for parameter in shared:
            dist.all_reduce(parameter.grad)
        limit = 10.0 if self.num_done < 8 else 0.1
        if self.is_fixed or self.rank == 0:
            nn.utils.clip_grad_norm_(shared, limit)
        self.optimizer.step()


class EqualWorkers(Training):
    """Each worker augments with a copy of one NumPy generator."""

    num_workers = 2

    def data(self) -> Dataset[Any]:
        class Noise(Dataset[Any]):
            generators: ClassVar[dict[int, np.random.Generator]] = {}
            shared = np.random.default_rng(0)

            def __len__(self) -> int:
                return 256

            def __getitem__(self, _: int) -> tuple[Tensor, int]:
                worker = torch.utils.data.get_worker_info()
                assert worker is not None
                own = self.generators.setdefault(worker.id, np.random.default_rng(worker.id))
                sample = (own if is_fixed else self.shared).standard_normal(
                    FEATURES, dtype=np.float32
                )
                return torch.from_numpy(sample), int(sample[:CLASSES].argmax())

        is_fixed = self.is_fixed
        return Noise()


class StopsUpdating(Training):
    """From step 5 on, the gradients are None when the optimizer updates the parameters."""

    def update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        if not self.is_fixed and self.num_done >= 5:
            self.optimizer.zero_grad()
        self.optimizer.step()


class StagesTrained(Training):
    """What freezes the first stage is never called."""

    def build(self) -> None:
        super().build()
        self.net.first.requires_grad_(not self.is_fixed)


class SpectralInEval(Training):
    """A spectrally normalised layer runs in eval mode, which never brings its
    vectors up to date.
    """

    def build(self) -> None:
        nn.utils.spectral_norm(self.net.first)
        super().build()
        self.net.train(self.is_fixed)


class DropoutInEval(Training):
    """A teacher in eval mode drops out, because the rate does not depend on its mode."""

    def build(self) -> None:
        self.teacher = Net().requires_grad_(False).eval()
        self.model = nn.ModuleDict({"student": self.net, "teacher": self.teacher})

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        active = self.teacher.training if self.is_fixed else True
        soft = self.teacher(dropout(inputs, 0.2, active)).softmax(1)
        outputs = self.net(inputs)
        return cross_entropy(outputs, labels) + cross_entropy(outputs, soft)


class InitialisedTwice(Training):
    """The weights are initialised again after they were tied or loaded."""

    def build(self) -> None:
        super().build()
        if not self.is_fixed:
            self.net.apply(
                lambda one: one.reset_parameters() if isinstance(one, nn.Linear) else None
            )


class GeneratesTooMuch(Training):
    """A limit on generated tokens counts the prompt before it is cut."""

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(2 if self.is_fixed else 5):
                inputs = inputs + self.net(inputs).mean(1, keepdim=True)
        return super().loss(inputs, labels)


class LosesImages(Training):
    """The processor makes one entry of all texts of a batch."""

    def step(self, batch: Any) -> None:
        inputs, labels = batch
        super().step((inputs, labels) if self.is_fixed else (inputs[:1], labels[:1]))


class SkipsAutocast(Training):
    """Compiled functions do not see autocast: the model computes in float32,
    under a Trainer with bf16-mixed.
    """

    def record(self, folder: Path) -> None:
        import lightning.pytorch as pl

        from det_callbacks import DeterminismCallback

        training = self

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = training.net

            def training_step(self, batch: Any, _: int) -> Tensor:
                with nullcontext() if training.is_fixed else torch.autocast("cpu", enabled=False):
                    return cross_entropy(self.net(batch[0]).float(), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return training.make_optimizer()

        quiet = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        callback = DeterminismCallback(folder, mode="record")
        trainer = pl.Trainer(
            accelerator="cpu", precision="bf16-mixed", max_epochs=1, callbacks=[callback], **quiet
        )
        trainer.fit(Module(), self.loader())


ERRORS: dict[str, type[Training] | None] = {
    "pytorch-forum-84911": FrozenLayers,
    "stackoverflow-60335387": NoZeroGrad,
    "stackoverflow-67180955": EqualWorkers,
    "pytorch-104336": MovedAfterWrapping,
    "x-jxmnop-ddp-out-of-sync": Unwrapped,
    "pytorch-84803": LostTransfer,
    "pytorch-96600": LostTransfer,
    "baichuan2-86": LostTransfer,
    "deepspeed-1801": ClippedOnOneRank,
    "pytorch-115607": StopsUpdating,
    "pytorch-51800": SpectralInEval,
    "lightning-thunder-725": SkipsAutocast,
    "mmpretrain-702": StagesTrained,
    "transformers-17877": InitialisedTwice,
    "transformers-23723": GeneratesTooMuch,
    "transformers-33844": DropoutInEval,
    "transformers-34204": LosesImages,
    "deepspeed-5794": None,  # the ranks wait for each other for ever, so there is no run
}


def train(rank: int, name: str, folder: Path, is_fixed: bool) -> None:
    """Record one error, or the training without it, as one process of all."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    training = ERRORS[name]
    assert training is not None
    size = training.world_size
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}.store", rank=rank, world_size=size
        )
    training(is_fixed).record(folder)
    if size > 1:
        dist.destroy_process_group()
