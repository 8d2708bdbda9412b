"""Which forward op a backward op belongs to, without anomaly mode.

An autograd node carries the sequence number it was made with, and the first op dispatched after that belongs to it.
That alone is not enough, so a match is accepted only when the node's name fits the op; otherwise the module is "?",
never a wrong one. ``tests/unit/test_attribution.py`` compares with anomaly mode.

Private names of torch, looked at in 2.13: ``_current_autograd_node`` (the node that runs in this thread),
``_get_sequence_nr`` (the number the next node will get), ``Node._sequence_nr``, and ``_forward_cls`` (on nodes of
Python's autograd Functions).
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from threading import get_ident
from types import CodeType
from typing import Any

import torch

from det_callbacks.trace.checkpoints import running_region, top_hooks
from det_callbacks.trace.modules import UNKNOWN_MODULE, ModuleStack
from det_callbacks.trace.source import Entry, engine_entry, frames_above_engine
from det_callbacks.trace.tree import Attribution, Event, module_of

_current_node = torch._C._current_autograd_node
_next_sequence_number = torch._C._autograd._get_sequence_nr
_graph_task_id = torch._C._current_graph_task_id

# a class method, which mypy takes for a plain function
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]  # undeclared
_CALL_MODULE = torch.nn.Module._call_impl.__code__
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_REENTRANT = "CheckpointFunctionBackward"
COMPILED = "CompiledFunctionBackward"
"""Name of the autograd node of what AOTAutograd compiled."""
_COPY_SLICES = "torch::autograd::CopySlices"
_FRAMES_BELOW = 3
"""Between ``BackwardMap.attribute`` and the engine: ``context``, the caller's method and ``__torch_dispatch__``."""
_MAX_BETWEEN = 6
"""How many nodes an op may make before it runs, its own included."""

UNKNOWN = Attribution(module=UNKNOWN_MODULE, source=())
_HOOK = Attribution(module=UNKNOWN_MODULE, source=None)
ENGINE = Attribution(module=UNKNOWN_MODULE, source=("the autograd engine",))
# Claims the nodes that no op made. One for all recorders: nothing but UNKNOWN is ever kept in its attributions.
_UNSEEN = Event(None, None, "", UNKNOWN_MODULE, [], [], [], 0)


class _Nodes:
    """The nodes made in one thread: by number, the first event after each.

    Saved-tensor hooks, and clones of inputs with the conjugate bit, may run ops between the making of a node and the
    op proper; then ``later`` has the other events that carry the number.
    """

    __slots__ = ("first", "later")

    def __init__(self) -> None:
        self.first: dict[int, Event] = {}
        self.later: dict[int, list[Event]] = {}


class BackwardMap:
    """Sequence number -> the forward event that made the node, for one step.

    Args:
        parameter_names: ``id`` of a parameter -> its qualified name; kept current by its owner.
        modules: the running modules.
    """

    def __init__(self, parameter_names: Mapping[int, str], modules: ModuleStack) -> None:
        self._parameter_names = parameter_names
        self._modules = modules
        self._checkpoints = modules.checkpoints
        modules.on_enter = self._note_region
        self._threads: dict[int, _Nodes] = {}
        self._specials: dict[tuple[object, ...], Attribution] = {}
        self._recomputed: dict[str, Attribution] = {}
        self._compiled: dict[int, Attribution] = {}

    def clear(self) -> None:
        """Forget the nodes of the last step; those made up to now belong to no op that was seen."""
        self._threads.clear()
        self._compiled.clear()
        self.note_unseen()
        if len(self._specials) + len(self._recomputed) > 100_000:
            self._specials.clear()
            self._recomputed.clear()

    def register(self, event: Event) -> None:
        """Note that the running op is this event; the first op after a node was made is the one that made it."""
        nodes = self._threads.get(get_ident())
        if nodes is None:
            nodes = self._threads[get_ident()] = _Nodes()
        number = _next_sequence_number() - 1
        first = nodes.first.setdefault(number, event)
        hooks = top_hooks(True)
        if hooks is not None:
            self._checkpoints.note(hooks, event.module)
        if first is not event and (hooks is not None or first.op_base == "aten.clone"):
            nodes.later.setdefault(number, []).append(event)
            if event.is_in_place and first.op_base == "aten.clone":
                nodes.first.setdefault(number - 1, event)  # its node, then a clone of what it is about to overwrite

    def note_unseen(self) -> None:
        """Note that the last node of this thread, if nobody claimed it, was made by something that is no op."""
        nodes = self._threads.setdefault(get_ident(), _Nodes())
        nodes.first.setdefault(_next_sequence_number() - 1, _UNSEEN)

    def is_unclaimed(self) -> bool:
        """Return whether the last node of this thread was made by the running op."""
        nodes = self._threads.get(get_ident())
        return nodes is None or _next_sequence_number() - 1 not in nodes.first

    def context(self) -> Attribution:
        """Return where the running op of a backward pass belongs, the modules called in that pass included."""
        modules = self._modules
        if modules.backward_pass == _graph_task_id():
            return self.in_module(module_of(modules.current), recomputed=modules.is_recomputed)
        return self.attribute()

    def attribute(self) -> Attribution:
        """Return where the running op of a backward pass belongs by its autograd node.

        An op of a hook belongs with the node that the hook runs at, and has a source of its own.
        """
        entry = engine_entry(_FRAMES_BELOW)
        node = _current_node()
        if node is None:
            return ENGINE if entry is Entry.ENGINE else _HOOK
        name = node.name()
        if top_hooks(True) is not None or name == _REENTRANT:
            region = running_region()
            if region is not None:
                return self._recomputation(self._module_of_region(region))
        if name == COMPILED and (claimed := self._compiled.get(node._sequence_nr())) is not None:
            return claimed
        found = self._accumulation(node) if name == _ACCUMULATE else self._made(node, name)
        return found if entry is not Entry.HOOK else self.in_module(found.module, recomputed=False)

    def claim(self, node: Any, attribution: Attribution) -> None:
        """Note where the node of a compiled region belongs."""
        self._compiled[node._sequence_nr()] = attribution

    def in_module(self, module: str, *, recomputed: bool) -> Attribution:
        """Return the attribution of an op inside a module that is called during a backward pass."""
        if recomputed:
            return self._recomputation(module)
        known = self._specials.get((module,))
        if known is None:
            known = self._specials[(module,)] = Attribution(module=module, source=None)
        return known

    def note_functions(self, event: Event) -> None:
        """Note in a new event which autograd Functions' forwards run, innermost first, and what module called each.

        The modules called since are those whose calls lie further in on the stack.
        """
        # codes, not frames: a list of frames holds its own, and so every tensor on the stack until it is collected
        codes = [frame.f_code for frame in frames_above_engine()]
        found = [index for index, (_, outer) in enumerate(pairwise(codes)) if outer is _APPLY]
        if not found:
            return
        current = self._modules.current
        if not isinstance(current, str):  # a graph that runs node by node calls no module
            event.functions = tuple((codes[index], current.module) for index in found)
            return
        modules = [*self._modules.running(), self._outside_modules()]
        functions = []
        for index in found:
            num_calls = sum(code is _CALL_MODULE for code in codes[:index])
            functions.append((codes[index], modules[min(num_calls, len(modules) - 1)]))
        event.functions = tuple(functions)

    def _caller(self) -> str:
        """Return the module that code running here belongs to, before any module that it is about to call."""
        running = self._modules.running()
        return running[0] if running else self._outside_modules()

    def _note_region(self) -> None:
        hooks = top_hooks(True)
        if hooks is not None and self._checkpoints.is_new(hooks):
            self._checkpoints.note(hooks, self._caller())

    def _outside_modules(self) -> str:
        if torch._C._current_graph_task_id() == -1:
            return ""
        region = running_region()
        return UNKNOWN_MODULE if region is None else self._module_of_region(region)

    def _module_of_region(self, region: Any) -> str:
        """Return the module that called a checkpointed region, whose ops outside any module call are that module's."""
        code = _forward_code(region)
        if code is None:
            return self._checkpoints.caller_of(region, UNKNOWN_MODULE)
        return self._made(region, region.name()).module

    def _recomputation(self, module: str) -> Attribution:
        known = self._recomputed.get(module)
        if known is None:
            known = self._recomputed[module] = Attribution(module=module, source=None, recomputed=True)
        return known

    def _accumulation(self, node: Any) -> Attribution:
        name = self._parameter_names.get(id(node.variable))
        known = self._specials.get(("", name))
        if known is None:
            module = UNKNOWN_MODULE if name is None else name.rpartition(".")[0]
            known = self._specials[("", name)] = Attribution(module=module, source=(), name=name)
        return known

    def _made(self, node: Any, name: str) -> Attribution:
        """Return the attribution of a node by the forward op that made it; all threads that know one must agree."""
        number = node._sequence_nr()
        if len(self._threads) == 1:
            event = next(iter(self._threads.values())).first.get(number)
            if event is not None and (known := event.attributions.get(name)) is not None:
                return known
        code = _forward_code(node)
        found = [
            attribution
            for nodes in self._threads.values()
            if (attribution := _find_in(nodes, number, name, code)) is not UNKNOWN
        ]
        if len(found) == 1 or len({attribution.module for attribution in found}) == 1:
            return found[0]
        return UNKNOWN


def _forward_code(node: Any) -> CodeType | None:
    """Return the code of the forward of a Python autograd Function; None for nodes of torch's own."""
    forward = getattr(getattr(type(node), "_forward_cls", None), "forward", None)
    return getattr(forward, "__code__", None)


def _find_in(nodes: _Nodes, number: int, name: str, code: CodeType | None) -> Attribution:
    """Return the attribution of the node of a number, UNKNOWN when no event can be told to have made it.

    An op's own node comes first; then, still before the op, the nodes of what it does first: a clone of what it will
    overwrite, AsStrided for each view among its inputs whose base was written since. So the op may carry a higher
    number than its node, with no event in between. An autograd Function that begins with the forward of another
    carries no event either. Right after an op that wrote into a view comes CopySlices.
    """
    if name == _COPY_SLICES:
        event = nodes.first.get(number - 1)
        if event is not None and event.op_base == "aten.clone":
            event = nodes.first.get(number - 2)
        return _belonging(event) if event is not None and event.is_in_place else UNKNOWN
    for num_between in range(_MAX_BETWEEN):
        event = nodes.first.get(number + num_between)
        if event is not None:
            break
    else:
        return UNKNOWN
    if code is not None:
        found = _belonging_function(event, code, num_between)
        if found is not UNKNOWN or num_between:
            return found
    if _fits(event, name):
        found = _belonging(event)
        if code is None and not num_between:
            event.attributions[name] = found  # the common case, looked up first from now on
        return found
    if name.startswith("AsStrided"):
        return _belonging(event) if _is_in_passing(nodes, number, event) else UNKNOWN
    for later in nodes.later.get(number, ()):
        if _fits(later, name):
            return _belonging(later)
    return UNKNOWN


def _is_in_passing(nodes: _Nodes, number: int, event: Event) -> bool:
    """Return whether an AsStrided of this number was made by the event, whose own node then has a lower number.

    It may also have been made by whoever asked for the view's ``grad_fn``. Then the number below is no other node's,
    except CopySlices: it is only told apart when both sides are of one module.
    """
    if number - 1 in nodes.first:
        return False
    before = nodes.first.get(number - 2)
    return before is None or not before.is_in_place or before.module == event.module


def _belonging(event: Event) -> Attribution:
    known = event.attributions.get("")
    if known is None:
        known = event.attributions[""] = (
            UNKNOWN if event.module == UNKNOWN_MODULE else Attribution(module=event.module, source=event.source)
        )
    return known


def _belonging_function(event: Event, code: CodeType, num_inner: int) -> Attribution:
    key = (id(code), num_inner)  # equal code is not the same Function
    known = event.attributions.get(key)
    if known is None:
        modules = [module for running, module in event.functions if running is code]
        if len(set(modules)) > 1:
            modules = modules[num_inner : num_inner + 1]  # nested calls of one Function: the innermost comes first
        if not modules or modules[0] == UNKNOWN_MODULE:
            known = UNKNOWN
        else:
            known = Attribution(module=modules[0], source=event.source)
        event.attributions[key] = known
    return known


def _fits(event: Event, name: str) -> bool:
    """Return whether a node of this name can have been made by the event's op."""
    base = _node_base(name)
    op = _op_base(event.op_base)
    return base == op or base.startswith(f"generatedbackwardfor{op}")


@lru_cache(maxsize=4096)
def _node_base(name: str) -> str:
    """Return "nllloss" for "NllLossBackward0", "expandcopy" for "ExpandBackward0_copy"."""
    return re.sub(r"Backwards?\d*(_copy)?$", r"\1", name.rpartition("::")[2]).replace("_", "").lower()


@lru_cache(maxsize=4096)
def _op_base(base: str) -> str:
    """Return "nllloss" for "aten.nll_loss_forward", "mylibscale" for "mylib.scale"."""
    namespace, _, op = base.partition(".")
    plain = op.replace("_", "").lower().removesuffix("forward")
    return plain if namespace == "aten" else namespace.replace("_", "").lower() + plain
