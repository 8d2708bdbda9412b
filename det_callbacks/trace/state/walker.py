"""Lists the state of a training by name: parameters, buffers, states of optimizers."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from det_callbacks.internals.torch import CHILDREN, modules_in
from det_callbacks.trace.state.leaves import flatten

Entry = tuple[str, Tensor | int | float | bool]
"""A name, and its tensor or number."""


class StateWalker:
    """Lists parameters and buffers of a module by qualified name, shared ones once.

    Unlike ``nn.Module.named_parameters``, it builds names only if the tree of modules changed.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules: list[tuple[str, nn.Module, tuple[int, ...]]] = []

    def walk(self, *kinds: str) -> list[tuple[str, Tensor]]:
        """Return (name, tensor) pairs from the attributes ``kinds`` of the modules, "_parameters" or "_buffers"."""
        if not self._is_known():
            self._modules = [
                (f"{name}." if name else "", module, _children_of(module)) for name, module in modules_in(self._root)
            ]
        known = set()
        entries: list[tuple[str, Tensor]] = []
        for kind in kinds:
            for prefix, module, _ in self._modules:
                for name, value in getattr(module, kind).items():
                    if value is not None and id(value) not in known:
                        known.add(id(value))
                        entries.append((prefix + name, value))
        return entries

    def _is_known(self) -> bool:
        for _, module, children in self._modules:  # twice in a step: ``any`` costs more
            if children != _children_of(module):
                return False
        return bool(self._modules)


def _children_of(module: nn.Module) -> tuple[int, ...]:
    return tuple(map(id, getattr(module, CHILDREN).values()))


def states_of_parameters(
    optimizers: Iterable[Optimizer], parameter_names: Mapping[int, str]
) -> list[tuple[Tensor, Entry]]:
    """Return the optimizers' tensors and numbers: (parameter, ("exp_avg of net.head.weight", tensor))."""
    entries: list[tuple[Tensor, Entry]] = []
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                owner = parameter_names.get(id(parameter)) or f"optimizer {index} group {group_index} [{number}]"
                for key, value in (optimizer.state.get(parameter) or {}).items():
                    is_one = isinstance(value, Tensor | bool | int | float)
                    for path, item in ((key, value),) if is_one else flatten(value, str(key)):
                        entries.append((parameter, (f"{path} of {owner}", item)))
    return entries
