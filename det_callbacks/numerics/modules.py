"""compare_modules and compare_compiled: train two modules side by side,
and measure by how much they differ.
"""

import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from det_callbacks.digest.numbers import Tolerance, default_tolerance, epsilon
from det_callbacks.errors import ModuleRunError, NothingComparedError
from det_callbacks.internals import dynamo
from det_callbacks.internals.torch import TORCH
from det_callbacks.numerics.result import PHASES, Kind, NumericsReport, Phase, TensorComparison
from det_callbacks.observers.functions import leaves_of
from det_callbacks.runs.selection import as_names
from det_callbacks.settings import MAX_SEED, DeterminismSettings, enforce_determinism
from det_callbacks.tensors.copies import copy_bits
from det_callbacks.tensors.files import SavedTensor, joined, measure_saved
from det_callbacks.text import count
from det_callbacks.trace.components import is_special
from det_callbacks.trace.leaves import flatten

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[int], Any]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Values = dict[tuple[Phase, str], list[SavedTensor]]
"""Copies of the tensors that an iteration computed, in order, by phase and name; numbers become
tensors. A submodule that is called several times has several.
"""


def compare_modules(
    base: nn.Module,
    control: nn.Module,
    inputs: Inputs,
    *,
    iterations: int = 10,
    optimizer: OptimizerFactory | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    modules: Sequence[str] = ("*",),
    seed: int = 0,
    join: int | None = None,
) -> NumericsReport:
    """Train two modules side by side from the same seeds, and compare all
    tensors that they compute.

    Every iteration compares outputs, loss, gradients of parameters and inputs, parameters after the
    optimizer's step, and buffers; the first also compares the initial parameters and buffers. If
    neither side is compiled, it compares outputs of submodules too, which locate the first
    difference and do not affect the outcome. Each side continues with its parameters, so later
    iterations show how a difference grows.

    The function trains copies (``copy.deepcopy``), so both arguments may be the same module, and
    restores generators and settings at the end. It needs memory for a copy of each side, its
    optimizer state, and the tensors that both compute in one iteration.

    Args:
        base: the module that relative differences refer to.
        control: the module to compare with the base.
        inputs: one tensor; a tuple of positional arguments; a mapping of keyword arguments; or a
            function from the iteration to one of these. Each side gets a copy.
        iterations: number of iterations.
        optimizer: function that makes an optimizer from the parameters that require gradients. The
            default is gradient descent at rate 0.01 (Adam would turn the rounding error of a zero
            gradient into a full step).
        loss: function that makes a scalar tensor from the output. The default is the mean squared
            distance of the output's floating-point leaves to random numbers from the seed.
        rtol: relative tolerance of floating-point and complex tensors; pass it together with
            ``atol``. The default is that of ``torch.testing.assert_close`` for the dtype. Integers
            and dtypes must be equal.
        atol: absolute tolerance: ``abs(base - control) <= atol + rtol * abs(base)``.
        modules: fnmatch patterns for the names of submodules whose outputs
            are compared; () for none.
        seed: seed of iteration 0; iteration i has seed + i.
        join: dimension in which the outputs of a submodule's calls in one iteration are joined,
            such as that of the tokens: one side computes them together, the other one by one. An
            output without it is joined in the one that gives both sides the same shape, or is not
            compared. The default compares call by call.

    Returns:
        The report; ``report.assert_close()`` raises if a tensor is beyond its tolerance.

    Raises:
        ModuleRunError: a side raised.
        NothingComparedError: there was no tensor to compare.
        TypeError, ValueError: an argument is wrong, or a module cannot be copied.

    Examples:
        >>> layer = torch.nn.LayerNorm(8)
        >>> report = compare_modules(
        ...     layer, torch.nn.LayerNorm(8, eps=1e-3), torch.randn(4, 8), iterations=2
        ... )
        >>> report.equal, report.close, report.first.phase, report.first.name
        (False, False, 'output', 'output')
    """
    TORCH.require()
    _check_arguments(base, control, iterations, seed, join)
    chosen = _tolerance_of(rtol, atol)
    # copies made in inference mode cannot be trained; the second context
    # restores flags and generators
    with torch.inference_mode(False), enforce_determinism(DeterminismSettings.choose()):
        has_compiled = _is_compiled(base) or _is_compiled(control)
        options: dict[str, Any] = {"loss": loss, "seed": seed, "joins": join is not None}
        options["make_optimizer"] = optimizer or partial(torch.optim.SGD, lr=0.01)
        options["patterns"] = () if has_compiled else as_names("modules", modules)
        base_side = _Side(label="base", module=_copy_of("base", base), **options)
        control_side = _Side(label="control", module=_copy_of("control", control), **options)
        comparisons: list[TensorComparison] = []
        for iteration in range(iterations):
            # once for both sides, since it may draw random numbers
            call = _call_of(inputs, iteration)
            values = base_side.run(iteration, call), control_side.run(iteration, call)
            comparisons += _compared(*values, iteration, chosen, join or 0)
    if not any(comparison.decides for comparison in comparisons):
        raise NothingComparedError(
            "The modules have no parameters, buffers or outputs, so nothing was compared; both "
            "ran. Return what is to be compared from their forward."
        )
    note = "Outputs of submodules were not compared, since a side is compiled."
    return NumericsReport(
        base=base_side.description,
        control=control_side.description,
        num_iterations=iterations,
        comparisons=tuple(comparisons),
        notes=(note,) if has_compiled and modules else (),
    )


def _check_arguments(base: Any, control: Any, iterations: Any, seed: Any, join: Any) -> None:
    for name, module in (("base", base), ("control", control)):
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"{name} must be a torch.nn.Module; got {module!r}. Wrap a function in a module "
                "that calls it."
            )
    if type(iterations) is not int or iterations < 1:
        raise ValueError(f"iterations must be an integer >= 1; got {iterations!r}")
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be an integer from 0 to {MAX_SEED}; got {seed!r}")
    if join is not None and type(join) is not int:
        raise ValueError(f"join must be the number of a dimension, or None; got {join!r}")


def _tolerance_of(rtol: float | None, atol: float | None) -> Tolerance | None:
    chosen = None if rtol is None or atol is None else Tolerance(float(rtol), float(atol))
    is_lone = (rtol is None) != (atol is None)
    if is_lone or not all(0 <= tolerance < math.inf for tolerance in chosen or ()):
        raise ValueError(
            f"rtol and atol must be given together, finite and not negative; got {rtol!r} and "
            f"{atol!r}"
        )
    return chosen


def _compared(
    base: Values, control: Values, iteration: int, chosen: Tolerance | None, join: int
) -> Iterator[TensorComparison]:
    """Yield the comparisons of an iteration in the order of the base;
    tensors of the control alone come last.
    """
    order = [*PHASES]
    for phase, name in sorted({**base, **control}, key=lambda key: order.index(key[0])):
        calls = base.get((phase, name), []), control.get((phase, name), [])
        sides = calls[0][0] if calls[0] else None, calls[1][0] if calls[1] else None
        # submodules may be merged or replaced; only those that both sides ran locate a difference
        if phase == "module" and None in sides:
            continue
        if max(map(len, calls)) > 1:
            together = _joined_calls(*calls, join)
            if together is None:
                continue  # nothing says which parts belong together
            sides = together
        yield _comparison(*sides, chosen, iteration=iteration, phase=phase, name=name)


def _comparison(
    base: SavedTensor | None, control: SavedTensor | None, chosen: Tolerance | None, **place: Any
) -> TensorComparison:
    kind: Kind = "extra" if base is None else "missing" if control is None else "structure"
    measured: dict[str, Any] = {"excess": math.inf}
    if base is not None and control is not None and _layout_of(base) == _layout_of(control):
        # integers have to be equal, whatever the tolerance
        tolerance = chosen if chosen and epsilon(base.dtype) else default_tolerance(base.dtype)
        measure = measure_saved(base, control, tolerance)
        kind = "content" if measure.num_differing else "equal"
        rtol, atol = tolerance
        measured = {"measure": measure, "excess": measure.excess, "rtol": rtol, "atol": atol}
    return TensorComparison(
        kind=kind,
        base=None if base is None else _layout_of(base),
        control=None if control is None else _layout_of(control),
        **place,
        **measured,
    )


def _layout_of(tensor: SavedTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def compare_compiled(
    module: nn.Module,
    inputs: Inputs,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    **options: Any,
) -> NumericsReport:
    """Compare a module with the same module under ``torch.compile``, as ``compare_modules`` does.

    A function that Dynamo falls back to eager for is an error, and ``notes`` gives the number of
    graphs. Inductor draws random numbers from torch's generators, as eager code does
    (``fallback_random``).

    Args:
        module: a module that is not compiled.
        inputs: see ``compare_modules``.
        backend: name of a backend of ``torch.compile``, or a function.
        mode: mode of Inductor, such as "reduce-overhead" or "max-autotune".
        **options: further arguments of ``compare_modules``.

    Raises:
        NothingComparedError: no compiled graph ran.
        ValueError: the module is already compiled, or the backend takes no mode.
        ModuleRunError, TypeError: see ``compare_modules``.

    Examples:
        >>> compare_compiled(
        ...     torch.nn.Linear(4, 2), torch.randn(3, 4), backend="eager", iterations=2
        ... ).equal
        True
    """
    if isinstance(module, nn.Module) and _is_compiled(module):
        raise ValueError(
            f"the module is compiled already ({type(module).__name__}); give what was put into "
            "torch.compile, or compare the two with compare_modules"
        )
    if mode is not None and backend != "inductor":
        raise ValueError(f'mode={mode!r} is for backend="inductor"; {backend!r} takes none')
    is_inductor = backend == "inductor"
    compile_graph = (
        dynamo.inductor_with_mode()(mode, None, None)
        if is_inductor
        else dynamo.compiler_of()(backend)
    )
    num_graphs = 0

    # a function, so that copies of the compiled module share it
    def counted(graph: Any, example_inputs: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return compile_graph(graph, example_inputs)

    raising = dynamo.config().patch(fail_on_recompile_limit_hit=True, suppress_errors=False)
    with raising, dynamo.inductor_config().patch(fallback_random=True):
        control: Any = torch.compile(module, backend=counted)
        report = compare_modules(module, control, inputs, **options)
    if not num_graphs:
        raise NothingComparedError(
            f"No compiled graph ran, so {type(module).__name__} was compared with itself. Is "
            "compiling disabled, or is this a module that Dynamo leaves alone, such as nn.LSTM "
            "(torch._dynamo.config.allow_rnn)?"
        )
    note = f"{count(num_graphs, 'graph')} compiled by {getattr(backend, '__name__', backend)}"
    return replace(report, notes=(note, *report.notes))


@dataclass(kw_only=True, slots=True)
class _Side:
    """A copy of one of the two modules, "base" or "control", and its training."""

    label: str
    module: nn.Module
    loss: Callable[[Any], Tensor] | None
    make_optimizer: OptimizerFactory
    seed: int
    joins: bool
    patterns: tuple[str, ...]
    optimizer: torch.optim.Optimizer | None = None

    @property
    def description(self) -> str:
        kind = type(getattr(self.module, dynamo.ORIGINAL, self.module))
        return f"{'compiled ' if _is_compiled(self.module) else ''}{kind.__name__}"

    def run(self, iteration: int, call: Any) -> Values:
        """Run an iteration and return what it computed; raise
        ``ModuleRunError`` if the module raises.
        """
        values: Values = {}
        try:
            with torch.enable_grad():
                self._run(iteration, call, values)
        except Exception as error:  # a module may raise anything; the error names the side
            # messages of Dynamo are long
            lines = [line for line in str(error).splitlines() if line.strip()][:3]
            raise ModuleRunError(
                f"The {self.label} ({self.description}) raised {type(error).__name__} in iteration "
                f"{iteration}: {' '.join(lines)}\n"
                "Both modules are as they were. Run it alone on the inputs of that iteration.",
                self.label,
                iteration,
            ) from error
        return values

    def _run(self, iteration: int, call: Any, values: Values) -> None:
        if not iteration:
            self._add_state(values, "initial", "initial")
        args, kwargs = copy.deepcopy(call)
        seed = (self.seed + iteration) % (MAX_SEED + 1)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        with self._submodules_into(values):
            output = self.module(*args, **kwargs)
        leaves = leaves_of(output, "output")
        for name, value in leaves:
            if isinstance(value, bool | int | float | complex):
                value = torch.from_numpy(np.asarray(value))  # keeps double precision
            if isinstance(value, Tensor):
                values["output", name] = [_copied(name, value)]
        loss = (
            _default_loss([value for _, value in leaves], seed)
            if self.loss is None
            else self.loss(output)
        )
        if loss is not None:
            values["loss", "loss"] = [_copied("loss", loss)]
            if loss.requires_grad:
                loss.backward()
        # in the order of the backward pass: an error in one layer spreads to all layers before it
        last_first = reversed([*self.module.named_parameters()])
        named: list[tuple[str, Any]] = [
            (_plain_name(name), parameter) for name, parameter in last_first
        ]
        for name, leaf in chain(
            named, *(flatten(arguments, "input") for arguments in (args, kwargs))
        ):
            if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.grad is not None:
                values["gradient", name] = [_copied(name, leaf.grad)]
        parameters = [
            parameter for parameter in self.module.parameters() if parameter.requires_grad
        ]
        if self.optimizer is None and parameters:
            self.optimizer = self.make_optimizer(parameters)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._add_state(values, "parameter", "buffer")

    def _add_state(self, values: Values, parameters: Phase, buffers: Phase) -> None:
        named = self.module.named_parameters(), self.module.named_buffers()
        for phase, tensors in zip((parameters, buffers), named, strict=True):
            values |= {
                (phase, _plain_name(name)): [_copied(name, tensor)] for name, tensor in tensors
            }

    def _submodules_into(self, values: Values) -> AbstractContextManager[Any]:
        """Return a context in which the outputs of submodules are added to ``values``.

        The hook is global: hooks on a module would disable its fast path
        (``nn.TransformerEncoderLayer``).
        """
        names = {
            id(part): name
            for name, part in self.module.named_modules()
            if name and any(fnmatchcase(name, pattern) for pattern in self.patterns)
        }
        num_calls: Counter[str] = Counter()

        def add(module: nn.Module, _: Any, output: Any) -> None:
            if (name := names.get(id(module))) is not None:
                call = f"{name} #{num_calls[name]}" if num_calls[name] and not self.joins else name
                num_calls[name] += 1
                for path, leaf in flatten(output, call):
                    if isinstance(leaf, Tensor):
                        values.setdefault(("module", path), []).append(_copied(path, leaf))

        return register_module_forward_hook(add) if names else nullcontext()


def _joined_calls(
    base: Sequence[SavedTensor], control: Sequence[SavedTensor], join: int
) -> tuple[SavedTensor, SavedTensor] | None:
    """Return the outputs of a submodule's calls on both sides as one tensor each, joined in the
    dimension ``join`` or else in another that gives both the same shape; None if none does.
    """
    num_dims = len(base[0].shape)
    first = [join % num_dims] if -num_dims <= join < num_dims else []
    for dim in dict.fromkeys([*first, *range(num_dims)]):
        of_base, of_control = joined(base, dim), joined(control, dim)
        if of_base is not None and of_control is not None and of_base.shape == of_control.shape:
            return of_base, of_control
    return None


def _is_compiled(module: nn.Module) -> bool:
    return any(isinstance(part, dynamo.optimized_module()) for part in module.modules())


def _copy_of(label: str, module: nn.Module) -> nn.Module:
    """Return a trainable copy of a module, without gradients."""
    if any(dynamo.is_compiled_in_place(part) is not None for part in module.modules()):
        raise ValueError(
            f"the {label} was compiled in place (Module.compile), which copy.deepcopy drops; give "
            "torch.compile(module)"
        )
    try:
        copied = copy.deepcopy(module)
    except Exception as error:
        raise ValueError(
            f"the {label} cannot be copied ({error}); compare modules that copy.deepcopy can copy: "
            "detach what a forward pass left in their attributes"
        ) from error
    copied.zero_grad(set_to_none=True)
    return copied


def _plain_name(name: str) -> str:
    """Return a qualified name without the attributes that torch.compile inserts."""
    return ".".join(part for part in name.split(".") if part != dynamo.ORIGINAL)


def _default_loss(leaves: list[Any], seed: int) -> Tensor | None:
    """Return the mean squared distance of floating-point and complex leaves to random numbers,
    or None without any.

    The gradient of a sum is zero after a softmax, and that of a mean of
    squares after a normalisation.
    """
    distances: list[Tensor] = []
    for index, leaf in enumerate(leaves):
        if (
            isinstance(leaf, Tensor)
            and (leaf.is_floating_point() or leaf.is_complex())
            and leaf.numel()
        ):
            values = leaf if leaf.is_complex() or leaf.dtype.itemsize > 2 else leaf.float()
            generator = torch.Generator("cpu").manual_seed(seed * 1009 + index)
            target = torch.randn(
                values.shape, generator=generator, dtype=torch.float32, device="cpu"
            ).to(values.device)
            distances.append((values - target).abs().square().mean())
    return torch.stack([each.to(distances[0]) for each in distances]).mean() if distances else None


def _call_of(inputs: Inputs, iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if callable(inputs) and not isinstance(inputs, Tensor):
        inputs = inputs(iteration)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple) else (inputs,)), {}


def _copied(name: str, value: Tensor) -> SavedTensor:
    with torch.no_grad():
        if value.layout != torch.strided or value.is_meta or is_special(value):
            raise TypeError(
                f"{name} is not an ordinary strided tensor with elements; compare its components"
            )
        return copy_bits(value.detach().resolve_conj().resolve_neg(), None)
