"""Finds the forward op of a backward op, without anomaly mode.

An autograd node has a sequence number, and the first op dispatched after its creation usually made
it. The match counts only if the node's name fits the op; otherwise the module is "?".
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from threading import get_ident
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

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
from det_callbacks.trace.call_graph import CallNode, OpScope
from det_callbacks.trace.modules import (
    UNKNOWN_MODULE,
    EngineEntry,
    ModuleStack,
    engine_entry,
    frames_above_engine,
    repeated_region,
    source_of,
)
from det_callbacks.trace.overloads import OpPlan

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_REENTRANT = "CheckpointFunctionBackward"
_COMPILED = "CompiledFunctionBackward"  # AOTAutograd's
_COPY_SLICES = "torch::autograd::CopySlices"
_FRAMES_BELOW = 2  # from ``BackwardMap.scope`` to the engine: its caller and ``__torch_dispatch__``
MAX_BETWEEN = 6  # nodes that an op may make before it runs, including its main node
_MAX_FOLLOWED = 1000
_MAX_NODES = 100_000
_MAX_STACKS = 10_000  # a run has a few hundred

UNKNOWN = OpScope(module=UNKNOWN_MODULE, source=())
_HOOK = OpScope(module=UNKNOWN_MODULE)
ENGINE = OpScope(module=UNKNOWN_MODULE, source=("the autograd engine",))
# stands for the call that made a node, if the recorder did not see it
_UNSEEN = CallNode(None, None, "", OpScope(module=UNKNOWN_MODULE), [], [], [], 0)


_Nodes = dict[int, list[CallNode]]
"""The calls after each node of one thread; hooks may run ops between a node and its op."""


class BackwardMap:
    """Maps an op of a backward pass to the forward op whose gradient it computes.

    It keeps the calls of each thread by the number of the autograd node that they probably made.
    """

    def __init__(self, parameter_names: Mapping[int, str], modules: ModuleStack) -> None:
        # ``id`` of a parameter -> name; the owner keeps it current
        self._parameter_names = parameter_names
        self._modules = modules
        modules.on_enter = self.note_region
        # checkpointed region -> module
        self._callers: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self.threads: defaultdict[int, _Nodes] = defaultdict(dict)
        # by ids, since hashing a code object hashes its constants
        self._stacks: dict[tuple[int, ...], tuple[CodeType, ...]] = {}

    def clear(self) -> None:
        self.threads.clear()
        self.note_unseen()

    def register(self, call: CallNode) -> None:
        """Note that a call runs: it made this thread's last node, unless an earlier call did."""
        nodes = self.threads[get_ident()]
        number = next_sequence_number() - 1
        calls = nodes.setdefault(number, [call])
        first = calls[0]
        hooks = top_hooks(True)
        if hooks is not None:
            self.note_region()
        if first is not call and (hooks is not None or first.op_base == "aten.clone"):
            calls.append(call)
            if call.is_in_place and first.op_base == "aten.clone":
                # its node precedes that of the clone of its overwritten input
                nodes.setdefault(number - 1, [call])

    def register_op(self, func: object, plan: OpPlan, phase: str, scope: OpScope) -> None:
        """Register the running op for a mode that has no call graph, and forget old nodes, since
        the mode may stay open for many steps.
        """
        may_own_node = scope.recomputed if phase == "backward" else self.is_unclaimed()
        if phase == "optimizer" or not (torch.is_grad_enabled() or may_own_node):
            return
        if graph_task_id() == -1 and sum(map(len, self.threads.values())) > _MAX_NODES:
            self.clear()
        call = CallNode(None, func, phase, scope, [], [], [], 0, source=source_of(scope))
        call.op_base, call.is_in_place = plan.base, bool(plan.writes)
        self.note_stack(call)
        self.register(call)

    def note_unseen(self) -> None:
        """Mark the last node of this thread as made by no op, if it has no call."""
        self.threads[get_ident()].setdefault(next_sequence_number() - 1, [_UNSEEN])

    def is_unclaimed(self) -> bool:
        nodes = self.threads.get(get_ident())
        return nodes is None or next_sequence_number() - 1 not in nodes

    def scope(self) -> OpScope:
        """Return the scope of the running op of a backward pass.

        It is the module called in this pass, else the autograd node's, else the caller of the
        recomputed checkpoint. An op of a hook has the scope of the node, with the hook's source.
        """
        modules = self._modules
        if modules.backward_pass == graph_task_id():
            return scope_in(modules.current.module, recomputed=modules.is_recomputed)
        entry = engine_entry(_FRAMES_BELOW)
        node = current_node()
        if node is None:
            return ENGINE if entry is EngineEntry.ENGINE else _HOOK
        name = node.name()
        if (top_hooks(True) is not None or name == _REENTRANT) and (
            region := repeated_region()
        ) is not None:
            return scope_in(self._caller_of(region), recomputed=True)
        if name == _ACCUMULATE:
            scope = of_accumulation(self._parameter_names.get(id(node.variable)))
        else:
            scope = self._scope_of_node(node, name)
        return scope if entry is not EngineEntry.HOOK else scope_in(scope.module, recomputed=False)

    def note_stack(self, call: CallNode) -> None:
        """Note the running code and modules at a new call, innermost first,
        to find the forward of a Function.
        """
        # frames would keep every tensor on the stack alive
        codes = tuple([frame.f_code for frame in frames_above_engine()])
        if len(self._stacks) > _MAX_STACKS:
            self._stacks.clear()
        call.codes = self._stacks.setdefault(tuple(map(id, codes)), codes)
        task = graph_task_id()
        modules = [
            running.scope.module
            for running in reversed(self._modules.stack)
            if running.backward_pass == task
        ]
        modules.append("" if task == -1 else self._caller_of(repeated_region()))
        call.running_modules = tuple(modules)

    def note_region(self) -> None:
        """Note the module that called the running checkpointed region."""
        hooks = top_hooks(True)
        if hooks is not None and getattr(hooks[0], "__qualname__", None) == CHECKPOINT_PACK_HOOK:
            region = hooks[0].__closure__[0].cell_contents
            if region not in self._callers:
                self._callers[region] = (
                    self._modules.current if graph_task_id() == -1 else self.scope()
                ).module

    def _caller_of(self, region: Any) -> str:
        if type(region).__name__ == _REENTRANT:
            return self._scope_of_node(region, _REENTRANT).module
        return UNKNOWN_MODULE if region is None else self._callers.get(region, UNKNOWN_MODULE)

    def _scope_of_node(self, node: Any, name: str) -> OpScope:
        """Return the scope of the forward op that made a node;
        all threads that know one must agree.
        """
        number = sequence_number(node)
        if len(self.threads) == 1:
            (nodes,) = self.threads.values()
            if (
                (calls := nodes.get(number)) is not None
                and (scopes := calls[0].scopes) is not None
                and (cached := scopes.get(name)) is not None
            ):
                return cached
        code = forward_code(node)
        by_thread = [_scope_by_number(nodes, number, name, code) for nodes in self.threads.values()]
        known = [scope for scope in by_thread if scope is not UNKNOWN]
        return known[0] if len({scope.module for scope in known}) == 1 else UNKNOWN


@lru_cache(maxsize=100_000)
def scope_in(
    module: str, *, recomputed: bool = False, source: tuple[str, ...] | None = None
) -> OpScope:
    """Return a scope; equal scopes are the same object, since they are compared by identity."""
    return OpScope(module=module, recomputed=recomputed, source=source)


@lru_cache(maxsize=100_000)
def of_accumulation(name: str | None) -> OpScope:
    """Return the scope of ops that accumulate the gradient of a parameter."""
    module = UNKNOWN_MODULE if name is None else name.rpartition(".")[0]
    return OpScope(module=module, source=(), name=name)


def _scope_by_number(nodes: _Nodes, number: int, name: str, code: CodeType | None) -> OpScope:
    """Return the scope of a node by its number; UNKNOWN if it is unclear which call made it."""
    if name == _COPY_SLICES:
        return _writer_before(nodes, number)
    # an op may create nodes before its own: of a clone of the overwritten input,
    # or AsStrided of inputs
    num_between = next((num for num in range(MAX_BETWEEN) if number + num in nodes), 0)
    call = nodes.get(number + num_between, [_UNSEEN])[0]
    if code is not None:
        scope = _scope_of_call(call, code)
        if scope is not UNKNOWN or num_between:
            return scope
    if is_maker(call.op_base, name):
        return _scope_of_maker(call, name, is_cached=code is None and not num_between)
    return _later_maker(nodes, number, name)


def _writer_before(nodes: _Nodes, number: int) -> OpScope:
    """Return the scope of a CopySlices node, which comes after the node of the
    op that wrote into a view.

    In ``view.mul_(2)`` the node of mul_ has the number before; if torch copies what it overwrites
    for the backward pass, a clone is between them.
    """
    call = nodes.get(number - 1, [_UNSEEN])[0]
    if call.op_base == "aten.clone":
        call = nodes.get(number - 2, [_UNSEEN])[0]
    return _scope_of_call(call) if call.is_in_place else UNKNOWN


def _scope_of_maker(call: CallNode, name: str, *, is_cached: bool) -> OpScope:
    """Return the scope of the call that made a node of this name, as ``aten.mm`` makes MmBackward0.

    If ``is_cached``, it is kept for ``_scope_of_node``, which looks there first; only for a node
    that has the number of its call.
    """
    scope = _scope_of_call(call)
    if is_cached:
        _scopes_of(call)[name] = scope
    return scope


def _later_maker(nodes: _Nodes, number: int, name: str) -> OpScope:
    """Return the scope of a later call with the number of a node, if it can have made it."""
    return next(
        (
            _scope_of_call(call)
            for call in nodes.get(number, [])[1:]
            if is_maker(call.op_base, name)
        ),
        UNKNOWN,
    )


def _scopes_of(call: CallNode) -> dict[object, OpScope]:
    """Return the cache of a call's scopes: by id of a Function's code, or name of a node."""
    if call.scopes is None:
        call.scopes = {}
    return call.scopes


def _scope_of_call(call: CallNode, code: CodeType | None = None) -> OpScope:
    """Return the scope of a call, or of the Function with this forward code that ran it; UNKNOWN if
    several modules called that.
    """
    key = id(code)  # different Functions may have equal code
    scopes = _scopes_of(call)
    scope = scopes.get(key)
    if scope is None:
        modules = {call.module} if code is None else _callers_of(code, call)
        is_known = len(modules) == 1 and UNKNOWN_MODULE not in modules
        scope = scopes[key] = scope_in(modules.pop(), source=call.source) if is_known else UNKNOWN
    return scope


def _callers_of(code: CodeType, call: CallNode) -> set[str]:
    """Return the modules that called a function which ran a call, perhaps several frames deep."""
    outermost = len(call.running_modules) - 1
    num_entered = [
        call.codes[:depth].count(CALL_MODULE)
        for depth, running in enumerate(call.codes)
        if running is code
    ]
    return {call.running_modules[min(count, outermost)] for count in num_entered}


@lru_cache(maxsize=4096)
def is_maker(op_base: str, name: str) -> bool:
    """Return whether an op can create a node of this name: "aten.nll_loss_forward"
    creates "NllLossBackward0".
    """
    base = (
        re.sub(r"Backwards?\d*(_copy)?$", r"\1", name.rpartition("::")[2]).replace("_", "").lower()
    )
    op = (
        op_base.removeprefix("aten.")
        .replace("_", "")
        .replace(".", "")
        .lower()
        .removesuffix("forward")
    )
    return base == op or base.startswith(f"generatedbackwardfor{op}")


def compiled_nodes(outputs: Iterable[Tensor], number: int) -> list[Any]:
    """Return AOTAutograd's nodes with at least this sequence number that outputs lead to, in their
    order.
    """
    waiting: list[Any] = [value.grad_fn for value in outputs]
    seen: set[Any] = set()
    while waiting and len(seen) < _MAX_FOLLOWED:
        node = waiting.pop()
        if (
            node is not None
            and node not in seen
            and node.name() != _ACCUMULATE
            and sequence_number(node) >= number
        ):
            seen.add(node)
            waiting.extend(parent for parent, _ in node.next_functions)
    return sorted((node for node in seen if node.name() == _COMPILED), key=sequence_number)
