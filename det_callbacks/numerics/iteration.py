"""One iteration of one side: forward, loss, backward, optimizer; what each computes goes to a sink."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from det_callbacks.errors import DetCallbacksError, ModuleRunError
from det_callbacks.numerics.leaves import Call, InputCopies, output_leaves
from det_callbacks.numerics.side import OptimizerFactory, Side
from det_callbacks.numerics.sinks import Sink, no_autocast
from det_callbacks.settings import MAX_SEED
from det_callbacks.trace.modules import ModuleStack

_MAX_LINES = 3
"""Lines that are quoted of an error, which is the cause of ours: those of Dynamo have many."""

ContextFactory = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What both sides do in an iteration; the arguments of ``compare_modules``."""

    loss: Callable[[Any], Tensor] | None
    optimizer: OptimizerFactory
    seed: int
    modules: tuple[str, ...]
    device: torch.device | None


def run_iteration(
    side: Side, call: Call, sink: Sink, recipe: Recipe, *, iteration: int, context: ContextFactory | None
) -> None:
    """Run one iteration of a side that is loaded.

    Raises:
        ModuleRunError: it raised; the text says where.
    """
    stage = _Stage("entering its context")
    try:
        with ExitStack() as stack:
            stack.enter_context(nullcontext() if context is None else context())
            stack.enter_context(torch.enable_grad())
            _run(side, call, sink, recipe, iteration=iteration, stage=stage)
            stage.name = "leaving its context"
    except DetCallbacksError:
        raise
    except Exception as error:  # whatever a module raises: told with its side, never swallowed
        raise ModuleRunError(_what_failed(side, stage.name, iteration, error), side.label, iteration) from error


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass(slots=True)
class _Stage:
    name: str


def _run(side: Side, call: Call, sink: Sink, recipe: Recipe, *, iteration: int, stage: _Stage) -> None:
    if not iteration:
        _put_state(side, sink, initial=True)
    stage.name = "copying its inputs"
    inputs = InputCopies(call, recipe.device)
    seed = (recipe.seed + iteration) % (MAX_SEED + 1)
    seed_generators(seed)
    stage.name = "its forward pass"
    with _following(side, sink, recipe.modules):
        output = side.module(*inputs.args, **inputs.kwargs)
    for name, given, value in inputs.written():
        sink.put_input(name, given, value)
    leaves = output_leaves(output, "output")
    for name, value in leaves:
        sink.put("output", name, value)
    stage.name = "its loss"
    loss = default_loss([value for _, value in leaves], seed) if recipe.loss is None else recipe.loss(output)
    if loss is not None:
        sink.put("loss", "loss", loss)
    with no_autocast():  # backward ops run in the dtype of their forward ops by themselves
        if loss is not None and loss.requires_grad:
            stage.name = "its backward pass"
            loss.backward()
        del output, leaves, loss
        _put_gradients(side, inputs, sink)
        stage.name = "its optimizer's step"
        optimizer = side.make_optimizer(recipe.optimizer)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    _put_state(side, sink, initial=False)


def default_loss(leaves: list[Any], seed: int) -> Tensor | None:
    """Return the mean squared distance of the floating-point and complex leaves to random numbers; None without any.

    The numbers are normal, drawn on the host from a seed, the same for leaves of the same shape at the same place. A
    sum would have no gradient behind a softmax, a mean of squares none behind a normalisation; and unlike those it
    weights each element otherwise, so that elements that are exchanged change it. Computed in float32 at least.
    """
    distances: list[Tensor] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()) or not leaf.numel():
            continue
        values = leaf.to_dense() if leaf.layout is not torch.strided else leaf
        if values.is_nested:
            values = torch.cat([part.reshape(-1) for part in values.unbind()])
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        values = values.float() if values.dtype.itemsize < 4 else values
        generator = torch.Generator("cpu").manual_seed(seed * 1009 + index)
        target = torch.randn(values.shape, generator=generator, dtype=torch.float32, device="cpu")
        distance = (values - target.to(values)).square().mean()
        distances.append(distance.to(distances[0]) if distances else distance)
    return torch.stack(distances).mean() if distances else None


def _put_state(side: Side, sink: Sink, *, initial: bool) -> None:
    seen: set[int] = set()
    for name, parameter in side.parameters():
        if id(parameter) not in seen:
            sink.put("initial" if initial else "parameter", name, parameter)
        seen.add(id(parameter))
    for name, buffer in side.buffers():
        if id(buffer) not in seen:
            sink.put("initial" if initial else "buffer", name, buffer)
        seen.add(id(buffer))


def _put_gradients(side: Side, inputs: InputCopies, sink: Sink) -> None:
    seen: set[int] = set()
    # the last layers have theirs first: what is wrong in the backward pass of a layer is wrong in all before it
    for name, parameter in reversed(side.parameters()):
        if id(parameter) not in seen and parameter.grad is not None:
            sink.put("gradient", name, parameter.grad)
        seen.add(id(parameter))
    for name, _, leaf in inputs.leaves:
        if leaf.grad is not None:
            sink.put("gradient", name, leaf.grad)


@contextmanager
def _following(side: Side, sink: Sink, patterns: tuple[str, ...]) -> Iterator[None]:
    """Give the outputs of submodules to the sink while the block runs."""
    if not patterns:
        yield
        return
    calls: dict[str, int] = {}

    def put(name: str, output: Any) -> None:
        name = side.name_of(name)
        if not name or not any(fnmatchcase(name, pattern) for pattern in patterns):
            return
        number = calls[name] = calls.get(name, -1) + 1
        full_name = name if not number else f"{name} #{number}"
        for leaf_name, leaf in _tensors_of(output, full_name):
            sink.put("module", leaf_name, leaf)

    stack = ModuleStack(side.module)
    stack.on_output = put
    stack.open()
    try:
        yield
    finally:
        stack.close()


def _tensors_of(output: Any, name: str) -> list[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        return [(name, output)]
    if isinstance(output, tuple | list | dict):
        entries = output.items() if isinstance(output, dict) else enumerate(output)
        return [found for key, value in entries for found in _tensors_of(value, f"{name}[{key!r}]")]
    return []


def _what_failed(side: Side, stage: str, iteration: int, error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()][:_MAX_LINES]
    said = f": {' '.join(lines)}" if lines else ""
    before = f"Iterations 0 to {iteration - 1} ran through on both sides. " if iteration else ""
    other = "The base ran through this iteration. " if side.label == "control" else ""
    return (
        f"The {side.label} ({side.description}) raised {type(error).__name__} in {stage}, iteration {iteration}{said}\n"
        f"{before}{other}Both modules are as they were. Run the {side.label} alone on the inputs of that iteration."
    )
