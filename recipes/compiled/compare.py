"""By how much does a transformation change a transformer? Five questions, as a Hydra application."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from det_callbacks import DetCallbacksError, NumericsReport, compare_compiled, compare_modules, enforce_determinism

sys.path.append(str(Path(__file__).parents[1] / "overhead"))  # recipes are folders, not packages

import models  # found by the line above


def compiled(config: DictConfig, model: nn.Module, tokens: Tensor) -> NumericsReport:
    """Eager against compiled."""
    return compare_compiled(model, tokens, backend=config.backend, mode=config.mode, iterations=config.iterations)


def bfloat16(config: DictConfig, model: nn.Module, tokens: Tensor) -> NumericsReport:
    """float32 against automatic mixed precision: parameters stay float32, so a tolerance is given."""
    return compare_modules(
        model,
        model,
        tokens,
        iterations=config.iterations,
        control_context=lambda: torch.autocast("cpu", torch.bfloat16),
        check_dtype=False,
        rtol=0.016,
        atol=0.25,
    )


def attention(config: DictConfig, model: nn.Module, tokens: Tensor) -> NumericsReport:
    """Two implementations of scaled_dot_product_attention."""
    return compare_modules(
        model,
        model,
        tokens,
        iterations=config.iterations,
        base_context=lambda: sdpa_kernel(SDPBackend.MATH),
        control_context=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    )


def threads(config: DictConfig, model: nn.Module, tokens: Tensor) -> NumericsReport:
    """One thread against two: sums are split otherwise."""
    return compare_modules(
        model,
        model,
        tokens,
        iterations=config.iterations,
        base_context=lambda: enforce_determinism({"num_threads": 1}),
        control_context=lambda: enforce_determinism({"num_threads": 2}),
    )


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
QUESTIONS: dict[str, Question] = {ask.__name__: ask for ask in (compiled, bfloat16, attention, threads, planted)}


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
