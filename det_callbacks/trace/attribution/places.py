"""Determines the phase and module of an op, and whether the op is recorded."""

from collections.abc import Iterable
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from det_callbacks.internals.torch import graph_task_id
from det_callbacks.runs.program import subject_of
from det_callbacks.runs.selection import PHASES, Selection
from det_callbacks.trace.attribution.backward import BackwardMap
from det_callbacks.trace.attribution.elsewhere import Elsewhere
from det_callbacks.trace.attribution.modules import ModuleStack
from det_callbacks.trace.attribution.tensor_names import NameTable
from det_callbacks.trace.op.call_graph import OpScope


def set_until_module(owner: Any, phase: str, modules: ModuleStack) -> None:
    """Set the phase of a user's own loop: a call of a module begins phase forward."""
    owner.phase = phase
    modules.call_at_next(partial(setattr, owner, "phase", "forward"))


class Places:
    """What a step's code belongs to at the moment: phase, module and compiled region; and the names of tensors."""

    def __init__(self, selection: Selection, root: nn.Module | None) -> None:
        self.selection = selection
        self.phase = "other"  # phase of ops outside a backward pass
        self.names = NameTable()
        self.parameter_names: dict[int, str] = {}  # ``id`` of a parameter -> name; shared with ``backward``
        self._parameter_name_set: frozenset[str] | None = None  # once something asked for it
        self.modules = ModuleStack(root)
        self.elsewhere = Elsewhere()
        self.backward = BackwardMap(self.parameter_names, self.modules)
        # thread -> the compiled ``Region`` that runs in it, or None if what runs has no rows
        self.running_regions: dict[int, Any] = {}
        self.selects_all = selection.modules == ("*",) and len(selection.phases) == len(PHASES)
        self._selected: dict[tuple[str, str], bool] = {}

    def name_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Set the names of the model's parameters."""
        self.parameter_names.clear()
        self.parameter_names.update([(id(parameter), name) for name, parameter in named])
        self._parameter_name_set = None

    @property
    def parameter_name_set(self) -> frozenset[str]:
        """Names of the model's parameters."""
        if self._parameter_name_set is None:
            self._parameter_name_set = frozenset(self.parameter_names.values())
        return self._parameter_name_set

    def owner_of(self, name: str) -> str:
        """Return the module that a named tensor belongs to: "net.head" for "exp_avg of net.head.weight"."""
        of = subject_of(name, phase="", role="named")["of"]
        return (of if of in self.parameter_name_set else name).rpartition(".")[0]

    def now(self) -> tuple[str, OpScope]:
        """Return the phase and scope of the running op."""
        if self.running_regions and (region := self.running_regions.get(get_ident())) is not None:
            return region.phase, region.scope
        if graph_task_id() == -1:
            return self.phase, self.modules.current
        return "backward", self.backward.scope()

    def is_in_region(self) -> bool:
        return get_ident() in self.running_regions

    def selects(self, phase: str, scope: OpScope) -> bool:
        """Return whether ops of a phase and scope are recorded."""
        if self.selects_all:
            return True
        selected = self._selected.get(key := (phase, scope.module))
        if selected is None:
            selected = self.selection.selects_phase(phase) and self.selection.selects_module(scope.module)
            self._selected[key] = selected
        return selected
