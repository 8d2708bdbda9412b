"""Eight kinds of tiny networks, whose steps are mostly small ops: what each op costs shows most."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Tensor, Tensor]]

CLASSES, WIDTH, LENGTH, BATCH = 10, 16, 8, 4


def labels(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape)


class Recurrent(nn.Module):
    """A recurrent network that reads vectors and classifies the last state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers, self.head = (
            kind(WIDTH, WIDTH, num_layers=2, batch_first=True),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(inputs)[0][:, -1])


class Encoder(nn.Module):
    """A transformer of torch's own layers, with dropout; with ``is_causal`` it
    predicts a class at each place.
    """

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if self.is_causal else None
        found = self.layers(self.tokens(tokens), mask=mask, is_causal=self.is_causal)
        return self.head(found if self.is_causal else found.mean(1))


class Translator(nn.Module):
    """An encoder and a decoder, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        read = self.tokens(tokens)
        return self.head(self.transformer(read, read.flip(1)))


class Sampler(nn.Module):
    """A variational autoencoder whose decoder classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        mean, log_variance = self.encoder(inputs).chunk(2, dim=1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())


class Hourglass(nn.Module):
    """A U-Net of one level: down, up, and past both."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.down = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)
        self.up, self.head = (
            nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2),
            nn.Conv2d(2 * WIDTH, CLASSES, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        wide = self.start(images).relu()
        found = self.head(torch.cat((wide, self.up(self.down(wide).relu())), dim=1))
        return found.movedim(1, -1)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, 2, 1),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTH, CLASSES),
    )


TINY: dict[str, Callable[[], Made]] = {
    "tiny-convolutional": lambda: (convolutional(), (torch.randn(BATCH, 3, 16, 16), labels(BATCH))),
    "tiny-lstm": lambda: (Recurrent(nn.LSTM), (torch.randn(BATCH, LENGTH, WIDTH), labels(BATCH))),
    "tiny-gru": lambda: (Recurrent(nn.GRU), (torch.randn(BATCH, LENGTH, WIDTH), labels(BATCH))),
    "tiny-encoder": lambda: (Encoder(is_causal=False), (labels(BATCH, LENGTH), labels(BATCH))),
    "tiny-decoder": lambda: (
        Encoder(is_causal=True),
        (labels(BATCH, LENGTH), labels(BATCH, LENGTH)),
    ),
    "tiny-translator": lambda: (Translator(), (labels(BATCH, LENGTH), labels(BATCH, LENGTH))),
    "tiny-vae": lambda: (Sampler(), (torch.randn(BATCH, WIDTH), labels(BATCH))),
    "tiny-unet": lambda: (Hourglass(), (torch.randn(BATCH, 3, 8, 8), labels(BATCH, 8, 8))),
}
"""By name, what makes a network and its batch: inputs and the classes to predict."""
