"""Which forward op a backward op belongs to, without anomaly mode.

An autograd node carries the sequence number it was made with, and the first op dispatched after that belongs to it.
That alone is not enough, so a match is accepted only when the node's name fits the op; otherwise the module is "?",
never a wrong one.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from threading import get_ident
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from det_callbacks.internals.torch import (
    CALL_MODULE,
    CHECKPOINT_PACK_HOOK,
    current_node,
    forward_code,
    graph_task_id,
    next_sequence_number,
    sequence_number,
    top_hooks,
)
from det_callbacks.trace.attribution.engine import Entry, engine_entry, frames_above_engine, source_of
from det_callbacks.trace.attribution.modules import UNKNOWN_MODULE, ModuleCalls, ModuleStack, repeated_region
from det_callbacks.trace.op.call_graph import CallNode, OpScope
from det_callbacks.trace.tables.overloads import OpPlan

_is_grad_enabled = torch.is_grad_enabled

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_REENTRANT = "CheckpointFunctionBackward"
_COMPILED = "CompiledFunctionBackward"  # of what AOTAutograd compiled
_COPY_SLICES = "torch::autograd::CopySlices"
_FRAMES_BELOW = 2  # from ``BackwardMap.scope`` to the engine: its caller and ``__torch_dispatch__``
_MAX_BETWEEN = 6  # nodes that an op may make before it runs, its own included
_MAX_FOLLOWED = 1000  # nodes that a compiled region made: it has few, views and copies aside
_MAX_NODES = 100_000
_MAX_STACKS = 10_000  # distinct stacks of code that are kept; a training has some hundreds

UNKNOWN = OpScope(module=UNKNOWN_MODULE, source=())
_HOOK = OpScope(module=UNKNOWN_MODULE)
ENGINE = OpScope(module=UNKNOWN_MODULE, source=("the autograd engine",))
# Claims the nodes that no op made. One for all recorders: nothing but UNKNOWN is ever kept in its scopes.
_UNSEEN = CallNode(None, None, "", OpScope(module=UNKNOWN_MODULE), [], [], [], 0)


_Nodes = dict[int, list[CallNode]]
"""The autograd nodes made in one thread, by number: the first call after each.

Saved-tensor hooks, and clones of inputs with the conjugate bit, may run ops between the making of a node and the op
proper; then the other calls that carry the number follow.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class ThreadNodes:
    """The autograd nodes that another thread made while it ran one module.

    Each thread numbers its own, and an idle one may be reused, or its identity be given to a new one: so a node of it
    is told by the object, and a number that is told so means no other node.
    """

    nodes: _Nodes
    first: int  # the numbers from here on are of these calls
    numbers: set[int] = field(default_factory=set)  # of the nodes whose objects are known


class BackwardMap:
    """Sequence number -> the forward call that made the autograd node, for one step."""

    def __init__(self, parameter_names: Mapping[int, str], modules: ModuleStack) -> None:
        self._parameter_names = parameter_names  # by the ``id`` of the parameter; the owner keeps it current
        self.calls: ModuleCalls = modules  # of the thread that is recorded now
        modules.on_enter = self.note_region
        self._callers: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # of checkpoints: regions -> modules
        self._threads: defaultdict[int, _Nodes] = defaultdict(dict)
        self._others: list[ThreadNodes] = []
        self._other_of: dict[Any, ThreadNodes] = {}  # by the node
        # by the ids of the codes: many calls share one stack, and hashing code objects runs over their constants
        self._stacks: dict[tuple[int, ...], tuple[CodeType, ...]] = {}

    def clear(self) -> None:
        """Forget the nodes of the last step; those made up to now belong to no op that was seen."""
        self._threads.clear()
        self._others.clear()
        self._other_of.clear()
        self.note_unseen()

    def begin_thread(self) -> ThreadNodes:
        """Note that this thread, which is not the step's own, begins to run a module."""
        nodes = self._threads[get_ident()] = {}
        self.note_unseen()
        return ThreadNodes(nodes=nodes, first=next_sequence_number())

    def end_thread(self, made: ThreadNodes, outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
        """Note that the module has returned; its nodes lie from those of ``outputs`` up to those of ``inputs``."""
        self._threads.pop(get_ident(), None)
        self._others.append(made)
        end = next_sequence_number()
        seen, waiting = set(inputs), list(outputs)
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or node.name() == _ACCUMULATE:
                continue
            seen.add(node)
            if made.first <= (number := sequence_number(node)) < end and node not in self._other_of:
                made.numbers.add(number)
                self._other_of[node] = made
                waiting.extend(parent for parent, _ in node.next_functions)

    @property
    def num_nodes(self) -> int:
        """Nodes that calls are known for."""
        return sum(map(len, self._threads.values()))

    def register(self, call: CallNode) -> None:
        """Note that the running op is this call; the first op after a node was made is the one that made it."""
        nodes = self._threads[get_ident()]
        number = next_sequence_number() - 1
        calls = nodes.setdefault(number, [call])
        first = calls[0]
        hooks = top_hooks(True)
        if hooks is not None:
            self.note_region()
        if first is not call and (hooks is not None or first.op_base == "aten.clone"):
            calls.append(call)
            if call.is_in_place and first.op_base == "aten.clone":
                nodes.setdefault(number - 1, [call])  # its node, then a clone of what it is about to overwrite

    def note_unseen(self) -> None:
        """Note that the last node of this thread, if nobody claimed it, was made by something that is no op."""
        self._threads[get_ident()].setdefault(next_sequence_number() - 1, [_UNSEEN])

    def is_unclaimed(self) -> bool:
        """Return whether the last node of this thread was made by the running op."""
        nodes = self._threads.get(get_ident())
        return nodes is None or next_sequence_number() - 1 not in nodes

    def scope(self) -> OpScope:
        """Return where the running op of a backward pass belongs: in a module called there, else by its autograd node.

        An op of a hook belongs with the node that the hook runs at, and has a source of its own. What a checkpoint
        repeats outside any module call belongs to the module that called the checkpoint.
        """
        calls = self.calls
        if calls.backward_pass == graph_task_id():
            return scope_in(calls.current.module, recomputed=calls.is_recomputed)
        entry = engine_entry(_FRAMES_BELOW)
        node = current_node()
        if node is None:
            return ENGINE if entry is Entry.ENGINE else _HOOK
        name = node.name()
        if (top_hooks(True) is not None or name == _REENTRANT) and (region := repeated_region()) is not None:
            return scope_in(self._caller_of(region), recomputed=True)
        if name == _ACCUMULATE:
            found = _of_accumulation(self._parameter_names.get(id(node.variable)))
        else:
            found = self._of_node(node, name)
        return found if entry is not Entry.HOOK else scope_in(found.module, recomputed=False)

    def note_stack(self, call: CallNode) -> None:
        """Note which code and which modules run at a new call, innermost first, to find the forward of a Function.

        In a backward pass these are the modules called since it began; their calls lie further in on the stack.
        """
        # codes, not frames: a list of frames holds its own, and so every tensor on the stack until it is collected
        codes = tuple([frame.f_code for frame in frames_above_engine()])
        if len(self._stacks) > _MAX_STACKS:
            self._stacks.clear()
        call.codes = self._stacks.setdefault(tuple(map(id, codes)), codes)
        task = graph_task_id()
        modules = [scope.module for _, scope, called_in, _ in reversed(self.calls.stack) if called_in == task]
        modules.append("" if task == -1 else self._caller_of(repeated_region()))
        call.running_modules = tuple(modules)

    def note_region(self) -> None:
        """Note which module called the checkpoint whose region runs, when the first op or module in it does."""
        hooks = top_hooks(True)
        if hooks is not None and getattr(hooks[0], "__qualname__", None) == CHECKPOINT_PACK_HOOK:
            region = hooks[0].__closure__[0].cell_contents
            if region not in self._callers:
                self._callers[region] = (self.calls.current if graph_task_id() == -1 else self.scope()).module

    def _caller_of(self, region: Any) -> str:
        if type(region).__name__ == _REENTRANT:
            return self._of_node(region, _REENTRANT).module
        return UNKNOWN_MODULE if region is None else self._callers.get(region, UNKNOWN_MODULE)

    def _of_node(self, node: Any, name: str) -> OpScope:
        """Return the scope of a node by the forward op that made it; all threads that know one must agree."""
        number = sequence_number(node)
        if len(self._threads) == 1 and not self._others:
            (nodes,) = self._threads.values()
            if (
                (calls := nodes.get(number)) is not None
                and (scopes := calls[0].scopes) is not None
                and (known := scopes.get(name)) is not None
            ):
                return known
        code = forward_code(node)
        if (made := self._other_of.get(node)) is not None:
            return _find_in(made.nodes, number, name, code)
        others = (one.nodes for one in self._others if number not in one.numbers)
        every = (_find_in(nodes, number, name, code) for nodes in (*self._threads.values(), *others))
        found = [scope for scope in every if scope is not UNKNOWN]
        return found[0] if len({scope.module for scope in found}) == 1 else UNKNOWN


class OpPlaces:
    """Where ops run, for modes that record no program: phase, module and source.

    Nodes are forgotten after 100,000 of them, and those made before then lead to "?", so that it can stay open over a
    whole training.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self.phase = "forward"
        self.modules = ModuleStack(root)
        self._root = root
        self._parameter_names: dict[int, str] = {}
        self.backward = BackwardMap(self._parameter_names, self.modules)

    def open(self) -> None:
        """Start to follow the modules."""
        self.backward.clear()
        named = [] if self._root is None else [*self._root.named_parameters(remove_duplicate=False)]
        self._parameter_names.clear()
        self._parameter_names.update((id(parameter), name) for name, parameter in reversed(named))
        self.modules.open()

    def close(self) -> None:
        """Stop; may be called more than once."""
        self.modules.close()
        self.backward.clear()

    def note(self, func: object, plan: OpPlan, phase: str, scope: OpScope) -> None:
        """Note the running op, which may own an autograd node."""
        may_own_node = scope.recomputed if phase == "backward" else self.backward.is_unclaimed()
        if phase == "optimizer" or not (_is_grad_enabled() or may_own_node):
            return
        if self.backward.num_nodes > _MAX_NODES and graph_task_id() == -1:
            self.backward.clear()
        call = CallNode(None, func, phase, scope, [], [], [], 0, source=source_of(scope))
        call.op_base, call.is_in_place = plan.base, bool(plan.writes)
        self.backward.note_stack(call)
        self.backward.register(call)


@lru_cache(maxsize=100_000)
def scope_in(module: str, *, recomputed: bool) -> OpScope:
    """Return the scope of an op inside a module that is called during a backward pass."""
    return OpScope(module=module, recomputed=recomputed)


@lru_cache(maxsize=100_000)
def _of_accumulation(name: str | None) -> OpScope:
    module = UNKNOWN_MODULE if name is None else name.rpartition(".")[0]
    return OpScope(module=module, source=(), name=name)


def _find_in(nodes: _Nodes, number: int, name: str, code: CodeType | None) -> OpScope:
    """Return the scope of the node of a number, UNKNOWN when no call can be told to have made it.

    An op's own node comes first; then, still before the op, the nodes of what it does first: a clone of what it will
    overwrite, AsStrided for each view among its inputs whose base was written since. So the op may carry a higher
    number than its node, with no call in between. Right after an op that wrote into a view comes CopySlices.
    """
    if name == _COPY_SLICES:
        call = nodes.get(number - 1, [_UNSEEN])[0]
        if call.op_base == "aten.clone":
            call = nodes.get(number - 2, [_UNSEEN])[0]
        return _scope_in(call) if call.is_in_place else UNKNOWN
    num_between = next((at for at in range(_MAX_BETWEEN) if number + at in nodes), 0)
    call = nodes.get(number + num_between, [_UNSEEN])[0]
    if code is not None:
        found = _scope_in(call, code)
        if found is not UNKNOWN or num_between:
            return found
    if _fits(call.op_base, name):
        found = _scope_in(call)
        if code is None and not num_between:
            _scopes_of(call)[name] = found  # the common case, looked up first from now on
        return found
    return next((_scope_in(later) for later in nodes.get(number, [])[1:] if _fits(later.op_base, name)), UNKNOWN)


def _scopes_of(call: CallNode) -> dict[object, OpScope]:
    """Return the scopes that are known of a call: few have any."""
    if call.scopes is None:
        call.scopes = {}
    return call.scopes


def _scope_in(call: CallNode, code: CodeType | None = None) -> OpScope:
    """Return where a node belongs that was made at a call, by its op or by the Function with this forward around it."""
    key = id(code)  # equal code is not the same Function
    scopes = _scopes_of(call)
    known = scopes.get(key)
    if known is None:
        modules = {call.module} if code is None else _callers_of(code, call)
        is_known = len(modules) == 1 and UNKNOWN_MODULE not in modules
        known = scopes[key] = _of_forward(modules.pop(), call.source) if is_known else UNKNOWN
    return known


@lru_cache(maxsize=100_000)
def _of_forward(module: str, source: tuple[str, ...]) -> OpScope:
    """Return the scope of the backward ops of a forward op, always as the same object, since those are compared."""
    return OpScope(module=module, source=source)


def _callers_of(code: CodeType, call: CallNode) -> set[str]:
    """Return the modules that called the Functions with this forward which run at a call."""
    outermost = len(call.running_modules) - 1
    num_entered = [call.codes[:depth].count(CALL_MODULE) for depth, one in enumerate(call.codes) if one is code]
    return {call.running_modules[min(count, outermost)] for count in num_entered}


@lru_cache(maxsize=4096)
def _fits(op_base: str, name: str) -> bool:
    """Return whether an op can have made a node of this name: "aten.nll_loss_forward" makes "NllLossBackward0"."""
    base = re.sub(r"Backwards?\d*(_copy)?$", r"\1", name.rpartition("::")[2]).replace("_", "").lower()
    op = op_base.removeprefix("aten.").replace("_", "").replace(".", "").lower().removesuffix("forward")
    return base == op or base.startswith(f"generatedbackwardfor{op}")


def compiled_nodes(outputs: Iterable[Tensor], number: int) -> list[Any]:
    """Return the autograd nodes of compiled code among those that were made from a sequence number on."""
    waiting: list[Any] = [value.grad_fn for value in outputs]
    seen: set[Any] = set()
    while waiting and len(seen) < _MAX_FOLLOWED:
        node = waiting.pop()
        if node is not None and node not in seen and node.name() != _ACCUMULATE and sequence_number(node) >= number:
            seen.add(node)
            waiting.extend(parent for parent, _ in node.next_functions)
    found = [node for node in seen if node.name() == _COMPILED]
    return sorted(found, key=sequence_number)
