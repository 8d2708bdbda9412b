"""Determines phase and module of ops, names of tensors, and whether they are recorded."""

from threading import get_ident
from typing import Any

from torch import nn

from det_callbacks.internals.torch import graph_task_id
from det_callbacks.runs.selection import PHASES, Selection
from det_callbacks.trace.attribution.backward import BackwardMap
from det_callbacks.trace.attribution.modules import ModuleCalls, ModuleStack
from det_callbacks.trace.attribution.names import NameTable
from det_callbacks.trace.op.call_graph import OpScope


class Places:
    def __init__(self, selection: Selection, root: nn.Module | None) -> None:
        self.selection = selection
        self.phase = "other"  # phase of ops outside a backward pass
        self.names = NameTable()
        self.parameter_names: dict[int, str] = {}  # ``id`` of a parameter -> name
        self.modules = ModuleStack(root)
        self.calls: ModuleCalls = self.modules  # calls of the thread being recorded, while the lock is held
        self.backward = BackwardMap(self.parameter_names, self.modules)
        self.inside: dict[int, Any] = {}  # thread -> its running compiled Region, or None without rows
        self.selects_all = selection.modules == ("*",) and len(selection.phases) == len(PHASES)
        self._selected: dict[tuple[str, str], bool] = {}

    def follow(self, calls: ModuleCalls) -> None:
        self.calls = self.backward.calls = calls

    def now(self) -> tuple[str, OpScope]:
        if self.inside and (region := self.inside.get(get_ident())) is not None:
            return region.phase, region.scope
        if graph_task_id() == -1:
            return self.phase, self.calls.current
        return "backward", self.backward.scope()

    def is_in_region(self) -> bool:
        return get_ident() in self.inside

    def selects(self, phase: str, scope: OpScope) -> bool:
        if self.selects_all:
            return True
        selected = self._selected.get(key := (phase, scope.module))
        if selected is None:
            selected = self.selection.selects_phase(phase) and self.selection.selects_module(scope.module)
            self._selected[key] = selected
        return selected
