"""A small training that keeps tensors, and one change of what one op wrote, planted below the trace."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from faults import Around
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback, Verdict
from det_callbacks.verdict import Numbers, TensorNumbers

WIDTH, BATCH, STEPS = 6, 4, 4


class Small(pl.LightningModule):
    """Two linear layers, and what a test puts between them."""

    def __init__(self, *middle: nn.Module, optimizer: Callable[..., Any] = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.middle = nn.Sequential(*middle)
        self.last = nn.Linear(WIDTH, 2)
        self.make_optimizer = lambda: optimizer(self.parameters(), lr=0.1, **options)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return cross_entropy(self.last(self.middle(self.first(inputs))), labels)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer()


class Planted(TorchDispatchMode):
    """Changes what one call of an op wrote, in one step.

    Args:
        model: whose training it disturbs.
        op: overload, "aten.addmm.default".
        change: gets what the op returned and its arguments.
        step: at which it strikes.
        call: which of the calls of that step, from 0.
    """

    def __init__(
        self, model: pl.LightningModule, op: str, change: Callable[[Any, Any], object], *, step: int, call: int
    ) -> None:
        super().__init__()
        self.model, self.op, self.change, self.step, self.call = model, op, change, step, call
        self.num_calls = self.num_struck = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if str(func) == self.op and self.model.trainer.fit_loop.epoch_loop.total_batch_idx == self.step:
            if self.num_calls == self.call:
                self.change(output, args)
                self.num_struck += 1
            self.num_calls += 1
        return output


def ulps_at(tensor: Tensor, *places: tuple[int, ...], num: int = 1) -> None:
    """Make elements so many ULPs larger in size."""
    integers = tensor.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    for place in places:
        integers[place] += num


def planted(op: str, change: Callable[[Any, Any], object], *, step: int = 2, call: int = 0) -> Around:
    @contextmanager
    def around(model: pl.LightningModule) -> Iterator[None]:
        with Planted(model, op, change, step=step, call=call) as mode:
            yield
        assert mode.num_struck == 1, f"planted {mode.num_struck} times, of {mode.num_calls} calls"

    return around


def fit(
    callback: DeterminismCallback | None,
    model: Callable[[], pl.LightningModule] = Small,
    around: Around = lambda model: nullcontext(),
) -> pl.LightningModule:
    """Train four steps (an epoch) from one seed."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # seed_everything leaves environment variables
        seed(5)
    trained = model()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(BATCH * STEPS, 3, generator=generator), torch.randint(2, (BATCH * STEPS,), generator=generator)
    )
    with around(trained):
        quiet_trainer(*([] if callback is None else [callback])).fit(trained, DataLoader(data, batch_size=BATCH))
    return trained


def record(
    folder: Path, keep_tensors: Sequence[str], model: Callable[[], Any] = Small, *, budget: float = 64.0, **options: Any
) -> Path:
    fit(
        DeterminismCallback(folder, mode="record", keep_tensors=keep_tensors, tensor_budget_mib=budget),
        model,
        **options,
    )
    return folder


def verify(folder: Path, model: Callable[[], Any] = Small, *, current: Path | None = None, **options: Any) -> Verdict:
    """Verify with ``on_divergence="warn"``, and return the verdict."""
    callback = DeterminismCallback(
        folder, current=folder.with_name("current") if current is None else current, on_divergence="warn"
    )
    fit(callback, model, **options)
    assert callback.verdict is not None
    return callback.verdict


def numbers_of(verdict: Verdict) -> Numbers:
    assert verdict.first_divergence.numbers is not None, "no numbers"
    return verdict.first_divergence.numbers


def output_of(verdict: Verdict) -> TensorNumbers:
    numbers = numbers_of(verdict)
    assert not numbers.problem, numbers.problem
    (output,) = numbers.output
    return output
