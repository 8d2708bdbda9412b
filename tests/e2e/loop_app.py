"""Training loops that know nothing of det_callbacks: ``python train.py
STYLE [seed] [planted] [lr]``.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

WORDS = set(sys.argv[2:])
if "unseeded" not in WORDS:
    torch.manual_seed(1 if "seed" in WORDS else 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)
        self.factor = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.first(inputs)))) * self.factor

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.last(self.first(inputs)) * self.factor, labels)


class Critic(Net):
    pass


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 if "lr" in WORDS else 0.01)
generator = torch.Generator().manual_seed(3)
samples = TensorDataset(
    torch.randn(24, 6, generator=generator), torch.randint(3, (24,), generator=generator)
)
loader = DataLoader(samples, batch_size=4, shuffle=True)
held_out = DataLoader(samples, batch_size=8)
num_trained = 0


def plant() -> None:
    global num_trained
    model.factor = 1.001 if "planted" in WORDS and num_trained == 3 else 1.0
    num_trained += 1


def update(loss: Tensor) -> None:
    loss.backward()
    if "skipped" not in WORDS or num_trained != 3:
        optimizer.step()
    if "uncleared" not in WORDS or num_trained != 3:
        optimizer.zero_grad()


@torch.inference_mode()
def validate_in_inference_mode() -> None:
    model.eval()
    for inputs, _ in held_out:
        model(inputs)
    model.train()


def plain() -> None:
    for epoch in range(2):
        if not epoch or "in_eval" not in WORDS:
            model.train()
        for inputs, labels in loader:
            plant()
            update(cross_entropy(model(inputs), labels))
        model.eval()
        for inputs, labels in held_out:
            with torch.no_grad():
                print("validation", cross_entropy(model(inputs), labels).item())
        if "draws" in WORDS:
            torch.rand(1)


def views() -> None:
    """The model gets a view into what the loader gave, as a language model
    gets all tokens but the last.
    """
    for inputs, labels in loader:
        plant()
        update(cross_entropy(model(inputs[:, :6]), labels))


class Stateful(DataLoader[Any]):
    """Makes its iterator itself, as torchdata's StatefulDataLoader does."""

    def __iter__(self) -> Any:
        return self._get_iterator()


def own_iterator() -> None:
    for _ in range(2):
        for inputs, labels in Stateful(samples, batch_size=4, shuffle=True):
            plant()
            update(cross_entropy(model(inputs), labels))


def restarted() -> None:
    """Each step takes the first batch of a new iteration."""
    in_order = DataLoader(samples, batch_size=24 if "whole" in WORDS else 4)
    for _ in range(6):
        inputs, labels = next(iter(in_order))
        update(cross_entropy(model(inputs), labels))


class Unshared(IterableDataset[Any]):
    """Each worker reads all of it."""

    def __iter__(self) -> Any:
        return iter(samples)


def workers() -> None:
    """Each epoch has a loader of its own, which only its iterator outlives."""
    for _ in range(2):
        for inputs, labels in DataLoader(Unshared(), batch_size=4, num_workers=2):
            update(cross_entropy(model(inputs), labels))


def left_in_eval() -> None:
    """Trains in eval mode, on batches of another loader than before."""
    for epoch in range(2):
        for inputs, labels in held_out if epoch else loader:
            update(cross_entropy(model(inputs), labels))
        model.eval()


def validates_with_gradients() -> None:
    for inputs, labels in loader:
        update(cross_entropy(model(inputs), labels))
        if "unvalidated" not in WORDS:
            model.eval()
            for number in range(3):
                model(samples.tensors[0][number : number + 4])
            model.train()


def accumulation() -> None:
    """Six batches, two a step, each drawn before the one before is trained on;
    a validation in between.
    """
    batches = iter(loader)
    inputs, labels = next(batches)
    for number in range(6):
        ahead = next(batches, None)
        if number % 2 == 0:
            plant()
        cross_entropy(model(inputs), labels).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            validate_in_inference_mode()
        if ahead is not None:
            inputs, labels = ahead


def uneven() -> None:
    """Five batches, two a step, and a last one without an update;
    the weights are averaged after each update.
    """
    mean = [parameter.detach().clone() for parameter in model.parameters()]
    order = [*range(6), 7, 6, *range(8, 24)] if "swapped" in WORDS else range(24)
    for number, (inputs, labels) in enumerate(DataLoader(samples, batch_size=5, sampler=order)):
        plant()
        cross_entropy(model(inputs * 2), labels).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for average, parameter in zip(mean, model.parameters(), strict=True):
                average.lerp_(parameter.detach(), 0.2 if "average" in WORDS else 0.1)


def gan() -> None:
    critic = Critic()
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    for inputs, labels in loader:
        with torch.no_grad():
            made = model(inputs)
        loss = cross_entropy(critic(inputs), labels) - critic(torch.cat([made, made], 1)).mean()
        second.zero_grad()
        loss.backward()
        second.step()
        plant()
        update(critic(torch.cat([model(inputs)] * 2, 1)).mean())


def without_loader() -> None:
    inputs, labels = samples.tensors
    for step in range(3 if "short" in WORDS else 5):
        chosen = torch.randint(24, (4,))
        if "undrawn" in WORDS and step == 2:
            chosen = torch.tensor([1, 2, 3, 4])
        plant()
        update(cross_entropy(model(inputs[chosen]), labels[chosen]))
        if step == 2:
            model.eval()
            with torch.no_grad():
                print("validation", cross_entropy(model(inputs), labels).item())
            model.train()


def scaler() -> None:
    scaler = torch.amp.GradScaler("cpu")
    for inputs, labels in loader:
        plant()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def called_at_the_end() -> None:
    without_loader()
    model(samples.tensors[0])


def closure() -> None:
    global optimizer
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.9 if "lr" in WORDS else 1.0, max_iter=3)
    inputs, labels = samples.tensors

    def compute() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    for _ in range(4):
        plant()
        optimizer.step(compute)
        with torch.no_grad():
            model(inputs)


def parts() -> None:
    """The model is never called itself, and never put into training mode."""
    model.eval()
    for inputs, labels in loader:
        plant()
        update(model.loss(inputs, labels))


def folds() -> None:
    global model, optimizer
    for _ in range(2):
        for inputs, labels in loader:
            plant()
            update(cross_entropy(model(inputs), labels))
        model = Critic()
        optimizer = torch.optim.AdamW(model.parameters())


def compiled() -> None:
    """The graphs are those without us; a validation on the same batch follows each step."""
    wrapped = torch.compile(model, backend="aot_eager")
    for inputs, labels in loader:
        update(cross_entropy(wrapped(inputs), labels))
        with torch.no_grad():
            wrapped(inputs)
    counters = torch._dynamo.utils.counters
    print("weights", counters["stats"]["unique_graphs"], dict(counters["graph_break"]))


def fabric() -> None:
    """Lightning's Fabric, which wraps the model, the optimizer and the loader."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
    for inputs, labels in fabric.setup_dataloaders(loader):
        plant()
        fabric.backward(cross_entropy(wrapped(inputs), labels))
        wrapped_optimizer.step()
        wrapped_optimizer.zero_grad()


def by_hand() -> None:
    """No optimizer steps."""
    for inputs, labels in loader:
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)


def without_optimizer() -> None:
    global optimizer
    del optimizer
    by_hand()


def functional() -> None:
    """The second step calls no module."""
    for number, (inputs, _) in enumerate(loader):
        outputs = nn.functional.linear(inputs, model.first.weight) if number else model(inputs)
        update(outputs.mean())


def caught() -> None:
    """What ends the run is caught."""
    try:
        functional()
    except Exception as error:
        print("caught", type(error).__name__)


def broken() -> None:
    plain()
    raise ZeroDivisionError("the script's own error")


def own() -> None:
    """The script has a run of its own."""
    from det_callbacks import TrainingRun

    with TrainingRun("own", mode="record", model=model, optimizers=optimizer, level="state") as run:
        for batch in run.batches(loader):
            with run.step(batch):
                update(cross_entropy(model(batch[0]), batch[1]))


globals()[sys.argv[1]]()
print(
    "weights",
    sum(parameter.double().abs().sum().item() for parameter in model.parameters()),
    torch.rand(1).item(),
)
