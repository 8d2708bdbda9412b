"""A small convolutional network on scikit-learn's digits, as a Hydra application."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset


class Digits(pl.LightningModule):
    def __init__(
        self,
        *,
        channels: int,
        eps: float,
        dropout: float,
        optimizer: Callable[..., torch.optim.Optimizer],
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer"])
        self.optimizer = optimizer
        self.net = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, channels, 3, padding=1),
                norm=nn.BatchNorm2d(channels, eps=eps),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(channels, 2 * channels, 3, padding=1),
                relu2=nn.ReLU(),
                pool=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                dropout=nn.Dropout(dropout),
                head=nn.Linear(2 * channels * 16, 10),
            )
        )

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        accuracy = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", accuracy, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class OneUlp(TorchDispatchMode):
    """A kernel that goes wrong: at one step, one element of what one layer's op
    computes is one ULP larger.

    It is open around the whole training, below the callback's trace, so that to the trace it is the
    op itself that returned other bits.
    """

    def __init__(self, model: pl.LightningModule, layer: str, step: int) -> None:
        super().__init__()
        self.armed = False
        model.get_submodule(layer).register_forward_pre_hook(
            lambda *_: setattr(self, "armed", model.training and model.global_step == step)
        )
        model.get_submodule(layer).register_forward_hook(lambda *_: setattr(self, "armed", False))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.armed and not func.is_view:
            self.armed = False
            first = output.view(-1)[:1]
            first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))
        return output


def make_loaders(
    *, batch_size: int, shuffle_seed: int | None
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    generator = None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)
    train = TensorDataset(images[:1500], labels[:1500])
    validation = TensorDataset(images[1500:], labels[1500:])
    return (
        DataLoader(train, batch_size=batch_size, shuffle=True, generator=generator),
        DataLoader(validation, batch_size=batch_size),
    )


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if config.seed is not None:
        pl.seed_everything(config.seed, workers=True)
    model = Digits(
        channels=config.model.channels,
        eps=config.model.eps,
        dropout=config.model.dropout,
        optimizer=hydra.utils.instantiate(config.optimizer),
    )
    train, validation = make_loaders(**config.data)
    callbacks = [hydra.utils.instantiate(callback) for callback in config.callbacks.values()]
    trainer = hydra.utils.instantiate(config.trainer, callbacks=callbacks)
    if config.model.perturb is None:
        trainer.fit(model, train, validation)
    else:
        with OneUlp(model, config.model.perturb, config.model.perturb_step):
            trainer.fit(model, train, validation)
    print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
