"""One training in each way in: ``python ways.py WAY FAULT [resumed]`` for those that know
nothing of det_callbacks.

Each way trains the same model on the same batches in the same order, and plants the same faults.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, leaky_relu
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

NUM_STEPS, BATCH, AT = 6, 4, 3
"""Each training has so many steps of so many samples, and a fault in step AT;
a resume begins with it.
"""


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class Net(nn.Module):
    def __init__(self, fault: str = "", first: int = 0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.2)
        self.fault, self.step = fault, first

    def has(self, fault: str) -> bool:
        return self.fault == fault and self.step == AT

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        if self.has("state"):  # past torch, before the step, so that no op is to blame
            self.last.bias.detach().numpy()[0] += 1
        hidden = leaky_relu(self.first(inputs), 0.02 if self.has("forward") else 0.01)
        if self.has("rng"):
            torch.rand(1)
        outputs = self.last(Backward.apply(self.drop(hidden), 1.5 if self.has("backward") else 1.0))
        self.step += 1
        return (
            outputs
            if labels is None
            else {"loss": cross_entropy(outputs, labels), "logits": outputs}
        )


class Samples(Dataset[Any]):
    def __init__(self, fault: str = "", *, is_named: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(NUM_STEPS * BATCH, 6, generator=generator)
        if fault == "data":
            self.inputs[BATCH * AT] += 1
        self.is_named = is_named

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        pair = self.inputs[index], torch.tensor(index % 3)
        return {"inputs": pair[0], "labels": pair[1]} if self.is_named else pair


def seed(fault: str) -> None:
    torch.manual_seed(1 if fault == "seed" else 0)


def rate(fault: str) -> float:
    return 0.02 if fault == "settings" else 0.01


# loops


def save(path: Path, model: nn.Module, optimizer: Any) -> None:
    parts = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }
    torch.save(parts, path)


def load(path: Path, model: nn.Module, optimizer: Any) -> None:
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def load_generator(path: Path | None) -> None:
    """Restore it after the loader has begun, which draws a seed."""
    if path is not None:
        torch.set_rng_state(torch.load(path, weights_only=True)["rng"])


def plain(fault: str, checkpoint: Path | None, run: Any = None) -> None:
    """A loop without a framework; with ``run`` it calls a TrainingRun."""
    seed(fault)
    first = AT if checkpoint is not None else 0
    net = Net(fault, first)
    optimizer = AdamW(net.parameters(), lr=rate(fault))
    loader = DataLoader(Samples(fault), batch_size=BATCH)
    if run is not None:
        run = run(net, optimizer)
        if first:
            run.resume_from(first)
    if checkpoint is not None:
        load(checkpoint, net, optimizer)

    def loop(step: Callable[[Any], Any] | None) -> None:
        for number, batch in enumerate(loader):
            if number < first:
                continue
            if number == first:
                load_generator(checkpoint)
            if step is None:
                update(batch)
            else:
                with step(batch):
                    update(batch)
            if not fault and not first and number == AT - 1:
                save(Path("checkpoint.pt"), net, optimizer)

    def update(batch: Any) -> None:
        loss = net(*batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if run is None:
        loop(None)
    else:
        with run:
            loop(run.step)


def fabric(fault: str, checkpoint: Path | None) -> None:
    from lightning.fabric import Fabric

    seed(fault)
    first = AT if checkpoint is not None else 0
    prepared = Fabric(accelerator="cpu", devices=1)
    net = Net(fault, first)
    model, optimizer = prepared.setup(net, AdamW(net.parameters(), lr=rate(fault)))
    if checkpoint is not None:
        load(checkpoint, net, optimizer)
    for number, batch in enumerate(
        prepared.setup_dataloaders(DataLoader(Samples(fault), batch_size=BATCH))
    ):
        if number < first:
            continue
        if number == first:
            load_generator(checkpoint)
        loss = model(*batch)["loss"]
        optimizer.zero_grad()
        prepared.backward(loss)
        optimizer.step()
        if not fault and not first and number == AT - 1:
            save(Path("checkpoint.pt"), net, optimizer)


def accelerate(fault: str, checkpoint: Path | None) -> None:
    from accelerate import Accelerator, skip_first_batches

    seed(fault)
    first = AT if checkpoint is not None else 0
    prepared = Accelerator(cpu=True)
    net = Net(fault, first)
    loader = DataLoader(Samples(fault), batch_size=BATCH)
    model, optimizer, loader = prepared.prepare(
        net, AdamW(net.parameters(), lr=rate(fault)), loader
    )
    if checkpoint is not None:
        load(checkpoint, net, optimizer)
    for batch in skip_first_batches(loader, first) if first else loader:
        if net.step == first:
            load_generator(checkpoint)
        loss = model(*batch)["loss"]
        optimizer.zero_grad()
        prepared.backward(loss)
        optimizer.step()
        if not fault and not first and net.step == AT:
            save(Path("checkpoint.pt"), net, optimizer)


SCRIPTS: Mapping[str, Callable[[str, Path | None], None]] = {
    "plain": plain,
    "fabric": fabric,
    "accelerate": accelerate,
}


if __name__ == "__main__":
    way, planted, *words = sys.argv[1:]
    SCRIPTS[way](planted.removeprefix("none"), Path("checkpoint.pt") if words else None)
