"""The networks that the cost is measured on, each with batches of the size given in the README."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tiny import TINY
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

VOCABULARY = 50_257
SEQUENCE = 128
CPU = torch.device("cpu")


class MLP(nn.Module):
    """Three linear layers, 64 -> 256 -> 256 -> 10; one step with AdamW is 113 ops."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, approximate: str = "none") -> None:
        super().__init__()
        self.heads = heads
        self.approximate = approximate
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(gelu(self.expand(self.norm2(x)), approximate=self.approximate))


class Transformer(nn.Module):
    """A GPT-2-like decoder: 6 layers, 384 wide, 6 heads, tied embeddings of 50,257 tokens."""

    def __init__(
        self,
        width: int = 384,
        layers: int = 6,
        heads: int = 6,
        *,
        vocabulary: int | None = None,
        context: int | None = None,
        approximate: str = "none",
    ) -> None:
        super().__init__()
        vocabulary = VOCABULARY if vocabulary is None else vocabulary
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(SEQUENCE if context is None else context, width)
        self.blocks = nn.ModuleList(Block(width, heads, approximate) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPT2(Transformer):
    """GPT-2 of 124M parameters: 12 layers, 768 wide, 12 heads, a context of 1,024;
    without dropout.
    """

    def __init__(
        self,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        vocabulary: int = 50_257,
        context: int = 1024,
    ) -> None:
        super().__init__(
            width, layers, heads, vocabulary=vocabulary, context=context, approximate="tanh"
        )


class ResidualBlock(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """An 18-layer residual network for 3 x 96 x 96 images and 1,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.blocks = nn.Sequential(*(ResidualBlock(*shape) for shape in widths))
        self.head = nn.Linear(512, 1000)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Bottleneck(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(self.relu(self.norm2(self.conv2(y)))))
        return self.relu(y + self.shortcut(x))


class ResNet50(nn.Module):
    """A residual network of 50 layers and 25.6M parameters: bottlenecks in stages of 3, 4,
    6 and 3.
    """

    def __init__(
        self, width: int = 64, stages: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        width_in = width
        for stage, num_blocks in enumerate(stages):
            inner = width << stage
            for index in range(num_blocks):
                blocks.append(Bottleneck(width_in, inner, 2 if stage and not index else 1))
                width_in = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width_in, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class SkippedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Blocks(nn.Module):
    """16 residual blocks, 64 wide; a step may take other ones than the step
    before, as with LayerDrop.
    """

    def __init__(self, width: int = 64, num_blocks: int = 16) -> None:
        super().__init__()
        self.blocks, self.head = (
            nn.ModuleList(SkippedBlock(width) for _ in range(num_blocks)),
            nn.Linear(width, 10),
        )
        self.taken = [True] * num_blocks

    def forward(self, x: Tensor) -> Tensor:
        for block, is_taken in zip(self.blocks, self.taken, strict=True):
            if is_taken:
                x = block(x)
        return self.head(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A network and its training: ``batch(step)`` is the same in every variant,
    ``loss(batch)`` the forward pass.
    """

    model: nn.Module
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[tuple[Tensor, Tensor]], Tensor]
    device: torch.device


def train_once(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    note_loss: Callable[[Tensor], None] = lambda _: None,
) -> None:
    """Train on a batch: L-BFGS evaluates the loss in its update, and others before it."""

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = workload.loss(batch)
        note_loss(loss)
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(evaluate)
    else:
        evaluate()
        optimizer.step()


def make_workload(
    name: str, compiler: str | None = None, *, device: torch.device = CPU, is_tiny: bool = False
) -> Workload:
    """Return one of NETWORKS, with weights and data from fixed seeds,
    compiled by a backend of torch.compile's.

    Args:
        name: of the network.
        compiler: None for eager.
        device: where it trains. Weights and data are made on the CPU,
            and are the same on every device.
        is_tiny: those of MIXED_NETWORKS, and blocks, in a size that any machine trains in a moment.
    """
    torch.manual_seed(0)
    if name in MIXED_NETWORKS:
        model, examples = _MIXED[name](is_tiny)
    elif name in TINY:
        model, examples = TINY[name]()
    elif name in ("blocks", "layerdrop"):
        model, examples = Blocks(num_blocks=4 if is_tiny else 16), _examples(name)
    else:
        model = _CLASSES[name]()
        examples = _examples(name)
    model.to(device)
    if compiler is not None:
        model.compile(backend=compiler)
    lengths = torch.randint(SEQUENCE // 2, SEQUENCE + 1, (4096,)).tolist()
    examples = examples[0].to(device), examples[1].to(device)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        if isinstance(model, Blocks):
            if name == "layerdrop":
                draw = random.Random(step)  # the same blocks in every variant
                model.taken = [draw.random() < 0.5 for _ in model.blocks]
            # other ones each time, or L-BFGS converges
            rows = slice(64 * (step % 32), 64 * (step % 32) + 64)
            return examples[0][rows], examples[1][rows]
        if name != "transformer-random-length":
            return examples
        length = lengths[step % len(lengths)]
        return examples[0][:, :length].contiguous(), examples[1][:, :length].contiguous()

    def precision() -> AbstractContextManager[Any]:
        return (
            torch.autocast(device.type, torch.bfloat16) if name in MIXED_NETWORKS else nullcontext()
        )

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        with precision():
            outputs = model(batch[0])
            return cross_entropy(outputs.flatten(0, -2), batch[1].flatten())

    return Workload(model=model, batch=batch, loss=loss, device=device)


def _examples(name: str) -> tuple[Tensor, Tensor]:
    if name == "mlp":
        return torch.randn(64, 64), torch.randint(10, (64,))
    if name in ("blocks", "layerdrop"):
        return torch.randn(32 * 64, 64), torch.randint(10, (32 * 64,))
    if name == "resnet":
        return torch.randn(16, 3, 96, 96), torch.randint(1000, (16,))
    return _tokens(VOCABULARY, 8, SEQUENCE)


def _tokens(vocabulary: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (batch, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _gpt2(is_tiny: bool) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    if is_tiny:
        return GPT2(width=32, layers=2, heads=2, vocabulary=97, context=16), _tokens(97, 2, 16)
    return GPT2(), _tokens(50_257, 8, 1024)


def _resnet50(is_tiny: bool) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = ResNet50(width=8, stages=(1, 1), classes=10) if is_tiny else ResNet50()
    batch, size, classes = (2, 32, 10) if is_tiny else (64, 224, 1000)
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), (images, torch.randint(classes, (batch,)))


_CLASSES: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "transformer": Transformer,
    "resnet": ResNet,
    "transformer-random-length": Transformer,
    "blocks": Blocks,
    "layerdrop": Blocks,
}
_MIXED: dict[str, Callable[[bool], tuple[nn.Module, tuple[Tensor, Tensor]]]] = {
    "gpt2": _gpt2,
    "resnet50": _resnet50,
}
FLOAT32_NETWORKS = (*_CLASSES, *TINY)
MIXED_NETWORKS = tuple(_MIXED)
"""Those that train in automatic mixed precision with bfloat16, in the sizes that a GPU trains."""
NETWORKS = FLOAT32_NETWORKS + MIXED_NETWORKS
