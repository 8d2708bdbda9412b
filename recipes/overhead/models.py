"""The networks that the cost is measured on, each with batches of the size given in the README."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

VOCABULARY = 50_257
SEQUENCE = 128


class MLP(nn.Module):
    """Three linear layers, 64 -> 256 -> 256 -> 10; one step with AdamW is 113 ops."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
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
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(gelu(self.expand(self.norm2(x))))


class Transformer(nn.Module):
    """A GPT-2-like decoder: 6 layers, 384 wide, 6 heads, tied embeddings of 50,257 tokens."""

    def __init__(self, width: int = 384, layers: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


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
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """An 18-layer residual network for 3 x 96 x 96 images and 1,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.blocks = nn.Sequential(*(ResidualBlock(*shape) for shape in widths))
        self.head = nn.Linear(512, 1000)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A network and its training: ``batch(step)`` is the same in every variant, ``loss(batch)`` the forward pass."""

    model: nn.Module
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[tuple[Tensor, Tensor]], Tensor]


def make_workload(name: str, compiler: str | None = None) -> Workload:
    """Return one of NETWORKS, with weights and data from fixed seeds, compiled by a backend of torch.compile's."""
    torch.manual_seed(0)
    model = _CLASSES[name]()
    if compiler is not None:
        model.compile(backend=compiler)
    if name == "mlp":
        examples = torch.randn(64, 64), torch.randint(10, (64,))
    elif name == "resnet":
        examples = torch.randn(16, 3, 96, 96), torch.randint(1000, (16,))
    else:
        tokens = torch.randint(VOCABULARY, (8, SEQUENCE + 1))
        examples = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    lengths = torch.randint(SEQUENCE // 2, SEQUENCE + 1, (4096,)).tolist()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        if name != "transformer-random-length":
            return examples
        length = lengths[step % len(lengths)]
        return examples[0][:, :length].contiguous(), examples[1][:, :length].contiguous()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = model(batch[0])
        return cross_entropy(outputs.flatten(0, -2), batch[1].flatten())

    return Workload(model=model, batch=batch, loss=loss)


_CLASSES: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "transformer": Transformer,
    "resnet": ResNet,
    "transformer-random-length": Transformer,
}
NETWORKS = tuple(_CLASSES)
