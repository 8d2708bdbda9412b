"""Small forms of public bugs, each with and without its mistake:
what the verdict says of the difference.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss

from det_callbacks import DivergenceError, TrainingRun
from det_callbacks.verdict import Verdict

# torch's, of a planted fault
pytestmark = pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")

Step = Callable[[Tensor], object]
STEPS = 4


def train(
    make: Callable[[bool], tuple[nn.Module, torch.optim.Optimizer, Step]],
    wrong: bool,
    folder: Path,
    **options,
):
    torch.manual_seed(0)
    model, optimizer, step = make(wrong)
    first = options.pop("first", 0)
    run = TrainingRun(
        folder / "reference",
        model=model,
        optimizers=optimizer,
        current=folder / "current",
        **options,
    )
    if first:
        run.resume_from(step=first, epoch=0)
    with run:
        for number in range(first, STEPS):
            batch = (
                torch.full((8, 4), 1.0 + number) if not isinstance(step, Batches) else step.batch()
            )
            with run.step(batch):
                step(batch)
    return run.verdict


def judged(make, folder: Path, **options) -> Verdict:
    train(make, False, folder, mode="record")
    try:
        return train(make, True, folder, **options)
    except DivergenceError as error:
        return error.verdict


class Batches:
    """A step whose batch comes from a generator that nobody seeds."""

    def __init__(self, step: Step, seed: int) -> None:
        self.step, self.generator = step, np.random.default_rng(seed)

    def batch(self) -> Tensor:
        return torch.from_numpy(self.generator.normal(size=(8, 4)).astype(np.float32))

    def __call__(self, batch: Tensor) -> object:
        return self.step(batch)


class Validated(Batches):
    """A step before which the model is validated, in train mode if wrong."""

    def __init__(self, step: Step, model: nn.Module, wrong: bool) -> None:
        self.step, self.model, self.wrong = step, model, wrong
        self.num_steps = 0

    def batch(self) -> Tensor:
        batch = torch.arange(32.0).reshape(8, 4).sin()
        self.model.train(self.wrong)
        if self.num_steps:
            with torch.no_grad():
                self.model(batch)
        self.model.train()
        self.num_steps += 1
        return batch


def updating(optimizer: torch.optim.Optimizer, loss: Callable[[Tensor], Tensor]) -> Step:
    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()

    return step


def heads(wrong, *, is_loaded):
    """Two heads, built in a different order; with their values loaded by name,
    or as they are initialised.
    """
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("ba" if wrong else "ab")})
    for place, name in enumerate("ab" if is_loaded else ""):
        nn.init.constant_(model[name].weight, place + 0.5)
        nn.init.constant_(model[name].bias, place)
    optimizer = torch.optim.Adam(model.parameters())
    return (
        model,
        optimizer,
        updating(optimizer, lambda batch: (model["a"](batch) + model["b"](batch).sin()).sum()),
    )


def closure(wrong):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.6 if wrong else 0.5)

    def step(batch):
        def evaluate():
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(evaluate)
        scheduler.step()

    return model, optimizer, step


def clipping(wrong):
    """Gradients that are clipped before, or after, they are divided by the scale of the loss."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        (model(batch).square().mean() * 1024.0).backward()
        if wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.parameters():
            parameter.grad.div_(1024.0)
        if not wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, optimizer, step


def broadcasting(wrong):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(batch):
        found = model(batch)
        return mse_loss(found if wrong else found.squeeze(1), batch.sum(1))

    return model, optimizer, updating(optimizer, loss)


class Teacher(nn.Module):
    def __init__(self, always_drops):
        super().__init__()
        self.first, self.always_drops = nn.Linear(4, 4), always_drops

    def forward(self, batch):
        return dropout(self.first(batch), 0.3, training=self.training or self.always_drops)


def distilling(wrong):
    model = nn.ModuleDict({"teacher": Teacher(wrong).eval(), "student": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model["student"].parameters(), lr=0.1)

    def loss(batch):
        with torch.no_grad():
            goal = model["teacher"](batch)
        return mse_loss(model["student"](batch), goal)

    return model, optimizer, updating(optimizer, loss)


def unseeded(wrong):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (
        model,
        optimizer,
        Batches(updating(optimizer, lambda batch: model(batch).square().mean()), seed=int(wrong)),
    )


def iterating(wrong):
    """Numbers that a set gives in another order are read one by one."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = {name: torch.tensor(float(place)) for place, name in enumerate("abc")}

    def loss(batch):
        for name in "cab" if wrong else "abc":
            numbers[name].item()
        return model(batch).square().mean()

    return model, optimizer, updating(optimizer, loss)


def accumulating(wrong):
    """Updates in every second step; the resume, in between, has no gradients."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = [wrong]

    def step(batch):
        model(batch).square().sum().backward()
        calls[0] += 1
        if calls[0] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return model, optimizer, step


def adversarial(wrong):
    """Leaves out the generator's pass and update in some steps; the other model's come first."""
    model = nn.ModuleDict({"judge": nn.Linear(4, 1), "maker": nn.Linear(4, 4)})
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("judge", "maker")]
    calls = [0]

    def step(batch):
        model["judge"](batch).square().sum().backward()
        optimizers[0].step()
        calls[0] += 1
        if calls[0] % 2 == wrong:
            return
        model["judge"](model["maker"](batch)).square().sum().backward()
        optimizers[1].step()

    return model, optimizers, step


def clearing(wrong):
    """Clears the gradients before it clips them."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        if wrong:
            optimizer.zero_grad()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, optimizer, step


def validating(wrong):
    """Validates between two steps, in train mode if wrong."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = updating(optimizer, lambda batch: model(batch).square().sum())
    return model, optimizer, Validated(step, model, wrong)


CASES = {
    "the other model's update": (adversarial, "forward", "!only after backward pass"),
    "clipping without gradients": (
        clearing,
        "backward",
        "Only the reference runs this between backward() and the update",
        "zero_grad",
    ),
    "validation in train mode": (
        validating,
        "external_write",
        "1.num_batches_tracked",
        "check train() and eval() around what runs between the steps",
    ),
    "initialised in a different order": (
        lambda wrong: heads(wrong, is_loaded=False),
        "initial_weights",
        "a.weight has the reference's bits of b.weight",
    ),
    "a schedule with a closure": (closure, "optimizer", "From step 2 on, lr of group 0 is 0.05"),
    "clipped before unscaled": (
        clipping,
        "backward",
        "aten.div_.Tensor on grad of weight in no submodule",
        "ran before aten._foreach_mul_.Tensor on grad of weight",
        "in the reference, and after it in the current run",
    ),
    "broadcast": (
        broadcasting,
        "forward",
        "broadcast [8, 1] and [8] to [8, 8] in the current run only",
    ),
    "dropout in eval": (
        distilling,
        "rng",
        "Only the current run draws in teacher",
        "!separate generator",
    ),
    "unseeded": (
        unseeded,
        "data_content",
        "what was not recorded",
        "!data set",
    ),
    "a set's order": (
        iterating,
        "structure",
        "They are the reference's in a different order",
        "PYTHONHASHSEED",
    ),
    "lost gradients": (
        accumulating,
        "checkpoint",
        "gradients accumulated before the checkpoint were not restored",
        "!Python value",
    ),
}


@pytest.mark.parametrize(
    ("make", "cause", "said"),
    [(make, cause, said) for make, cause, *said in CASES.values()],
    ids=CASES,
)
def test_the_verdict_says_what_went_wrong(make, cause, said, tmp_path):
    verdict = judged(make, tmp_path, **({"first": 1} if make is accumulating else {}))
    assert verdict.cause == cause, verdict.explanation
    for text in said:
        assert (text.lstrip("!") in verdict.explanation) is not text.startswith("!"), (
            verdict.explanation
        )
    assert verdict.trail[-1].step == verdict.first_divergence.step


def test_what_a_mapping_of_the_program_holds_is_compared(tmp_path):
    """Its methods are the program's code, so its attributes are read."""

    class Held(Mapping):
        def __init__(self, *parts):
            self._first, self._second = parts

        __getitem__ = __iter__ = __len__ = None

    class Model(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 1), scale

        def forward(self, batch):
            found = self.linear(batch)
            return Held({"y": found}, {"z": found.detach() * self.scale})

    def make(wrong):
        model = Model(3 if wrong else 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, updating(optimizer, lambda batch: model(batch)._first["y"].sum())

    train(make, False, tmp_path, mode="record", level="module")
    with pytest.raises(DivergenceError) as caught:
        train(make, True, tmp_path)
    assert caught.value.verdict.first_divergence.name == "output._second['z']"


def test_one_tensor_with_the_bits_of_another_is_no_exchange(tmp_path):
    def make(wrong):
        model, optimizer, step = heads(False, is_loaded=False)
        if wrong:
            model["a"].weight.data = model["b"].weight.data.clone()
        return model, optimizer, step

    verdict = judged(make, tmp_path)
    assert verdict.cause == "initial_weights"
    assert "has the reference's bits" not in verdict.explanation


def test_the_same_tensors_in_another_order_match(tmp_path):
    verdict = judged(lambda wrong: heads(wrong, is_loaded=True), tmp_path)
    assert verdict.verdict == "match"
    assert "In a different order from the reference, and compared by name" in verdict.explanation


@pytest.mark.parametrize(
    "make",
    [
        lambda array: array,
        lambda array: array.astype(np.float16),
        lambda array: array[::-1],
        lambda array: frozen(array),
    ],
    ids=["plain", "half", "reversed", "read-only"],
)
def test_an_array_of_numbers_in_a_batch_is_a_tensor_of_it(make, tmp_path):
    def train_on(scale: float, **arguments: Any) -> TrainingRun:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = TrainingRun(tmp_path / "reference", model=model, optimizers=optimizer, **arguments)
        with run:
            for number in range(2):
                batch = make(np.full((8, 4), 1.0 + number * scale, dtype=np.float32))
                with run.step({"x": batch}):
                    updating(optimizer, lambda one: model(one).sum())(
                        torch.tensor(batch.astype(np.float32))
                    )
        return run

    train_on(1.0, mode="record")
    assert train_on(1.0, current=tmp_path / "equal").verdict.verdict == "match"
    with pytest.raises(DivergenceError) as caught:
        train_on(1.5, current=tmp_path / "other")
    verdict = caught.value.verdict
    assert (verdict.first_divergence.name, verdict.first_divergence.step) == ("batch['x']", 1)
    assert verdict.coverage.opaque_regions == ()


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
