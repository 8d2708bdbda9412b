"""What an op belongs to: its phase, module, and the names of its tensors.

The recorder only counts the modules that other threads of a step call, and the ops of the backward
pass through their outputs. Which thread runs first is a matter of timing, and so is the order of
their autograd nodes: the engine sorts nodes by numbers that each thread counts separately.
"""

from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock, get_ident
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from det_callbacks.internals.torch import (
    current_node,
    graph_task_id,
    pin_storage,
    storage_address,
    unpin_storage,
)
from det_callbacks.runs.program import subject_of
from det_callbacks.runs.selection import PHASES, Selection
from det_callbacks.trace.backward import BackwardMap
from det_callbacks.trace.call_graph import OpScope
from det_callbacks.trace.components import STRIDED, address_of, has_parts, holds_data, parts_of
from det_callbacks.trace.leaves import flatten
from det_callbacks.trace.modules import ModuleStack

Addresses = tuple[int, int]
"""Addresses of a tensor's storage, and of its first element."""

OTHER_THREAD = "other_thread"  # reason in ``ops_skipped``

_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class NameTable:
    """Maps addresses to the qualified names of parameters, buffers and optimizer states.

    ``HashMode`` replaces the names when a step ends. It refreshes them if a parameter has moved
    when a step begins, and for each new optimizer, so a resumed run has the same names. Weak
    references pin the storages, so that no address is reused.
    """

    def __init__(self) -> None:
        self.list_state: Callable[[], Iterable[tuple[str, object]]] = tuple
        self.list_parameters: Callable[[torch.Size], Iterable[tuple[str, Tensor]]]
        self.list_parameters = lambda shape: ()
        self.known: dict[Addresses, str] = {}
        self._pins: list[int] = []
        self._begins: dict[int, list[int]] = {}  # storage -> addresses of its named tensors

    def refresh(self) -> None:
        """Collect the names of the current state."""
        entries = [(name, value) for name, value in self.list_state() if has_address(value)]
        # the first name wins
        names = {addresses_of(value): name for name, value in reversed(entries)}
        self.replace(names, (value for _, value in entries))

    def replace(self, names: dict[Addresses, str], tensors: Iterable[Tensor]) -> None:
        """Set the names, and pin the tensors that have them;
        reads ``tensors`` only if a name changed.
        """
        if names != self.known:
            self.close()
            self.known = names
            for storage, address in names:
                self._begins.setdefault(storage, []).append(address)
            self._pins = [
                pin_storage(next(parts_of(tensor)).untyped_storage()) for tensor in tensors
            ]

    def of(self, tensor: Tensor) -> str | None:
        return self.known.get(addresses_of(tensor))

    def offset_in(self, tensor: Tensor) -> int:
        """Return the offset of a tensor inside its named tensor, or inside its storage.

        A checkpoint restores only values, not the position of a named tensor in its storage.
        """
        address = address_of(tensor)
        begins = self._begins.get(storage_address(tensor.untyped_storage()), ())
        begin = max((known for known in begins if known <= address), default=None)
        return (
            int(tensor.storage_offset()) if begin is None else (address - begin) // tensor.itemsize
        )

    def of_written(self, tensor: Tensor) -> str | None:
        """Return the name of an ordinary strided tensor, perhaps a gradient,
        that an op has written.
        """
        if (own_name := self.of(tensor)) is not None:
            return own_name
        if not (address := address_of(tensor)):  # an efficient zero tensor has no memory
            return None
        for name, parameter in self.list_parameters(tensor.shape):
            gradient = parameter.grad
            if (
                gradient.__class__ is Tensor
                and gradient.layout is STRIDED
                and address_of(gradient) == address
            ):
                return f"grad of {name}"
        return None

    def close(self) -> None:
        self.known, self._begins = {}, {}
        pins, self._pins = self._pins, []  # first, so that each is released once even after Ctrl-C
        for pin in pins:
            unpin_storage(pin)

    def __del__(self) -> None:
        self.close()


def has_address(value: object) -> TypeGuard[Tensor]:
    """Return whether a tensor, or its DTensor shard, is one strided tensor in memory."""
    if not isinstance(value, Tensor) or not holds_data(value):
        return False
    parts = parts_of(value) if has_parts(value) else (value,)
    return [part.numel() > 0 and not has_parts(part) for part in parts] == [True]


def addresses_of(tensor: Tensor) -> Addresses:
    part = next(parts_of(tensor)) if has_parts(tensor) else tensor
    return storage_address(part.untyped_storage()), address_of(part)


class Elsewhere:
    """What the other threads of a step ran; its lock is never held while user code runs."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self.num_calls = 0  # of modules and compiled regions
            self.nodes: set[Any] = set()  # of their outputs, and all nodes that those lead to

    def note_call(self, output: Any) -> None:
        """Note that a module or a compiled region returned in this thread,
        which is not the step's.
        """
        tensors = (leaf for _, leaf in flatten(output, "") if isinstance(leaf, Tensor))
        nodes = self._reachable(tensor.grad_fn for tensor in tensors)
        with self._lock:
            self.num_calls += 1
            self.nodes |= nodes

    def note_read(self, tensor: Tensor) -> None:
        """Note a tensor that no recorded op wrote: another thread made it, if it depends on a
        module's output there.
        """
        nodes = self._reachable([tensor.grad_fn])
        with self._lock:
            if not nodes.isdisjoint(self.nodes):
                self.nodes |= nodes

    def is_running(self, func: object = None) -> bool:
        """Return whether the engine runs one of the nodes, or an op that adds up the
        gradients that one receives.
        """
        if (node := current_node()) is None:
            return False
        return node in self.nodes or (
            func in _SUMS and any(parent in self.nodes for parent, _ in node.next_functions)
        )

    def _reachable(self, nodes: Iterable[Any]) -> set[Any]:
        """Return autograd nodes and all that they lead to, up to nodes that are known already."""
        seen: set[Any] = set()
        waiting = [*nodes]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node not in self.nodes:
                waiting.extend(parent for parent, _ in node.next_functions)
        return seen


def set_phase(owner: Any, phase: str, modules: ModuleStack, *, is_own_loop: bool) -> None:
    """Set the phase that an object has; in a user's own loop, a call of a module begins phase
    forward.
    """
    owner.phase = phase
    if is_own_loop:
        modules.call_before_next(partial(setattr, owner, "phase", "forward"))


class Places:
    """What a step's code belongs to at the moment: phase, module and compiled region;
    and the names of tensors.
    """

    def __init__(self, selection: Selection, root: nn.Module | None) -> None:
        self.selection = selection
        self.phase = "other"  # phase of ops outside a backward pass
        self.names = NameTable()
        # ``id`` of a parameter -> name; shared with ``backward``
        self.parameter_names: dict[int, str] = {}
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
        """Return the module that a named tensor belongs to:
        "net.head" for "exp_avg of net.head.weight".
        """
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
            selected = self.selection.selects_phase(phase) and self.selection.selects_module(
                scope.module
            )
            self._selected[key] = selected
        return selected
