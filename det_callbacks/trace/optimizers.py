"""Where an optimizer's own update begins and ends, and the gradients that go into it.

Global optimizer hooks (``torch.optim.optimizer.register_optimizer_step_pre_hook``) see every optimizer without
touching it. A closure runs before the update proper, so it is wrapped: forward and backward inside it keep their
phases, and the gradients are recorded when it returns, after unscaling and clipping.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from det_callbacks.trace.named import gradients, record_group
from det_callbacks.trace.recorder import Recorder


class OptimizerPhases:
    """Sets the recorder's phase around optimizer updates while open, and remembers the optimizers seen.

    Args:
        recorder: whose phase is set.
        closure_phase: phase of what a closure runs outside training step and backward pass.
    """

    def __init__(self, recorder: Recorder, closure_phase: str) -> None:
        self._recorder = recorder
        self._closure_phase = closure_phase
        self._handles: list[RemovableHandle] = []
        self._outer: list[str] = []
        self.seen: list[Optimizer] = []

    def open(self) -> None:
        """Register the hooks."""
        self._outer.clear()
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Remove the hooks; may be called more than once."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not any(optimizer is known for known in self.seen):
            self.seen.append(optimizer)
            self._recorder.names.refresh()
        self._outer.append(self._recorder.phase)
        is_outermost = len(self._outer) == 1
        self._recorder.phase = "optimizer"
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            if is_outermost:
                self._record_gradients(optimizer)
            return None
        wrapped = self._wrap(closure, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _after(self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if self._outer:
            self._recorder.phase = self._outer.pop()

    def _wrap(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def traced_closure() -> Any:
            self._recorder.phase = self._closure_phase
            try:
                result = closure()
            finally:
                self._recorder.phase = "optimizer"
            self._record_gradients(optimizer)
            return result

        return traced_closure

    def _record_gradients(self, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        entries = gradients(parameters, self._recorder.parameter_names)
        record_group(self._recorder, "gradients", "gradient", entries)
