"""compare_modules: two modules that are to compute the same, trained side by side, and by how much they differ."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from det_callbacks.errors import NothingComparedError
from det_callbacks.numerics.iteration import ContextFactory, Recipe, run_iteration
from det_callbacks.numerics.leaves import Inputs, input_of
from det_callbacks.numerics.names import plain_name, prefixes_between
from det_callbacks.numerics.result import NumericsReport, TensorComparison
from det_callbacks.numerics.side import Side
from det_callbacks.numerics.sinks import Comparer, Record
from det_callbacks.numerics.tolerances import Given, ToleranceTable
from det_callbacks.runs.selection import as_names
from det_callbacks.settings import MAX_SEED, DeterminismSettings, enforce_determinism

_AS_THEY_ARE = DeterminismSettings(
    deterministic_algorithms=None, cublas_workspace_config=None, cudnn_benchmark=None, cudnn_deterministic=None
)
"""Enforces nothing; leaving it puts flags, threads and generators back all the same."""


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that is used where none is given: plain gradient descent, rate 0.01.

    It carries a difference of the gradients on as it is. Adam divides by the gradient's size, and so makes a full step
    out of the rounding errors of a gradient that is zero.
    """
    return torch.optim.SGD(parameters, lr=0.01)


def compare_modules(
    base: nn.Module,
    control: nn.Module,
    inputs: Inputs,
    *,
    iterations: int = 10,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    settings: DeterminismSettings | Mapping[str, Any] | None = None,
    base_context: ContextFactory | None = None,
    control_context: ContextFactory | None = None,
    control_inputs: Inputs | None = None,
    tolerances: Given = None,
    check_dtype: bool = True,
    modules: Sequence[str] = ("*",),
    device: torch.device | str | None = None,
    seed: int = 0,
) -> NumericsReport:
    """Train two modules side by side from the same seeds, and compare everything that they compute.

    In every iteration: outputs, loss, gradients of parameters and of inputs, inputs that were written in place,
    parameters after the optimizer's step, buffers; before the first one parameters and buffers. Where neither side is
    compiled, outputs of submodules as well, so that the first that differs is named; those decide nothing. Each side
    goes on from its own parameters, so later iterations show how a difference grows. Names may differ by
    ``_orig_mod.`` and the like, also inside, or by a prefix that all names of a side share.

    The modules are not trained: they run on copies, and parameters, buffers, gradients, attributes, generators (Python,
    NumPy, torch on each device, those held by modules), settings and the training mode are as before when it returns or
    raises. They may be one and the same module. What a module writes elsewhere (files, globals, attributes of objects
    that are no modules) stays written.

    Time: the iterations of both, and on a host some 10 nanoseconds for each element that is compared, 60 where its
    tensor differs (in double precision). Memory: a copy of each side's parameters and buffers, its optimizer state, and
    a copy of what the base computed in one iteration (outputs, also of submodules, gradients, parameters, buffers),
    however many iterations there are. With ``device`` only one side is there at a time, and all copies lie on the host.

    Args:
        base: what relative differences are relative to.
        control: what is compared with it.
        inputs: one tensor; a tuple of positional arguments; a mapping of keyword arguments; (args, kwargs); a list of
            these, one for each iteration; or a function from the iteration to one of these. Copied for each side.
        iterations: how many.
        optimizer: makes an optimizer from the parameters that need gradients, ``lambda p: torch.optim.AdamW(p)``; None:
            gradient descent at rate 0.01. Its ``step`` is called without a closure.
        loss: makes a tensor without dimensions from the output; None: the mean squared distance of its floating-point
            leaves to random numbers from the seed. Nothing is differentiated where it needs no gradient.
        settings: enforced while both run; None enforces nothing.
        base_context: makes a context manager for each iteration of the base: an autocast (switched off again for the
            backward pass), an attention backend, ``lambda: enforce_determinism(...)``.
        control_context: the same for the control.
        control_inputs: inputs of the control, where it takes others (another dtype); None: the same.
        tolerances: None: the table of ``torch.testing.assert_close``, but with ``atol`` (at least ``rtol``) in units of
            the root mean square of the base's tensor, for gradients and parameters of the largest among them. A dtype:
            its line of that table for all that are more precise (autocast leaves parameters float32). A pair (rtol,
            atol), or dtype -> (rtol, atol): taken as ``assert_close`` does. Of two dtypes the looser counts; integers
            have to be equal.
        check_dtype: whether another dtype is a difference in itself. False compares the values only, at the looser
            tolerance; ULPs are those of the coarser dtype.
        modules: fnmatch patterns over the names of submodules whose outputs are compared; () for none.
        device: where both run, one after the other, while the other's state is on the host; None: where they are.
        seed: of iteration 0; iteration i has seed + i.

    Returns:
        The report; ``report.assert_close()`` raises where something is beyond its tolerance.

    Raises:
        ModuleRunError: a side raised; the text says which, where and in which iteration.
        NothingComparedError: there was no tensor to compare.
        SettingsError: the settings cannot be enforced.
        TypeError: an argument is of another type, or an output holds something that cannot be compared.
        ValueError: an argument has a value that it cannot have; a parameter that cannot be copied.

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
    others = inputs if control_inputs is None else control_inputs
    for name, given in (("inputs", inputs), ("control_inputs", others)):
        if isinstance(given, list) and len(given) < iterations:
            raise ValueError(
                f"{name} is a list, so one for each of {iterations} iterations; it has {len(given)}. Positional "
                "arguments are a tuple."
            )
    table = ToleranceTable(tolerances)
    where = None if device is None else torch.device(device)
    with ExitStack() as stack:
        # copies that are made in inference mode could not be trained
        stack.enter_context(torch.inference_mode(False))
        sides = Side("base", base, where), Side("control", control, where)
        _align(*sides)
        is_compiled = any(side.is_compiled for side in sides)
        recipe = Recipe(
            loss=loss,
            optimizer=optimizer or sgd,
            seed=seed,
            modules=() if is_compiled else as_names("modules", modules),
            device=where,
        )
        found: list[TensorComparison] = []
        left_out: Counter[str] = Counter()
        stack.enter_context(enforce_determinism(_AS_THEY_ARE))
        if settings is not None:
            stack.enter_context(enforce_determinism(settings))
        for iteration in range(iterations):
            record = Record(None if where is None else torch.device("cpu"))
            comparer = Comparer(record, iteration=iteration, tolerances=table, check_dtype=check_dtype)
            plan = ((sides[0], inputs, record, base_context), (sides[1], others, comparer, control_context))
            for side, given, sink, context in plan:
                with side.loaded():
                    call = input_of(given, iteration)
                    run_iteration(side, call, sink, recipe, iteration=iteration, context=context)
            found += comparer.finish()
            left_out += comparer.left_out
    if not any(comparison.decides for comparison in found):
        raise NothingComparedError(
            "The modules have no parameters, buffers or outputs, so nothing was compared; both ran without an error. "
            "Return what is to be compared from their forward."
        )
    if is_compiled and modules:
        left_out["outputs of submodules, since a side is compiled"] = 1
    return NumericsReport(
        base=sides[0].description,
        control=sides[1].description,
        num_iterations=iterations,
        comparisons=tuple(found),
        left_out=dict(left_out),
    )


def _align(base: Side, control: Side) -> None:
    """Set the prefixes that names of parameters, buffers and modules have to lose so that both sides meet."""
    names = []
    for side in (base, control):
        module = side.module
        tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        names.append([plain_name(name) for name in tensors or (name for name, _ in module.named_modules() if name)])
    base.prefix, control.prefix = prefixes_between(*names)
