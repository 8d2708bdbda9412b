"""Finds where an optimizer's update begins and ends, and its gradients, with torch's global hooks.

A closure runs before the update, in the phases of its code;
``on_update`` gets its gradients when it returns.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from det_callbacks.trace.dispatch import runs_uncompiled


@dataclass(slots=True, eq=False)
class OptimizerPhases:
    """Sets the ``phase`` of its owner around optimizer updates while open,
    and remembers the optimizers.

    It calls ``on_new`` for each new optimizer, ``on_update`` with the gradients before an update,
    and ``on_end`` after an update that is not part of another.
    """

    owner: Any
    closure_phase: str
    on_new: Callable[[], None] = lambda: None
    on_update: Callable[[Optimizer], None] = lambda optimizer: None
    on_end: Callable[[], None] = lambda: None
    seen: list[Optimizer] = field(default_factory=list)
    _outer: list[str] = field(default_factory=list)
    _handles: list[RemovableHandle] = field(default_factory=list)

    def open(self) -> None:
        self._outer.clear()
        before, after = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )
        self._handles = [before, after]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @runs_uncompiled
    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not any(optimizer is earlier for earlier in self.seen):
            self.seen.append(optimizer)
            self.on_new()
        self._outer.append(self.owner.phase)
        is_outermost = len(self._outer) == 1
        self.owner.phase = "optimizer"
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            if is_outermost:
                self.on_update(optimizer)
            return None

        def wrapped() -> Any:
            result = in_phase(self.owner, self.closure_phase, closure)()
            self.on_update(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    @runs_uncompiled
    def _after(
        self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> None:
        if self._outer:  # empty if the step began in a closure
            self.owner.phase = self._outer.pop()
        if not self._outer:
            self.on_end()


def in_phase(owner: Any, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        outer = owner.phase
        owner.phase = phase
        try:
            return function(*args, **kwargs)
        finally:
            owner.phase = outer

    return marked


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
