"""Loops that make the mistakes that findings name, and the nearest innocent ones:
each records a run in a folder.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
    scaled_dot_product_attention,
    smooth_l1_loss,
)
from torch.utils.checkpoint import checkpoint

from det_callbacks import TrainingRun

Training = Callable[[Path], Path]
FEATURES, CLASSES = 12, 3


class Net(nn.Module):
    """What a module ``hidden`` makes of the first layer's output goes to the last layer."""

    def __init__(self, hidden: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.hidden = nn.ReLU() if hidden is None else hidden
        self.last = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.hidden(self.first(inputs)))


class Task:
    """The plainest training; the others change one thing."""

    num_steps = 8

    def __init__(self) -> None:
        self.build()
        self.optimizer = self.make_optimizer()

    def build(self) -> None:
        self.model: nn.Module = Net()

    def make_optimizer(self) -> torch.optim.Optimizer:
        trained = [one for one in self.model.parameters() if one.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.model(inputs), labels)

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(inputs, labels).backward()
        self.optimizer.step()

    def around(self) -> Any:
        return nullcontext()


def recorded(task: Callable[[], Task], folder: Path) -> Path:
    torch.manual_seed(11)
    one = task()
    data = torch.Generator().manual_seed(3)
    run = TrainingRun(folder, mode="record", model=one.model, optimizers=one.optimizer, level="op")
    with run, one.around(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Using a target size|None of the inputs have requires_grad"
        )
        for _ in range(one.num_steps):
            batch = (
                torch.randn(8, FEATURES, generator=data),
                torch.randint(CLASSES, (8,), generator=data),
            )
            with run.step(batch):
                one.step(*batch)
            torch.rand(1)  # as a loader that shuffles
    return folder


# updates


class ClearsTooEarly(Task):
    num_steps = 20

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        self.loss(inputs, labels).backward()
        self.optimizer.zero_grad(set_to_none=False)
        self.optimizer.step()


class StopsTraining(Task):
    """Its learning rate is 0 before or after some steps."""

    num_steps = 30
    still = range(5, 30)

    def build(self) -> None:
        super().build()
        self.num_done = 0

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        (group,) = self.optimizer.param_groups
        group["lr"] = 0.0 if self.num_done in self.still else 0.1
        self.num_done += 1
        super().step(inputs, labels)


class WarmsUp(StopsTraining):
    still = range(19)


class Converges(StopsTraining):
    """Its gradients become rounding errors, which change nothing."""

    still = range(0)
    num_steps = 200

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def build(self) -> None:
        super().build()
        self.model = nn.Linear(1, 1)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        inputs = inputs.sign()[:, :1]
        return mse_loss(self.model(inputs), 0.3 * inputs + 0.7)


class LowRank(nn.Module):
    """A frozen layer with a trained addition, in a checkpointed region whose
    input requires no gradient.
    """

    use_reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.added = nn.Linear(16, 16, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.inner, inputs, use_reentrant=self.use_reentrant)

    def inner(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.added(inputs)


class CutByCheckpoint(Task):
    hidden: type[nn.Module] = LowRank

    def build(self) -> None:
        self.model = Net(self.hidden())
        self.model.first.requires_grad_(False)


class NotCut(CutByCheckpoint):
    hidden = type("NotReentrant", (LowRank,), {"use_reentrant": False})


class ClipsScaled(Task):
    is_unscaled, uses_scale, divides, clamps = False, False, False, False

    def build(self) -> None:
        super().build()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(inputs, labels)).backward()
        if self.is_unscaled:
            self.scaler.unscale_(self.optimizer)
        if self.divides:
            for parameter in self.model.parameters():
                parameter.grad.div_(2)
        elif self.clamps:
            nn.utils.clip_grad_value_(self.model.parameters(), 1.0)
        else:
            limit = self.scaler.get_scale() if self.uses_scale else 1.0
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()


# losses


class WithLoss(Task):
    """Its loss is a function of the model, the inputs and the labels."""

    of: Callable[[nn.Module, Tensor, Tensor], Tensor]

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return type(self).of(self.model, inputs, labels)


def with_loss(of: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Training:
    return partial(recorded, type("Other", (WithLoss,), {"of": staticmethod(of)}))


class Regression(WithLoss):
    def build(self) -> None:
        super().build()
        self.model.last = nn.Linear(16, 1)


def with_one_output(of: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Training:
    return partial(recorded, type("OtherRegression", (Regression,), {"of": staticmethod(of)}))


def softmax_of_softmax(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(inputs).softmax(1), labels)


def crossed(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return (model(inputs) - labels.float()).square().mean()


def distilled(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        soft = model(inputs.flip(0)).softmax(1)
    return cross_entropy(model(inputs), soft) + binary_cross_entropy_with_logits(
        model(inputs), model(-inputs).detach().sigmoid()
    )


def energy_distance(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    outputs = model(inputs)
    return (outputs - labels.float()).abs().mean() - (outputs - outputs.flatten()).abs().mean() / 2


# recomputation


class Recomputed(nn.Module):
    """Dropout, attention, or a scale that changes after the forward pass,
    in a checkpointed region.
    """

    preserves, scales, only_drops = False, False, False

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.inner = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        options = {"use_reentrant": False, "preserve_rng_state": self.preserves or self.scales}
        region = self.scaled if self.scales else self.drop if self.only_drops else self.attended
        outputs = checkpoint(region, inputs, **options)
        self.scale.add_(1.0)
        return outputs

    def scaled(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * (self.scale + 1)

    def attended(self, inputs: Tensor) -> Tensor:
        heads = self.inner(self.inner(inputs)).view(-1, 4, 2, 2).transpose(1, 2)
        attended = scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return self.drop(attended.transpose(1, 2).flatten(1))


def recomputed(**attributes: Any) -> Training:
    hidden = type("OtherRecomputed", (Recomputed,), attributes)
    return partial(
        recorded,
        type("Recomputes", (Task,), {"build": lambda self: setattr(self, "model", Net(hidden()))}),
    )


# state


class HalfOpen(nn.Module):
    """A gate that gives 0.5 of any input, by rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sigmoid()

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.gate(inputs * 1e-12)


class Gated(Task):
    def build(self) -> None:
        self.model = Net(HalfOpen())


class Distils(Task):
    """Distils an averaged copy of the model, in eval mode, whose buffers stay."""

    num_steps = 24
    runs, in_eval, averages_buffers = True, True, False

    def build(self) -> None:
        self.student = Net(nn.BatchNorm1d(16))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).train(not self.in_eval)
        self.model = nn.ModuleDict({"student": self.student, "teacher": self.teacher})

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        outputs = self.student(inputs)
        if not self.runs:
            return cross_entropy(outputs, labels)
        with torch.no_grad():
            soft = self.teacher(inputs).softmax(1)
        return cross_entropy(outputs, labels) + cross_entropy(outputs, soft)

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        super().step(inputs, labels)
        with torch.no_grad():
            for average, one in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                average.lerp_(one, 0.1)
            if self.averages_buffers:
                for average, one in zip(
                    self.teacher.buffers(), self.student.buffers(), strict=True
                ):
                    average.copy_(one)


class FineTunes(Task):
    """Trains the last layer after a frozen backbone, whose statistics move."""

    num_steps = 24
    frozen = "backbone"
    is_in_eval, holds_linear = False, True

    def build(self) -> None:
        self.model, backbone = nn.Sequential(), nn.Sequential()
        (backbone if self.holds_linear else self.model).add_module(
            "linear", nn.Linear(FEATURES, 16)
        )
        backbone.add_module("norm", nn.BatchNorm1d(16))
        self.model.add_module("backbone", backbone)
        self.model.add_module("last", nn.Linear(16, CLASSES))
        self.model.get_submodule(self.frozen).requires_grad_(False).train(not self.is_in_eval)


class CastsOnce(Task):
    in_each_step = False

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    def around(self) -> Any:
        return nullcontext() if self.in_each_step else self.autocast()

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        with self.autocast() if self.in_each_step else nullcontext():
            return super().loss(inputs, labels)


class NearItsStart(Task):
    """A penalty on the distance to the initial weights, of which it holds copies;
    two layers are tied.
    """

    def build(self) -> None:
        super().build()
        self.model.first.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.model.hidden = nn.Linear(16, 16)
        self.model.hidden.weight = self.model.first.weight
        self.start = {name: one.detach().clone() for name, one in self.model.named_parameters()}

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        distances = [
            (one - self.start[name]).square().sum() for name, one in self.model.named_parameters()
        ]
        return (
            super().loss(nn.functional.pad(inputs, (0, 4)), labels)
            + 0.1 * torch.stack(distances).sum()
        )


class PutsBack(Task):
    """The same noise in each step, of a generator that is put back."""

    num_steps = 12

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            noise = torch.randn(FEATURES)
        return super().loss(inputs + noise, labels)


def variant(task: type[Task], **attributes: Any) -> Training:
    return partial(recorded, type(f"Other{task.__name__}", (task,), attributes))


UPDATED = ["first.weight", "first.bias"]
# finding -> trainings that have it: steps, names; the first one is the example in the docstring
GUILTY_LOOPS: dict[str, list[tuple[Training, tuple[int, ...], list[str]]]] = {
    "nothing_updated": [
        (variant(ClearsTooEarly), (0, 19), UPDATED),
        (variant(StopsTraining), (5, 29), UPDATED),
        (variant(StopsTraining, still=range(30)), (0, 29), UPDATED),
    ],
    "no_gradient": [(variant(CutByCheckpoint), (0, 7), ["hidden.added.weight"])],
    "clipped_before_unscale": [
        (variant(ClipsScaled), (0, 7), UPDATED),
        (variant(ClipsScaled, clamps=True), (0, 7), UPDATED),
    ],
    "softmax_twice": [
        (with_loss(softmax_of_softmax), (0, 7), ["softmax"]),
        (
            with_loss(
                lambda model, inputs, labels: binary_cross_entropy_with_logits(
                    model(inputs)[:, 0].sigmoid(), (labels > 0).float()
                )
            ),
            (0, 7),
            ["sigmoid"],
        ),
    ],
    "broadcast_loss": [
        (with_one_output(crossed), (0, 7), ["loss"]),
        (
            with_one_output(
                lambda model, inputs, labels: smooth_l1_loss(model(inputs), labels.float())
            ),
            (0, 7),
            ["loss"],
        ),
    ],
    "recomputation_differs": [
        (recomputed(), (0, 7), ["hidden"]),
        (recomputed(scales=True), (0, 7), ["hidden"]),
        # no line of the program in its region
        (recomputed(only_drops=True), (0, 7), ["hidden.drop"]),
    ],
    "stale_state": [
        (variant(Distils), (0, 23), ["teacher.hidden.running_mean", "teacher.hidden.running_var"])
    ],
    "moving_statistics": [
        (variant(FineTunes), (0, 23), ["backbone.norm.running_mean", "backbone.norm.running_var"]),
    ],
    "stale_copy": [(variant(CastsOnce), (1, 7), UPDATED)],
}

INNOCENT_LOOPS: dict[str, Training] = {
    "plain loop": variant(Task),
    "a gate that is half open": variant(Gated),
    "a long warmup from zero": variant(WarmsUp),
    "converged": variant(Converges),
    "checkpointed without reentrance": variant(NotCut),
    "clipped after the unscaling": variant(ClipsScaled, is_unscaled=True),
    "clipped at a limit of the scale": variant(ClipsScaled, uses_scale=True),
    "divided before the unscaling": variant(ClipsScaled, divides=True),
    "probabilities as targets": with_loss(distilled),
    "predictions of the targets' shape": with_one_output(
        lambda model, inputs, labels: smooth_l1_loss(model(inputs), labels.float()[:, None])
    ),
    "all pairs on purpose": with_one_output(energy_distance),
    "recomputed with its generator": recomputed(preserves=True),
    "only dropout, recomputed with its generator": recomputed(preserves=True, only_drops=True),
    "buffers are copied": variant(Distils, averages_buffers=True),
    "a teacher with statistics of its own": variant(Distils, in_eval=False),
    "an average that does not run": variant(Distils, runs=False),
    "a backbone in eval mode": variant(FineTunes, is_in_eval=True),
    "only a norm is frozen": variant(FineTunes, frozen="backbone.norm"),
    "a frozen part that is a norm": variant(FineTunes, holds_linear=False),
    "autocast in each step": variant(CastsOnce, in_each_step=True),
    "copies of the initial weights": variant(NearItsStart),
    "noise of a generator that is put back": variant(PutsBack),
}
