"""Watching for nondeterministic ops where no step is traced: validation, test, and levels below op."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from det_callbacks.trace.alerts import Alerts
from det_callbacks.trace.calls import comes_apart
from det_callbacks.trace.dispatch import DispatchMode
from det_callbacks.trace.modules import UNKNOWN_MODULE, ModuleStack
from det_callbacks.trace.overloads import OpPlan, make_plan
from det_callbacks.trace.source import capture_source
from det_callbacks.trace.tree import module_of

# looked at in torch 2.13; see trace/nodes.py
_graph_task_id = torch._C._current_graph_task_id
_current_node = torch._C._current_autograd_node
_next_sequence_number = torch._C._autograd._get_sequence_nr


class AlertWatch:
    """Hands torch's alerts to ``Alerts``, with module and source line, while open; some 5 microseconds an op.

    Backward ops carry the module whose op was the first after their autograd node was made; "?" where none was seen.

    Args:
        alerts: what is told of them.
        model: module that names are relative to.
    """

    def __init__(self, alerts: Alerts, model: nn.Module) -> None:
        self._alerts = alerts
        self._modules = ModuleStack(model)
        self._mode: _AlertMode | None = None

    def open(self) -> None:
        """Watch from here on; nothing is done when it is open."""
        if self._mode is None:
            mode = _AlertMode(self._alerts, self._modules)
            self._modules.open()
            mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
            self._mode = mode

    def close(self) -> None:
        """Stop watching; may be called more than once."""
        mode, self._mode = self._mode, None
        if mode is None:
            return
        self._modules.close()
        mode.is_off = True
        if mode.is_on_top:  # else leaving would pop a stranger
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own


class _AlertMode(DispatchMode):
    def __init__(self, alerts: Alerts, modules: ModuleStack) -> None:
        super().__init__()
        self.is_off = False
        self._alerts = alerts
        self._modules = modules
        self._calls: dict[int, tuple[OpPlan, Callable[..., Any]]] = {}
        self._module_of_node: dict[int, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_off:
            return func(*args, **kwargs)
        known = self._calls.get(id(func))
        if known is None:
            plan = make_plan(func)
            call = self._alerts.trap(func) if self._alerts.may_warn(plan.base) else func
            known = self._calls[id(func)] = (plan, call)
        if comes_apart(known[0], args, kwargs):
            return self.take_apart(func, args, kwargs)
        # The forward of a custom autograd Function runs without gradients, after its node was made. A device's backward
        # thread counts nodes of its own, which only a pass that makes a graph adds to.
        if torch.is_grad_enabled() or _graph_task_id() == -1:
            self._module_of_node.setdefault(_next_sequence_number() - 1, module_of(self._modules.current))
        try:
            return known[1](*args, **kwargs)
        except RuntimeError as error:
            if not self._alerts.is_alert(error):
                raise
            phase, module = self._place()
            return self._alerts.handle(
                error, lambda: func(*args, **kwargs), op=str(func), phase=phase, module=module, source=capture_source()
            )

    def _place(self) -> tuple[str, str]:
        if _graph_task_id() == -1:
            return "forward", module_of(self._modules.current)
        node = _current_node()
        if node is None:
            return "backward", UNKNOWN_MODULE
        return "backward", self._module_of_node.get(node._sequence_nr(), UNKNOWN_MODULE)
