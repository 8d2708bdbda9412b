"""One of the two modules: a copy that is trained, and what it computes in each iteration."""

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule  # read in torch 2.13: what torch.compile makes of a module
from torch.nn.modules.module import register_module_forward_hook

# torch 2.13 has no public name for its pytrees; read there
from torch.utils import _pytree as pytree

from det_callbacks.errors import DetCallbacksError, ModuleRunError
from det_callbacks.numerics.result import Phase
from det_callbacks.observers.values import leaves_of
from det_callbacks.settings import MAX_SEED
from det_callbacks.trace.components import has_parts

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[int], Any]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Values = dict[tuple[Phase, str], Tensor]
"""(phase, name) -> a copy of a tensor that an iteration computed, in its order; a number is a tensor too."""


@dataclass(kw_only=True, slots=True)
class Side:
    """A copy of one of the two modules, "base" or "control", which is trained as ``compare_modules`` is told."""

    label: str
    module: nn.Module
    inputs: Inputs
    loss: Callable[[Any], Tensor] | None
    make_optimizer: OptimizerFactory
    seed: int
    patterns: tuple[str, ...]
    optimizer: torch.optim.Optimizer | None = None

    @property
    def description(self) -> str:
        """Class of the module, and whether it is compiled."""
        if isinstance(self.module, OptimizedModule):
            return f"compiled {type(self.module._orig_mod).__name__}"
        return f"{'partly compiled ' if is_compiled(self.module) else ''}{type(self.module).__name__}"

    def run(self, iteration: int) -> Values:
        """Run one iteration, and return what it computed; raise ``ModuleRunError`` where it raises."""
        found: Values = {}
        try:
            with torch.enable_grad():
                self._run(iteration, found)
        except DetCallbacksError:
            raise
        except Exception as error:  # whatever a module raises: reported with its side, never swallowed
            lines = [line for line in str(error).splitlines() if line.strip()][:3]  # those of Dynamo have many
            raise ModuleRunError(
                f"The {self.label} ({self.description}) raised {type(error).__name__} in iteration {iteration}: "
                f"{' '.join(lines)}\nBoth modules are as they were. Run it alone on the inputs of that iteration.",
                self.label,
                iteration,
            ) from error
        return found

    def _run(self, iteration: int, found: Values) -> None:
        if not iteration:
            self._add_state(found, "initial", "initial")
        args, kwargs = copy.deepcopy(_call_of(self.inputs, iteration))
        seed = (self.seed + iteration) % (MAX_SEED + 1)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        with self._submodules_into(found):
            output = self.module(*args, **kwargs)
        leaves = leaves_of(output, "output")
        for name, value in leaves:
            if isinstance(value, bool | int | float | complex):
                found["output", name] = torch.from_numpy(np.asarray(value))  # in double precision, as they are
            elif isinstance(value, Tensor):
                found["output", name] = _copied(name, value)
        loss = default_loss([value for _, value in leaves], seed) if self.loss is None else self.loss(output)
        if loss is not None:
            found["loss", "loss"] = _copied("loss", loss)
            if loss.requires_grad:
                loss.backward()
        self._add_gradients(found, (args, kwargs))
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if self.optimizer is None and parameters:
            self.optimizer = self.make_optimizer(parameters)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._add_state(found, "parameter", "buffer")

    def _add_state(self, found: Values, parameters: Phase, buffers: Phase) -> None:
        for name, parameter in self.module.named_parameters():
            found[parameters, plain_name(name)] = _copied(name, parameter)
        for name, buffer in self.module.named_buffers():
            found[buffers, plain_name(name)] = _copied(name, buffer)

    def _add_gradients(self, found: Values, call: Any) -> None:
        # the last layers have theirs first: what is wrong in the backward pass of a layer is wrong in all before it
        leaves: list[tuple[str, Any]] = [
            *((plain_name(name), parameter) for name, parameter in reversed([*self.module.named_parameters()])),
            *(("input" + pytree.keystr(path[1:]), leaf) for path, leaf in pytree.tree_leaves_with_path(call)),
        ]
        for name, leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.grad is not None:
                found["gradient", name] = _copied(name, leaf.grad)

    def _submodules_into(self, found: Values) -> AbstractContextManager[Any]:
        """Return what adds the outputs of submodules while it is open.

        The hook is global: a module with a hook of its own leaves its fast path (``nn.TransformerEncoderLayer``).
        """
        names = {
            id(part): name
            for name, part in self.module.named_modules()
            if name and any(fnmatchcase(name, pattern) for pattern in self.patterns)
        }
        num_calls: Counter[str] = Counter()

        def add(module: nn.Module, _: Any, output: Any) -> None:
            if (name := names.get(id(module))) is None:
                return
            number = f" #{num_calls[name]}" if num_calls[name] else ""
            num_calls[name] += 1
            for path, leaf in pytree.tree_leaves_with_path(output):
                if isinstance(leaf, Tensor):
                    full_name = f"{name}{number}{pytree.keystr(path)}"
                    found["module", full_name] = _copied(full_name, leaf)

        return register_module_forward_hook(add) if names else nullcontext()


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module, or one in it, is what torch.compile returned."""
    return any(isinstance(part, OptimizedModule) for part in module.modules())


def copy_of(label: str, module: nn.Module) -> nn.Module:
    """Return a copy of a module that can be trained, without gradients; raise ValueError where there is none."""
    if any(part._compiled_call_impl is not None for part in module.modules()):
        raise ValueError(
            f"the {label} was compiled in place (Module.compile), which copy.deepcopy drops; give torch.compile(module)"
        )
    try:
        copied = copy.deepcopy(module)
    except Exception as error:
        raise ValueError(
            f"the {label} cannot be copied ({error}); compare modules that copy.deepcopy can copy: detach what a "
            "forward pass left in their attributes"
        ) from error
    copied.zero_grad(set_to_none=True)
    return copied


def plain_name(name: str) -> str:
    """Return a qualified name without the attributes in which torch.compile keeps what it wraps."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def default_loss(leaves: list[Any], seed: int) -> Tensor | None:
    """Return the mean squared distance of the floating-point and complex leaves to random numbers; None without any.

    A sum has no gradient behind a softmax, and a mean of squares none behind a normalisation.
    """
    distances: list[Tensor] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel():
            values = leaf if leaf.is_complex() or leaf.dtype.itemsize > 2 else leaf.float()
            generator = torch.Generator("cpu").manual_seed(seed * 1009 + index)
            target = torch.randn(values.shape, generator=generator, dtype=torch.float32, device="cpu").to(values.device)
            distances.append((values - target).abs().square().mean())
    return torch.stack([one.to(distances[0]) for one in distances]).mean() if distances else None


def _call_of(inputs: Inputs, iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments."""
    if callable(inputs) and not isinstance(inputs, Tensor):
        inputs = inputs(iteration)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple) else (inputs,)), {}


def _copied(name: str, value: Tensor) -> Tensor:
    with torch.no_grad():
        value = value.detach()
        if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested or has_parts(value):
            raise TypeError(f"{name} is no ordinary strided tensor with elements; compare what it is made of")
        return value.resolve_conj().resolve_neg().clone()
