"""compare_compiled: a module and the same module compiled."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config  # read in torch 2.13: patch, fail_on_recompile_limit_hit
from torch._dynamo.backends.registry import lookup_backend

from det_callbacks.errors import NothingComparedError
from det_callbacks.numerics.leaves import Inputs
from det_callbacks.numerics.modules import compare_modules
from det_callbacks.numerics.result import NumericsReport
from det_callbacks.numerics.side import has_compiled
from det_callbacks.settings.knobs import load_inductor_config


def compare_compiled(
    module: nn.Module,
    inputs: Inputs,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    fallback_random: bool = True,
    **options: Any,
) -> NumericsReport:
    """Compare a module with the same module under ``torch.compile``, as ``compare_modules`` does.

    Nothing is left compiled in the module itself. That it was compiled is checked: compiled graphs have to have run, a
    function that Dynamo gives up on is an error, and ``notes`` says how many graphs there were.

    Takes the time that compiling takes, the first time that Inductor sees these graphs.

    Args:
        module: not compiled itself.
        inputs: as ``compare_modules`` takes them.
        backend: of ``torch.compile``: "inductor", "aot_eager", "eager", or a function.
        mode: of ``torch.compile``, for Inductor: "reduce-overhead", "max-autotune".
        dynamic: of ``torch.compile``.
        fullgraph: of ``torch.compile``: a graph break is an error.
        fallback_random: Inductor draws random numbers with torch's own generators, as eager code does, and so the same;
            its own are others from the same seed. What draws them is then not fused.
        **options: of ``compare_modules``.

    Raises:
        NothingComparedError: no compiled graph ran.
        ValueError: the module is compiled already, or the backend takes no mode.
        ModuleRunError: as ``compare_modules``; also where compiling fails.

    Example:
        >>> import torch
        >>> from det_callbacks import compare_compiled
        >>> compare_compiled(torch.nn.Linear(4, 2), torch.randn(3, 4), backend="eager", iterations=2).equal
        True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a torch.nn.Module; got {module!r}")
    if has_compiled(module):
        raise ValueError(
            f"the module is compiled already ({type(module).__name__}); give what was put into torch.compile, or "
            "compare the two with compare_modules"
        )
    if mode is not None and backend != "inductor":
        raise ValueError(f'mode={mode!r} is for backend="inductor"; {backend!r} takes none')
    counting = _Counting(backend, mode, dynamic)
    compiled: Any = torch.compile(module, backend=counting, dynamic=dynamic, fullgraph=fullgraph)
    with ExitStack() as stack:
        stack.enter_context(dynamo_config.patch(fail_on_recompile_limit_hit=True, suppress_errors=False))
        if fallback_random:
            stack.enter_context(load_inductor_config().patch(fallback_random=True))
        report = compare_modules(module, compiled, inputs, **options)
    if not counting.num_runs:
        raise NothingComparedError(
            f"No compiled graph ran, so {type(module).__name__} was compared with itself; it ran through. Look "
            "whether compiling is disabled (torch.compiler.disable, TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE), and "
            "whether its forward is one that Dynamo leaves alone, such as nn.LSTM (torch._dynamo.config.allow_rnn)."
        )
    graphs = "1 graph" if counting.num_graphs == 1 else f"{counting.num_graphs} graphs"
    note = f"{graphs} compiled by {counting.name}, run {counting.num_runs} times"
    return replace(report, notes=(*report.notes, note))


class _Counting:
    """A backend that counts the graphs that another one compiles, and how often they run."""

    def __init__(self, backend: str | Callable[..., Any], mode: str | None, dynamic: bool | None) -> None:
        self.name = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
        self.num_graphs = 0
        self.num_runs = 0
        self._backend: Callable[..., Any]
        if backend == "inductor":  # what torch.compile makes of that name, with its mode; torch 2.13
            self._backend = torch._TorchCompileInductorWrapper(mode, None, dynamic)
        else:
            self._backend = lookup_backend(backend)
        self.compiler_name = self.name

    def __call__(self, graph: Any, example_inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1
        run = self._backend(graph, example_inputs)

        def counted(*args: Any) -> Any:
            self.num_runs += 1
            return run(*args)

        return counted
