"""A network of more than fifty modules, and ways of planting one fault in a training of it.

A fault "below the trace" is a dispatch mode that is open around the whole fit: to the trace, it is
the op itself that returned other bits.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, library, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback, DivergenceError, Verdict
from det_callbacks.runs.store import Run

WIDTH = 16
BLOCKS = 10
CLASSES = 3
STEPS = 4
BATCH = 8

Around = Callable[[pl.LightningModule], AbstractContextManager[object]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.drop(self.act(self.up(self.norm(inputs))))


@library.custom_op("planted_faults::double", mutates_args=())
def double(values: Tensor) -> Tensor:
    """A kernel of one's own, which torch sees as one op."""
    return torch.from_numpy(values.numpy() * 2)


class OnGradient(torch.autograd.Function):
    """Returns equal values; the gradient of theirs is what a function makes of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return values * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.function(gradient), None


class Custom(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return OnGradient.apply(inputs, double)


class Deep(pl.LightningModule):
    """Ten blocks, a custom Function and whatever a test puts in the middle."""

    def __init__(
        self,
        *,
        middle: Callable[[], nn.Module] = nn.Identity,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        **optimizer_options: Any,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.custom = Custom()
        self.middle = middle()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.make_optimizer = partial(optimizer, **{"lr": 0.01, **optimizer_options})

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.middle(self.custom(self.net(inputs))))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return cross_entropy(self(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


@dataclass(eq=False, kw_only=True)
class Below(TorchDispatchMode):
    """Makes one element of what one op returns one ULP larger; open below the trace."""

    model: pl.LightningModule
    op: str  # the overload packet, "aten.mm"
    step: int
    module: str | None = None  # in whose forward pass; None for a backward
    call: int = 0  # there
    is_gross: bool = False  # adds one to every element instead, so that all that follows differs
    # wherever the op runs, in this one of the tensors of its first argument
    written: int | None = None
    is_inside = False
    num_calls = 0

    def __post_init__(self) -> None:
        super().__init__()
        if self.module is not None:
            owner = self.model.get_submodule(self.module)
            owner.register_forward_pre_hook(lambda *_: setattr(self, "is_inside", True))
            owner.register_forward_hook(lambda *_: setattr(self, "is_inside", False))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        is_here = (
            self.is_inside if self.module is not None else torch._C._current_graph_task_id() != -1
        )
        is_meant = str(func).startswith(f"{self.op}.") and self.model.global_step == self.step
        if is_meant and (is_here or self.written is not None):
            if self.num_calls == self.call:
                result = output[0] if isinstance(output, tuple) else output
                result = result if self.written is None else args[0][self.written]
                result.add_(1) if self.is_gross else add_ulp(result)
            self.num_calls += 1
        return output


def add_ulp(tensor: Tensor) -> None:
    with torch.no_grad():
        first = tensor.as_strided((1,), (1,))
        first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))


def below(**place: Any) -> Around:
    """Plant a fault below the trace; see ``Below``."""

    @contextmanager
    def around(model: pl.LightningModule) -> Iterator[None]:
        with Below(model=model, **place) as mode:
            yield
            assert mode.num_calls > mode.call, "the fault was not planted"

    return around


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(STEPS * BATCH, WIDTH, generator=generator)
    return inputs, torch.randint(CLASSES, (STEPS * BATCH,), generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training, with or without a fault."""

    model: Callable[[], pl.LightningModule] = Deep
    around: Around = lambda model: nullcontext()
    callbacks: tuple[pl.Callback, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def fit(self, callback: DeterminismCallback) -> pl.LightningModule:
        torch.manual_seed(11)
        model = self.model()
        trainer = quiet_trainer(*self.callbacks, callback, **self.options)
        loader = DataLoader(TensorDataset(*samples()), batch_size=BATCH)
        with self.around(model):
            trainer.fit(model, loader)
        return model

    def record(self, folder: Path, **options: Any) -> Path:
        self.fit(DeterminismCallback(folder, mode="record", **options))
        return folder


def verify(reference: Path, training: Training, current: Path, **options: Any) -> Verdict:
    callback = DeterminismCallback(reference, current=current, **options)
    with pytest.raises(DivergenceError) as caught:
        training.fit(callback)
    verdict = callback.verdict
    assert caught.value.verdict is verdict is not None
    assert caught.value.exit_code == verdict.exit_code == 1
    assert verdict.explanation in " ".join(str(caught.value).split())
    assert Run.open(current).rank(0).steps(0).tolist() == [verdict.first_divergence.step]
    return verdict
