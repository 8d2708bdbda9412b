"""compare_modules and compare_compiled: two modules are trained side by side; by how much do they differ?"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config  # read in torch 2.13: patch, fail_on_recompile_limit_hit
from torch._dynamo.backends.registry import lookup_backend

# torch-private, looked at in torch 2.13: the table that torch.testing.assert_close documents
from torch.testing._comparison import default_tolerances

from det_callbacks.digest.components import tensor_numbers
from det_callbacks.errors import NothingComparedError
from det_callbacks.numerics.result import PHASES, Kind, NumericsReport, Phase, TensorComparison
from det_callbacks.numerics.side import Inputs, OptimizerFactory, Side, Values, copy_of, is_compiled
from det_callbacks.patterns import as_names
from det_callbacks.report.console import count
from det_callbacks.settings import MAX_SEED, DeterminismSettings, enforce_determinism
from det_callbacks.verdict import TensorNumbers

_CHUNK_ELEMENTS = 1 << 22  # that are compared with their tolerance together
Tolerances = tuple[float, float] | None
"""(rtol, atol); None for those of ``torch.testing``."""


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
) -> NumericsReport:
    """Train two modules side by side from the same seeds, and compare everything that they compute.

    In every iteration: outputs, loss, gradients of parameters and of inputs, parameters after the optimizer's step,
    buffers; before the first one parameters and buffers. Where neither side is compiled, outputs of submodules as well,
    so that the first that differs is named; those decide nothing. Each side goes on from its own parameters, so later
    iterations show how a difference grows. Names may differ by ``_orig_mod.``, also inside.

    The modules are not trained: copies are (``copy.deepcopy``), so they may be one and the same module. Generators
    (Python, NumPy, torch on each device) and settings are as before when it returns or raises.

    Time: the iterations of both, and 0.1 microseconds for each element that differs. Memory: a copy of each side, its
    optimizer state, and what both computed in one iteration.

    Args:
        base: what relative differences are relative to.
        control: what is compared with it.
        inputs: one tensor; a tuple of positional arguments; a mapping of keyword arguments; or a function from the
            iteration to one of these. Copied for each side.
        iterations: how many.
        optimizer: makes an optimizer from the parameters that need gradients; None: gradient descent at rate 0.01,
            which carries a difference of the gradients on as it is, where Adam would make a full step out of the
            rounding errors of a gradient that is zero.
        loss: makes a tensor without dimensions from the output; None: the mean squared distance of its floating-point
            leaves to random numbers from the seed.
        rtol: relative tolerance of floating-point and complex tensors, given together with ``atol``; None: that of
            ``torch.testing.assert_close`` for the dtype. Integers have to be equal, and another dtype is beyond any.
        atol: absolute tolerance: ``abs(base - control) <= atol + rtol * abs(base)``. torch's own, 1e-5, is large for
            gradients of that size, and small for sums of thousands.
        modules: fnmatch patterns over the names of submodules whose outputs are compared; () for none.
        seed: of iteration 0; iteration i has seed + i.

    Returns:
        The report; ``report.assert_close()`` raises where something is beyond its tolerance.

    Raises:
        ModuleRunError: a side raised.
        NothingComparedError: there was no tensor to compare.
        TypeError, ValueError: an argument is not what it can be; a module cannot be copied.

    Example:
        >>> import torch
        >>> from det_callbacks import compare_modules
        >>> layer = torch.nn.LayerNorm(8)
        >>> report = compare_modules(layer, torch.nn.LayerNorm(8, eps=1e-3), torch.randn(4, 8), iterations=2)
        >>> report.equal, report.close, report.first.phase, report.first.name
        (False, False, 'output', 'output')
    """
    for name, module in (("base", base), ("control", control)):
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name} is a torch.nn.Module; got {module!r}. Wrap a function in a module that calls it.")
    if type(iterations) is not int or iterations < 1:
        raise ValueError(f"iterations is a number from 1 on; got {iterations!r}")
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed is a number from 0 to {MAX_SEED}; got {seed!r}")
    given = None if rtol is None or atol is None else (float(rtol), float(atol))
    if (rtol is None) != (atol is None) or not all(0 <= one < math.inf for one in given or ()):
        raise ValueError(f"rtol and atol are given together, finite and not negative; got {rtol!r} and {atol!r}")
    # Copies that are made in inference mode could not be trained. Nothing is set, and flags, threads and generators are
    # put back all the same.
    with torch.inference_mode(False), enforce_determinism(DeterminismSettings.choose()):
        has_compiled = is_compiled(base) or is_compiled(control)
        options: dict[str, Any] = {"inputs": inputs, "loss": loss, "seed": seed}
        options["make_optimizer"] = optimizer or partial(torch.optim.SGD, lr=0.01)
        options["patterns"] = () if has_compiled else as_names("modules", modules)
        one = Side(label="base", module=copy_of("base", base), **options)
        other = Side(label="control", module=copy_of("control", control), **options)
        found: list[TensorComparison] = []
        for iteration in range(iterations):
            found += _compared(one.run(iteration), other.run(iteration), iteration, given)
    if not any(comparison.decides for comparison in found):
        raise NothingComparedError(
            "The modules have no parameters, buffers or outputs, so nothing was compared; both ran without an error. "
            "Return what is to be compared from their forward."
        )
    note = "Outputs of submodules were not compared, since a side is compiled."
    return NumericsReport(
        base=one.description,
        control=other.description,
        num_iterations=iterations,
        comparisons=tuple(found),
        notes=(note,) if has_compiled and modules else (),
    )


def _compared(base: Values, control: Values, iteration: int, given: Tolerances) -> list[TensorComparison]:
    """Return the comparisons of an iteration, in the order of the base; what the control alone has stands last."""
    return [
        _comparison(key, base.get(key), control.get(key), iteration, given)
        for key in sorted({**base, **control}, key=lambda key: PHASES.index(key[0]))
        # submodules may be merged or replaced; only what both ran can tell where a difference starts
        if key[0] != "module" or (key in base and key in control)
    ]


def _comparison(
    key: tuple[Phase, str], base: Tensor | None, control: Tensor | None, iteration: int, given: Tolerances
) -> TensorComparison:
    kind: Kind = "extra" if base is None else "missing" if control is None else "structure"
    measured: dict[str, Any] = {"excess": math.inf}
    if base is not None and control is not None and (base.shape, base.dtype) == (control.shape, control.dtype):
        rtol, atol = given or default_tolerances(base.dtype)
        numbers = tensor_numbers(TensorNumbers(tensor=key[1]), base, control)
        kind = "content" if numbers.num_differing else "equal"
        excess = _excess(base, control.to(base.device), rtol, atol) if numbers.num_differing else 0.0
        measured = {"numbers": numbers, "rtol": rtol, "atol": atol, "excess": excess}
    sides: dict[str, Any] = {"base": _described(base), "control": _described(control)}
    return TensorComparison(iteration=iteration, phase=key[0], name=key[1], kind=kind, **sides, **measured)


def _excess(base: Tensor, control: Tensor, rtol: float, atol: float) -> float:
    """Return the largest difference as a multiple of the tolerance; a NaN or an infinity on both sides is none."""
    if not base.is_floating_point() and not base.is_complex():
        return math.inf
    wide = torch.complex128 if base.is_complex() else torch.float64
    largest = 0.0
    for one, other in zip(*(side.reshape(-1).split(_CHUNK_ELEMENTS) for side in (base, control)), strict=True):
        one, other = one.to(wide), other.to(wide)
        is_same = (one == other) | (one.isnan() & other.isnan())
        distance = (one - other).abs().masked_fill(is_same, 0)
        excess = torch.where(is_same, 0.0, distance / (atol + rtol * one.abs()))
        largest = max(largest, float(excess.nan_to_num(math.inf, math.inf).max()))
    return largest


def _described(value: Tensor | None) -> str | None:
    return None if value is None else f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def compare_compiled(
    module: nn.Module,
    inputs: Inputs,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    **options: Any,
) -> NumericsReport:
    """Compare a module with the same module under ``torch.compile``, as ``compare_modules`` does.

    A copy is compiled. Graphs have to have been compiled, a function that Dynamo gives up on is an error, and ``notes``
    says how many graphs there were. Inductor draws random numbers with torch's own generators here, as eager code does
    (``fallback_random``): its own are others from the same seed.

    Args:
        module: not compiled itself.
        inputs: as ``compare_modules`` takes them.
        backend: of ``torch.compile``, or a function.
        mode: of Inductor: "reduce-overhead", "max-autotune".
        **options: of ``compare_modules``, whose errors are raised too.

    Raises:
        NothingComparedError: no compiled graph ran.
        ValueError: the module is compiled already, or the backend takes no mode.

    Example:
        >>> import torch
        >>> from det_callbacks import compare_compiled
        >>> compare_compiled(torch.nn.Linear(4, 2), torch.randn(3, 4), backend="eager", iterations=2).equal
        True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a torch.nn.Module; got {module!r}")
    if is_compiled(module):
        raise ValueError(
            f"the module is compiled already ({type(module).__name__}); give what was put into torch.compile, or "
            "compare the two with compare_modules"
        )
    if mode is not None and backend != "inductor":
        raise ValueError(f'mode={mode!r} is for backend="inductor"; {backend!r} takes none')
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", "a backend")
    inductor: Any = torch._TorchCompileInductorWrapper  # torch 2.13: what torch.compile makes of that name and mode
    compile_graph: Any = inductor(mode, None, None) if backend == "inductor" else lookup_backend(backend)
    num_graphs = 0

    # a function: the copy of a compiled module has the same
    def counted(graph: Any, example_inputs: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return compile_graph(graph, example_inputs)

    inductor_config: Any = import_module("torch._inductor.config")
    raising = dynamo_config.patch(fail_on_recompile_limit_hit=True, suppress_errors=False)
    with raising, inductor_config.patch(fallback_random=True):
        control: Any = torch.compile(module, backend=counted)
        report = compare_modules(module, control, inputs, **options)
    if not num_graphs:
        raise NothingComparedError(
            f"No compiled graph ran, so {type(module).__name__} was compared with itself; it ran through. Is compiling "
            "disabled (torch.compiler.disable, TORCH_COMPILE_DISABLE), or its forward one that Dynamo leaves alone, "
            "such as nn.LSTM (torch._dynamo.config.allow_rnn)?"
        )
    note = f"{count(num_graphs, 'graph')} compiled by {name}"
    return replace(report, notes=(note, *report.notes))
