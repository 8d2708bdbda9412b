"""Finds the module that holds all parameters of some optimizers."""

import gc
from collections.abc import Sequence, Set

import torch
from torch import nn
from torch.optim import Optimizer

from det_callbacks.internals.torch import CHILDREN
from det_callbacks.trace.state.optimizers import parameters_of
from det_callbacks.training.training import unwrapped


class SeveralModels(nn.Module):
    """Modules trained together, named by their classes, and trained tensors outside modules."""


def models_of(module: nn.Module | None, optimizers: Sequence[Optimizer]) -> nn.Module:
    """Return the called module, or a module that holds every parameter of the optimizers."""
    parameters: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        parameters |= {id(tensor): tensor for tensor in parameters_of(optimizer)}
    if module is not None and parameters.keys() <= _owned(module):
        return module
    roots: list[nn.Module] = []
    known = _outermost(parameters.keys())
    in_none: list[torch.Tensor] = []
    while parameters:
        first = next(iter(parameters))
        holders = [root for root in known if first in known[root]]
        root = max(holders, key=lambda one: len(known[one]), default=None)
        if root is None:
            in_none.append(parameters.pop(first))
            continue
        roots.append(root)
        parameters = {key: tensor for key, tensor in parameters.items() if key not in known[root]}
    if len(roots) == 1 and not in_none:
        return roots[0]
    return _together(roots, in_none)


def evaluated_models() -> nn.Module:
    """Return the outermost module of this process that has parameters, or one that holds all of them."""
    gc.collect()  # modules that the script has dropped
    roots = [root for root in _roots() if _owned(root)]
    return roots[0] if len(roots) == 1 else _together(roots, [])


def _together(roots: Sequence[nn.Module], in_none: Sequence[torch.Tensor]) -> SeveralModels:
    several = SeveralModels()
    for model in map(unwrapped, roots):
        # beside tensors alone, the only model keeps its names
        name = "" if len(roots) == 1 else _free_name(several, type(model).__name__)
        getattr(several, CHILDREN)[name] = model
    for tensor in in_none:
        name = _free_name(several, "tensor")
        if isinstance(tensor, nn.Parameter):
            several.register_parameter(name, tensor)
        else:
            several.register_buffer(name, tensor)
    return several


def _owned(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _outermost(keys: Set[int]) -> dict[nn.Module, set[int]]:
    """Return the outermost modules of this process that hold some of the parameters."""
    owned = {one: _owned(one) & keys for one in _roots()}
    return {one: found for one, found in owned.items() if found}


def _roots() -> list[nn.Module]:
    """Return the outermost modules of this process, in the order in which they were made."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    modules = [one for one in modules if not isinstance(one, SeveralModels) and CHILDREN in vars(one)]
    inner = {id(child) for one in modules for child in one.children()}
    return [one for one in modules if id(one) not in inner]


def _free_name(several: nn.Module, name: str) -> str:
    number, free = 1, name
    while hasattr(several, free):
        free, number = f"{name}_{number}", number + 1
    return free
