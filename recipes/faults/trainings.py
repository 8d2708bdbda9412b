"""Small trainings of many kinds, which repeat themselves bit for bit:
in each a fault can be planted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    embedding_bag,
    mse_loss,
)
from torch.utils.checkpoint import checkpoint

STEPS = 4
BATCH = 8
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(slots=True, kw_only=True)
class Training:
    """A model, what it is trained on, and how one step of it is done;
    ``phase`` says what a step is doing.
    """

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    loss: Loss
    optimizer: torch.optim.Optimizer
    num_parts: int = 1  # of a batch, whose gradients are added up
    clip: float | None = None
    autocast: bool = False
    before_update: Callable[[], None] | None = None
    phase: str = ""

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        inputs, targets = batch
        self.optimizer.zero_grad()
        for part, wanted in zip(
            inputs.chunk(self.num_parts), targets.chunk(self.num_parts), strict=True
        ):
            self.phase = "forward"
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
                loss = self.loss(self.model, part, wanted)
            self.phase = "backward"
            loss.backward()
        self.phase = "gradient"
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.before_update is not None:
            self.before_update()
        self.phase = "optimizer"
        self.optimizer.step()
        self.phase = ""


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.relu(self.up(self.norm(inputs))))


class Checkpointed(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        for block in self:
            inputs = checkpoint(block, inputs, use_reentrant=False)
        return inputs


class LanguageModel(nn.Module):
    """A transformer whose head has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embed(tokens)) @ self.embed.weight.T


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.new_zeros(len(inputs), 16)
        for moment in inputs.unbind(1):
            hidden = self.cell(moment, hidden)
        return self.head(hidden)


class GraphNet(nn.Module):
    """Sums what the edges of a node carry."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        generator = torch.Generator().manual_seed(4)
        self.register_buffer("source", torch.randint(BATCH, (30,), generator=generator))
        self.register_buffer("target", torch.randint(BATCH, (30,), generator=generator))

    def forward(self, nodes: Tensor) -> Tensor:
        messages = torch.relu(self.message(nodes))[self.source]
        return self.head(torch.zeros(len(nodes), 16).index_add(0, self.target, messages))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(24, 16) * 0.1), nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(embedding_bag(tokens, self.table, mode="mean")))


class Adversarial(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__(
            {
                "generator": nn.Linear(8, 8),
                "critic": nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)),
            }
        )


def classify(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(inputs), labels)


def predict_next(model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def reconstruct(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return mse_loss(model(inputs), inputs)


def compete(model: Any, inputs: Tensor, _: Tensor) -> Tensor:
    made, real = model["critic"](model["generator"](inputs)), model["critic"](inputs)
    wanted = torch.cat([torch.zeros_like(made), torch.ones_like(real)])
    return binary_cross_entropy_with_logits(torch.cat([made, real]), wanted)


def rows(*shape: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(BATCH, *shape, generator=generator),
            torch.randint(3, (BATCH,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def texts(length: int, *, is_classified: bool = False) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(24, (STEPS, BATCH, length + 1), generator=generator)
    labels = torch.randint(3, (STEPS, BATCH), generator=generator)
    if is_classified:
        return [*zip(tokens[:, :, :-1].clone(), labels, strict=True)]
    return [*zip(tokens[:, :, :-1].clone(), tokens[:, :, 1:].clone(), strict=True)]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), Residual(16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3)
    )


def convolutions() -> nn.Module:
    first = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, nn.Conv2d(6, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(32, 3))


def made(
    make: Callable[[], nn.Module],
    batches: Any,
    loss: Loss,
    optimizer: Callable[..., Any],
    **options: Any,
) -> Callable[[], Training]:
    """Return what makes a training anew, from the same seed."""
    of_training = {
        name: options.pop(name) for name in ("num_parts", "clip", "autocast") if name in options
    }

    def training() -> Training:
        torch.manual_seed(11)
        model = make()
        updates = optimizer(model.parameters(), **{"lr": 1e-2, **options})
        return Training(model=model, batches=batches(), loss=loss, optimizer=updates, **of_training)

    return training


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
KINDS: dict[str, Callable[[], Training]] = {
    "mlp": made(mlp, lambda: rows(8), classify, ADAMW),
    "mlp, foreach": made(mlp, lambda: rows(8), classify, ADAMW, foreach=True),
    "mlp, fused": made(mlp, lambda: rows(8), classify, ADAMW, fused=True),
    "mlp, momentum": made(
        mlp, lambda: rows(8), classify, SGD, momentum=0.9, nesterov=True, weight_decay=1e-4
    ),
    "mlp, RMSprop": made(mlp, lambda: rows(8), classify, torch.optim.RMSprop),
    "accumulated and clipped": made(mlp, lambda: rows(8), classify, ADAMW, num_parts=2, clip=0.1),
    "bfloat16 autocast": made(mlp, lambda: rows(8), classify, ADAMW, autocast=True),
    "convolutions": made(convolutions, lambda: rows(2, 8, 8), classify, SGD, momentum=0.9),
    "transformer": made(LanguageModel, lambda: texts(6), predict_next, ADAMW),
    "recurrent": made(Recurrent, lambda: rows(4, 8), classify, ADAMW),
    "graph": made(GraphNet, lambda: rows(8), classify, ADAMW),
    "bags": made(Bags, lambda: texts(5, is_classified=True), classify, torch.optim.Adagrad),
    "checkpointed": made(
        lambda: nn.Sequential(Checkpointed(*(Residual(8) for _ in range(3))), nn.Linear(8, 3)),
        lambda: rows(8),
        classify,
        ADAMW,
    ),
    "autoencoder": made(
        lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8)),
        lambda: rows(8),
        reconstruct,
        ADAMW,
    ),
    "adversarial": made(Adversarial, lambda: rows(8), compete, SGD),
}
