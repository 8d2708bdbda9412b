"""A recorded training calls the program's own code as often as an unrecorded one,
and ends with the same bits.

Each case is one step of a training. ``CALLS`` counts the calls of the program's code, and ``SEEN``
collects what that code sees of torch.
"""

import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from program_code import (
    CALLS,
    SEEN,
    Adam,
    Deep,
    Described,
    Guarded,
    Hiding,
    LazyDict,
    LazyList,
    LazyMapping,
    LazySequence,
    Overriding,
    Passing,
    Point,
    Schedule,
    Seeing,
    Sub,
    Unwrapping,
    network,
    twice,
)
from program_steps import (
    ONES,
    Step,
    Two,
    batched_gradients,
    before,
    copied,
    deepest,
    drawn_in_vmap,
    exported,
    fake,
    finalised,
    function,
    generated,
    graphs,
    hessian,
    hiding,
    in_anomaly_mode,
    in_dispatch_mode,
    in_function_mode,
    in_threads,
    inferring,
    jacobian,
    layouts,
    loader_of_samples,
    loss_of,
    meta,
    nested,
    noisy,
    of_class,
    parametrised,
    pickled,
    plain_loader,
    saved_on_cpu,
    several,
    shared,
    signalled,
    subclassed,
    traced_by_python,
    tracing,
    transformed,
    two_tensors,
    warned,
    with_dual_numbers,
    with_hooks_seen,
    with_other_values,
    with_saved_hooks,
    without_environment,
    written_in_place,
)
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, TrainingRun
from det_callbacks.runs.store import Run
from det_callbacks.trace.hash_mode import HashMode

LEVELS = ("op", "module", "state")

LOADER = plain_loader()

CASES: dict[str, dict[str, Any]] = {
    "a lazy mapping": {
        "step": lambda model, batch: loss_of(model, batch["x"]),
        "batch": LazyMapping,
    },
    "a lazy dictionary": {
        "step": lambda model, batch: loss_of(model, batch["x"]),
        "batch": lambda x: LazyDict(x=x),
    },
    "a lazy sequence": {
        "step": lambda model, batch: loss_of(model, batch[0]),
        "batch": LazySequence,
    },
    "a lazy list": {
        "step": lambda model, batch: loss_of(model, next(iter(batch))),
        "batch": lambda x: LazyList([x]),
    },
    "a named tuple": {"step": lambda model, batch: loss_of(model, batch[0]), "batch": Point},
    "properties": {"step": lambda model, batch: loss_of(model, batch.x), "batch": Guarded},
    "descriptors": {"step": lambda model, batch: loss_of(model, batch.x), "batch": Described},
    "keys": {"step": lambda model, batch: loss_of(model, ONES), "batch": lambda x: {Guarded(x): x}},
    "an output": {"model": Unwrapping},
    "a function mode": {"step": in_function_mode},
    "a dispatch mode": {"step": in_dispatch_mode},
    "a class of tensors": {"step": subclassed},
    "a custom op": {"step": lambda model, batch: loss_of(model, twice(batch.requires_grad_()))},
    "hooks": {"step": with_hooks_seen},
    "autograd functions": {"step": function},
    "a module's methods": {"model": lambda: network(Overriding)},
    "parametrizations": {"model": noisy, "step": before(parametrised)},
    "an optimizer's methods": {"optimizer": Adam},
    "a data set and its loader": {"loader": loader_of_samples},
    "a pickled loader": {
        "loader": lambda: LOADER,
        "step": lambda model, batch: loss_of(model, (pickled(LOADER), batch[0])[1]),
    },
    "inference mode": {"step": before(inferring)},
    "torch.jit.trace": {"step": before(tracing)},
    "a vectorised jacobian": {"step": before(jacobian)},
    "batched gradients": {"step": before(batched_gradients)},
    "torch.func.hessian": {"step": before(hessian)},
    "torch.func": {"step": before(transformed)},
    "torch.fx": {"step": before(graphs)},
    "torch.export": {"step": before(exported)},
    "copies": {"step": before(copied)},
    "fake tensors": {"step": before(fake)},
    "meta tensors": {"step": before(meta)},
    "nested tensors": {"step": before(nested)},
    "other layouts": {"step": before(layouts)},
    "threads": {"step": before(in_threads)},
    "a tracer of Python": {"step": traced_by_python},
    "anomaly mode": {"step": in_anomaly_mode},
    "saved tensors on the CPU": {"step": saved_on_cpu},
    "a wrapper without inner tensors": {"step": hiding},
    "a wrapper": {"step": two_tensors},
    "hooks of saved tensors": {"step": with_saved_hooks},
    "dual numbers": {"step": before(with_dual_numbers)},
    "computed parameters": {"step": with_other_values},
    "randomness in vmap": {"step": before(drawn_in_vmap)},
    "writes in place": {"step": written_in_place},
    "several outputs": {"model": Two, "step": several},
    "a class of weights": {"model": of_class(lambda value: value.as_subclass(Sub))},
    "wrapped weights": {"model": of_class(lambda value: TwoTensor(value, value.clone()))},
    "weights of a class that hides them": {"model": of_class(Hiding)},
    "a low recursion limit": {"step": before(deepest)},
    "a generator in forward": {"step": generated},
    "weak references": {"step": before(finalised)},
    "signals": {"step": signalled},
    "shared memory": {"step": before(shared)},
    "no environment": {"step": before(without_environment)},
    "a deep module": {"model": lambda: Deep(225), "step": lambda model, batch: model(batch).mean()},
    "warnings": {"step": warned},
}


def values_in(parameter: Any) -> Any:
    plain = getattr(parameter, "held", getattr(parameter, "a", parameter))
    with torch._C.DisableTorchFunction():
        return plain.detach().clone().as_subclass(Tensor).tolist()


def train(case: Mapping[str, Any], record: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Train three steps; ``record`` makes a recorder of a model and an optimizer."""

    def loop(model: nn.Module, optimizer: Any, loader: Any, step: Step) -> None:
        with nullcontext() if record is None else record(model, optimizer) as run:
            for batch in loader if run is None else run.batches(loader):
                with nullcontext() if run is None else run.step(batch):
                    step(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    return outcome(case, loop)


class Batches:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Lit(pl.LightningModule):
    def __init__(self, model: nn.Module, optimizer: Any, step: Step) -> None:
        super().__init__()
        self.model, self.optimizer, self.step = model, optimizer, step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self.model, batch)

    def configure_optimizers(self) -> Any:
        return [self.optimizer], [Schedule(self.optimizer, 1)]


def fit(case: Mapping[str, Any], *callbacks: DeterminismCallback) -> dict[str, Any]:
    """Train three steps in a Trainer."""

    def loop(model: nn.Module, optimizer: Any, loader: Any, step: Step) -> None:
        # Lightning takes a list for several loaders
        batches = Batches(loader) if isinstance(loader, list) else loader
        quiet_trainer(*callbacks).fit(Lit(model, optimizer, step), batches)

    return outcome(case, loop)


def outcome(
    case: Mapping[str, Any], loop: Callable[[nn.Module, Any, Any, Step], object]
) -> dict[str, Any]:
    """Return all that the program sees of a loop."""
    CALLS.clear()
    SEEN.clear()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model = case.get("model", network)()
    optimizer = case.get("optimizer", torch.optim.SGD)(model.parameters(), lr=0.01)
    make_batch = case.get("batch", torch.clone)
    loader = case["loader"]() if "loader" in case else [make_batch(ONES) for _ in range(3)]
    step = case.get("step", loss_of)
    environment = dict(os.environ)
    CALLS.clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            loop(model, optimizer, loader, step)
    finally:
        os.environ.update(environment)
    return {
        "calls": dict(CALLS),
        "seen": list(SEEN),
        "warnings": [(one.category, str(one.message), one.filename, one.lineno) for one in caught],
        "weights": [values_in(parameter) for parameter in nn.Module.parameters(model)],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
    }


class Stepper(SimpleNamespace):
    """Records with one ``HashMode``."""

    def __enter__(self) -> "Stepper":
        return self

    def __exit__(self, *_: object) -> None: ...

    def batches(self, loader: Any) -> Any:
        return loader

    def step(self, batch: Any) -> HashMode:
        return self.mode


def in_run(
    folder: Any, level: str, model: nn.Module, optimizer: Any, **options: Any
) -> TrainingRun:
    return TrainingRun(
        folder / "run", mode="record", level=level, model=model, optimizers=optimizer, **options
    )


def in_mode(model: nn.Module, _optimizer: Any) -> Stepper:
    return Stepper(mode=HashMode(model))


def assert_same(alone: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    for name, value in alone.items():
        assert recorded[name] == value, name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("around", [Seeing, Passing])
def test_modes_around_a_recorded_training_see_the_same_training(around, level, tmp_path):
    def inside(record: Any = None) -> dict[str, Any]:
        with around():
            return train({"step": function}, record)

    inside()
    assert_same(inside(), inside(partial(in_run, tmp_path, level)))


@cache
def unrecorded(name: str) -> dict[str, Any]:
    train(CASES[name])  # what torch does once in a process
    return train(CASES[name])


@pytest.mark.parametrize("how", [*LEVELS, "kept tensors", "mode"])
@pytest.mark.parametrize("name", CASES)
def test_a_recorded_training_is_the_same_training(name, how, tmp_path):
    record = in_mode if how == "mode" else partial(in_run, tmp_path, how)
    if how == "kept tensors":
        record = partial(in_run, tmp_path, "op", keep_tensors=["*"])
    assert_same(unrecorded(name), train(CASES[name], record))


@pytest.mark.parametrize("level", LEVELS)
def test_what_cannot_be_looked_into_is_counted(level, tmp_path):
    train(CASES["weights of a class that hides them"], partial(in_run, tmp_path, level))
    assert any(
        ".Hiding" in name
        for name in Run.open(tmp_path / "run").view(0, 0, 0).program.opaque_regions
    )


def test_gradients_that_are_batched_are_counted(tmp_path):
    train(CASES["batched gradients"], partial(in_run, tmp_path, "module"))
    assert Run.open(tmp_path / "run").view(0, 0, 0).program.ops_skipped["batched"] == 4


@LIGHTNING_ADVICE
@pytest.mark.parametrize(
    ("name", "level"),
    [
        *(("properties", level) for level in LEVELS),
        *(
            ("hooks", "module"),
            ("a function mode", "op"),
            ("a class of tensors", "op"),
            ("parametrizations", "state"),
        ),
        *(
            ("a module's methods", "op"),
            ("an optimizer's methods", "op"),
            ("a data set and its loader", "op"),
        ),
        *(
            ("torch.jit.trace", "op"),
            ("a vectorised jacobian", "op"),
            ("a wrapper without inner tensors", "op"),
        ),
    ],
)
def test_a_recorded_fit_is_the_same_fit(name, level, tmp_path):
    case = CASES[name]
    fit(case)
    alone = fit(case)
    assert_same(alone, fit(case, DeterminismCallback(tmp_path / "run", mode="record", level=level)))
