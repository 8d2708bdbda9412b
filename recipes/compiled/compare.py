"""By how much does a transformation change a transformer?

Four questions, as a Hydra application.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from det_callbacks import DetCallbacksError, NumericsReport, compare_compiled, compare_modules

sys.path.append(str(Path(__file__).parents[1] / "overhead"))  # recipes are folders, not packages

import models  # found by the line above


def compiled(config: DictConfig, model: nn.Module, tokens: Tensor) -> NumericsReport:
    """Eager against compiled."""
    return compare_compiled(
        model, tokens, backend=config.backend, mode=config.mode, iterations=config.iterations
    )


def as_class(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return a copy of a model with the forward of another class."""
    control = copy.deepcopy(model)
    control.__class__ = kind
    return control


class HalfPrecision(models.Transformer):
    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens).float()


def bfloat16(config: DictConfig, model: nn.Module, tokens: Tensor) -> NumericsReport:
    """float32 against automatic mixed precision: parameters stay float32,
    so a tolerance is given.
    """
    control = as_class(model, HalfPrecision)
    return compare_modules(
        model, control, tokens, iterations=config.iterations, modules=(), rtol=0.016, atol=0.25
    )


class FlashAttention(models.Transformer):
    def forward(self, tokens: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return super().forward(tokens)


class MathAttention(models.Transformer):
    def forward(self, tokens: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(tokens)


def attention(config: DictConfig, model: nn.Module, tokens: Tensor) -> NumericsReport:
    """Two implementations of scaled_dot_product_attention."""
    base, control = as_class(model, MathAttention), as_class(model, FlashAttention)
    return compare_modules(base, control, tokens, iterations=config.iterations)


class WithoutResidual(models.Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x


class Transposed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def planted(config: DictConfig, model: nn.Module, tokens: Tensor) -> NumericsReport:
    """A transformation that is wrong in one block."""
    control = copy.deepcopy(model)
    block = control.blocks[config.layer]
    if config.plant == "residual":
        block.__class__ = WithoutResidual
    elif config.plant == "epsilon":
        block.norm2.eps = 1e-3
    elif config.plant == "transposed":
        block.project.__class__ = Transposed
    else:
        raise ValueError(f"plant={config.plant!r}: residual, epsilon or transposed")
    return compare_modules(model, control, tokens, iterations=config.iterations)


Question = Callable[[DictConfig, nn.Module, Tensor], NumericsReport]
QUESTIONS: dict[str, Question] = {
    ask.__name__: ask for ask in (compiled, bfloat16, attention, planted)
}


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    torch.manual_seed(0)
    models.VOCABULARY = config.vocabulary
    model = models.Transformer(**config.model)
    tokens = torch.randint(config.vocabulary, (config.batch_size, config.length))
    try:
        report = QUESTIONS[config.question](config, model, tokens)
        print(report)
        if config.json:
            report.to_json(config.json)
        report.assert_close()
    except DetCallbacksError as error:
        if not isinstance(error, AssertionError):  # that one says what was printed already
            print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
