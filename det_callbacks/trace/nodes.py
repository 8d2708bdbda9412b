"""Which forward op a backward op belongs to, without anomaly mode.

An autograd node carries the sequence number it was made with, and the first op dispatched after that belongs to it.
That alone is not enough, so a match is accepted only when the node's name fits the op; otherwise the module is "?",
never a wrong one. ``tests/unit/test_attribution.py`` compares with anomaly mode.

Private names of torch, looked at in 2.13: ``_current_autograd_node`` (the node that runs in this thread),
``_get_sequence_nr`` (the number the next node will get), ``Node._sequence_nr``.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from threading import get_ident
from typing import Any

import torch

from det_callbacks.trace.modules import UNKNOWN_MODULE
from det_callbacks.trace.source import is_recomputing
from det_callbacks.trace.tree import Attribution, Event

_current_node = torch._C._current_autograd_node
_next_sequence_number = torch._C._autograd._get_sequence_nr
_is_grad_enabled = torch.is_grad_enabled

UNKNOWN = Attribution(module=UNKNOWN_MODULE, source=())

_ENGINE_SUM = Attribution(module=UNKNOWN_MODULE, source=("sum of gradients in the autograd engine",))


class BackwardMap:
    """Sequence number -> the forward event that made the node, for one step.

    Args:
        parameter_names: ``id`` of a parameter -> its qualified name; kept current by its owner.
    """

    def __init__(self, parameter_names: Mapping[int, str]) -> None:
        self._parameter_names = parameter_names
        self._threads: dict[int, dict[int, Event]] = {}
        self._specials: dict[tuple[object, ...], Attribution] = {}
        self._recomputed: dict[tuple[str, str], Attribution] = {}

    def clear(self) -> None:
        """Forget the nodes of the last step."""
        self._threads.clear()
        if len(self._specials) + len(self._recomputed) > 100_000:
            self._specials.clear()
            self._recomputed.clear()

    def register(self, event: Event) -> None:
        """Note that the running op is this event; the first op after a node was made is the one that made it."""
        by_number = self._threads.get(get_ident())
        if by_number is None:
            by_number = self._threads[get_ident()] = {}
        number = _next_sequence_number() - 1
        if number not in by_number:
            by_number[number] = event

    def attribute(self, func: Any, last: Event) -> Attribution:
        """Return where the running op of a backward pass belongs.

        Args:
            func: the overload that runs.
            last: the event before it, from which the step's forward events can be walked.
        """
        node = _current_node()
        if node is None:
            return _ENGINE_SUM
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            return self._accumulation(node)
        event, in_passing = self._find(node._sequence_nr(), name)
        if _is_grad_enabled() and is_recomputing():
            asking = UNKNOWN_MODULE if event is None else self._belonging(event, node, name, in_passing).module
            return self._recomputation(func, asking, last)
        if event is None:
            return UNKNOWN
        return self._belonging(event, node, name, in_passing)

    def in_module(self, module: str) -> Attribution:
        """Return the attribution of an op inside a module that is called during a backward pass."""
        recomputed = is_recomputing()
        key = (module, recomputed)
        known = self._specials.get(key)
        if known is None:
            known = self._specials[key] = Attribution(module=module, source=None, recomputed=recomputed)
        return known

    def _accumulation(self, node: Any) -> Attribution:
        name = self._parameter_names.get(id(node.variable))
        known = self._specials.get((name,))
        if known is None:
            module = UNKNOWN_MODULE if name is None else name.rpartition(".")[0]
            known = self._specials[(name,)] = Attribution(module=module, source=(), name=name)
        return known

    def _find(self, number: int, name: str) -> tuple[Event | None, bool]:
        """Return the event that made a node, and whether it only made it in passing (see ``_find_in``)."""
        if len(self._threads) == 1:
            (by_number,) = self._threads.values()
            return _find_in(by_number, number, name)
        found = [
            (event, in_passing)
            for event, in_passing in (_find_in(by_number, number, name) for by_number in self._threads.values())
            if event is not None and (in_passing or _fits(event, name, None))
        ]
        return found[0] if len({event.module for event, _ in found}) == 1 else (None, False)

    @staticmethod
    def _belonging(event: Event, node: Any, name: str, in_passing: bool) -> Attribution:
        known = event.attributions.get(name)
        if known is None:
            if event.module == UNKNOWN_MODULE or not (in_passing or _fits(event, name, node)):
                known = UNKNOWN
            else:
                known = Attribution(module=event.module, source=event.source)
            event.attributions[name] = known
        return known

    def _recomputation(self, func: Any, asking: str, last: Event) -> Attribution:
        """Attribute an op that a checkpointed function repeats outside any module call.

        It is a forward op of this step again: the one with the same op whose module holds the module ``asking``,
        whose node wanted the recomputation. More than one such module: unknown.
        """
        key = (asking, str(func))
        known = self._recomputed.get(key)
        if known is not None:
            return known
        modules = set()
        walker: Event | None = last
        while walker is not None:
            if walker.func is func and walker.phase == "forward" and _holds(walker.module, asking):
                modules.add(walker.module)
            walker = walker.parent
        module = modules.pop() if len(modules) == 1 else UNKNOWN_MODULE
        known = self._recomputed[key] = Attribution(module=module, source=None, recomputed=True)
        return known


def _find_in(by_number: Mapping[int, Event], number: int, name: str) -> tuple[Event | None, bool]:
    """Return the event that made a node, and whether the node was made in passing, under a number of no op.

    Two kinds are: CopySlices, right after the node of the op that wrote into a view; and AsStrided, for a view whose
    base was written, when the next op reads the view.
    """
    if name == "CopySlices":
        event = by_number.get(number - 1)
        return (event, True) if event is not None and event.is_in_place else (None, False)
    event = by_number.get(number)
    if event is None and name.startswith("AsStrided"):
        return by_number.get(number + 1), True
    return event, False


def _holds(outer: str, inner: str) -> bool:
    return outer in ("", inner) or inner.startswith(outer + ".")


def _fits(event: Event, name: str, node: Any) -> bool:
    """Return whether a node of this name can have been made by the event's op."""
    base = _node_base(name)
    op = _op_base(event.op_base)
    if base == op or base.startswith(f"generatedbackwardfor{op}"):
        return True
    forward = getattr(getattr(type(node), "_forward_cls", None), "forward", None)
    return getattr(forward, "__code__", None) in event.frame_codes


@lru_cache(maxsize=4096)
def _node_base(name: str) -> str:
    return re.sub(r"Backwards?\d*$", "", name.rpartition("::")[2]).replace("_", "").lower()


@lru_cache(maxsize=4096)
def _op_base(base: str) -> str:
    """Return "nllloss" for "aten.nll_loss_forward", "mylibscale" for "mylib.scale"."""
    namespace, _, op = base.partition(".")
    plain = op.replace("_", "").lower().removesuffix("forward")
    return plain if namespace == "aten" else namespace.replace("_", "").lower() + plain
