"""Where an op runs, for modes that record no program: phase, module and source."""

import torch
from torch import nn

from det_callbacks.trace.building import source_of
from det_callbacks.trace.modules import ModuleStack
from det_callbacks.trace.nodes import BackwardMap
from det_callbacks.trace.overloads import OpPlan
from det_callbacks.trace.tree import Context, Event

_graph_task_id = torch._C._current_graph_task_id  # torch 2.13: -1 outside a backward pass
_is_grad_enabled = torch.is_grad_enabled
_MAX_NODES = 500_000
_MAX_EVENTS = 50_000


class Places:
    """Keeps the running modules, and which forward op made which autograd node.

    Nodes are forgotten after half a million of them, and those made before then lead to "?", so that it can stay open
    over a whole training.

    Args:
        root: the module that module names are relative to; None names outermost modules by their class.

    Attributes:
        phase: phase of what runs outside a backward pass; set by whoever knows.
        modules: the running modules.
        backward: where ops of a backward pass belong.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self.phase = "forward"
        self.modules = ModuleStack(root)
        self._root = root
        self._parameter_names: dict[int, str] = {}
        self.backward = BackwardMap(self._parameter_names, self.modules)
        self._events: dict[tuple[object, ...], Event] = {}
        self._num_nodes = 0

    def open(self) -> None:
        """Start to follow the modules."""
        self._forget()
        self._parameter_names.clear()
        if self._root is not None:
            named = self._root.named_parameters(remove_duplicate=False)
            self._parameter_names.update((id(parameter), name) for name, parameter in reversed([*named]))
        self.modules.open()

    def close(self) -> None:
        """Stop; may be called more than once."""
        self.modules.close()
        self._forget()

    def note(self, func: object, plan: OpPlan, phase: str, context: Context) -> tuple[str, ...] | None:
        """Note the running op, which may own an autograd node; return its source when that had to be found out."""
        if phase == "optimizer":
            return None
        if phase == "backward":
            # in phase "backward" the context is an attribution
            if not (_is_grad_enabled() or context.recomputed):  # type: ignore[union-attr]  # an attribution
                return None
        elif not (_is_grad_enabled() or self.backward.is_unclaimed()):
            return None
        if self._num_nodes > _MAX_NODES and _graph_task_id() == -1:
            self._forget()
        source = source_of(context)
        event = Event(None, func, phase, context, [], [], [], 0)
        self.backward.note_functions(event)
        # one object for all calls from one place, so that little is kept of a long block
        key = (id(func), phase, context, source, event.functions)
        known = self._events.get(key)
        if known is None:
            event.op_base, event.is_in_place, event.source = plan.base, bool(plan.writes), source
            known = self._events[key] = event
        self.backward.register(known)
        self._num_nodes += 1
        return source

    def _forget(self) -> None:
        self.backward.clear()
        self._num_nodes = 0
        if len(self._events) > _MAX_EVENTS:
            self._events.clear()
