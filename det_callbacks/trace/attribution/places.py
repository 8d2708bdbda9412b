"""Determines phase and module of ops, names of tensors, and whether they are recorded."""

from collections.abc import Iterable
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from det_callbacks.internals.torch import graph_task_id
from det_callbacks.runs.program import parameter_in
from det_callbacks.runs.selection import PHASES, Selection
from det_callbacks.trace.attribution.backward import BackwardMap
from det_callbacks.trace.attribution.modules import ModuleCalls, ModuleStack
from det_callbacks.trace.attribution.tensor_names import NameTable
from det_callbacks.trace.op.call_graph import OpScope


class Places:
    def __init__(self, selection: Selection, root: nn.Module | None) -> None:
        self.selection = selection
        self.phase = "other"  # phase of ops outside a backward pass
        self.names = NameTable()
        self.parameter_names: dict[int, str] = {}  # ``id`` of a parameter -> name
        self._parameters: frozenset[str] | None = None  # the names, once something asked for them
        self.modules = ModuleStack(root)
        self.calls: ModuleCalls = self.modules  # calls of the thread being recorded, while the lock is held
        self.backward = BackwardMap(self.parameter_names, self.modules)
        self.inside: dict[int, Any] = {}  # thread -> its running compiled Region, or None without rows
        self.selects_all = selection.modules == ("*",) and len(selection.phases) == len(PHASES)
        self._selected: dict[tuple[str, str], bool] = {}

    def name_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Set the names of the model's parameters."""
        self.parameter_names.clear()
        self.parameter_names.update([(id(parameter), name) for name, parameter in named])
        self._parameters = None

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the model's parameters."""
        if self._parameters is None:
            self._parameters = frozenset(self.parameter_names.values())
        return self._parameters

    def owner_of(self, name: str) -> str:
        """Return the module that a named tensor belongs to: "net.head" for "exp_avg of net.head.weight"."""
        return (parameter_in(name, self.parameters) or name).rpartition(".")[0]

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
