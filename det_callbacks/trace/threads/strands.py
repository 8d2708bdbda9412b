"""Strands: modules that a step runs in other threads, such as branches in a thread pool.

Each has a separate dispatch mode, since a mode is active in one thread only.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from det_callbacks.digest.unobserved import hidden
from det_callbacks.internals.torch import current_mode, pass_on, pop_mode, push_mode
from det_callbacks.trace.attribution.backward import UNKNOWN, ThreadNodes
from det_callbacks.trace.attribution.modules import ModuleCalls
from det_callbacks.trace.attribution.places import Places
from det_callbacks.trace.dispatch import DispatchMode
from det_callbacks.trace.op.call_graph import OpScope
from det_callbacks.trace.state.leaves import flatten
from det_callbacks.trace.step import Step


@dataclass(slots=True, kw_only=True, eq=False)
class Strand:
    module: str
    made: ThreadNodes
    inputs: list[Any]  # the autograd nodes of the module's inputs
    mode: "_StrandMode | None" = None
    calls: ModuleCalls = field(default_factory=ModuleCalls)
    spans: list[tuple[int, int]] = field(default_factory=list)  # first position and end of its sites, in order of time


class Strands:
    def __init__(self, step: Step, places: Places, on_first: Callable[[], None]) -> None:
        self._step, self._places = step, places
        self._on_first = on_first  # called before the first strand of a step
        places.modules.others = self
        self.mode: DispatchMode | None = None  # mode of the step's thread, or None if it sees no ops
        self.all: list[Strand] = []
        self._running: dict[int, Strand] = {}  # by thread
        self._is_open = False

    def begin(self) -> None:
        self.all = []
        self._is_open = True

    def end(self) -> None:
        """End a step, without affecting modules that still run in other threads; may be called more than once."""
        with self._step.lock:
            self._is_open = False
            self.all = []
            for strand in self._running.values():
                if strand.mode is not None:
                    strand.mode.turn_off()
            self._running.clear()

    def is_followed(self) -> bool:
        return get_ident() in self._running

    def here(self) -> Strand | None:
        return self._running.get(get_ident()) if self._running else None

    @hidden
    def enter(self, module: nn.Module, scope: OpScope | None, args: tuple[Any, ...]) -> None:
        """Note that a module is called in this thread; without a scope it is not in the model."""
        with self._step.lock:
            strand = self.here()
            if strand is None:
                if not self._is_open:
                    return
                strand = self._begin((scope or UNKNOWN).module, args)
            with self.recording(strand):
                self._places.backward.note_region()
            caller = strand.calls.current if strand.calls.stack else UNKNOWN
            strand.calls.enter(module, scope or caller)

    @hidden
    def leave(self, module: nn.Module, output: Any, *, is_of_model: bool) -> None:
        with self._step.lock:
            strand = self.here()
            if strand is None or not (depth := strand.calls.find(module)):
                return
            _, scope, backward_pass, _ = strand.calls.stack[depth - 1]
            on_output = self._places.modules.on_output
            if on_output is not None and output is not None and backward_pass == -1 and is_of_model:
                with self.recording(strand):
                    on_output(scope.module, output)
            del strand.calls.stack[depth - 1 :]
            strand.calls.return_to_stack()
            if not strand.calls.stack:
                self._end(strand, output)

    @contextmanager
    def recording(self, strand: Strand | None) -> Iterator[None]:
        """Record for a strand, or for the step's thread if None, while holding the lock."""
        if strand is None:
            yield
            return
        outer, first = self._places.calls, self._step.num_sites
        self._places.follow(strand.calls)
        try:
            yield
        finally:
            self._places.follow(outer)
            if self._step.num_sites > first:
                strand.spans.append((first, self._step.num_sites))

    def _begin(self, module: str, args: tuple[Any, ...]) -> Strand:
        strand = Strand(module=module, made=self._places.backward.begin_thread(), inputs=_nodes_of(args))
        if not self.all:
            self._on_first()
        self.all.append(strand)
        self._running[get_ident()] = strand
        if self.mode is not None:
            while isinstance(left := current_mode(), _StrandMode) and not left.is_on:
                pop_mode()  # left by a module that outlived the step
            strand.mode = _StrandMode(partial(self._op, strand))
            push_mode(strand.mode)
        return strand

    def _end(self, strand: Strand, output: Any) -> None:
        self._running.pop(get_ident(), None)
        if strand.mode is not None:
            if strand.mode.is_on_top:
                pop_mode()
            strand.mode.turn_off()  # another mode above it may be open
        self._places.backward.end_thread(strand.made, _nodes_of(output), strand.inputs)
        strand.inputs = []

    def _op(
        self, strand: Strand, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self._step.lock:
            if self.mode is not None and self.mode.is_on and self.here() is strand:
                with self.recording(strand):
                    return self.mode.__torch_dispatch__(func, types, args, kwargs)
        return pass_on(func, args, kwargs)


class _StrandMode(DispatchMode): ...


def _nodes_of(tree: Any) -> list[Any]:
    return [leaf.grad_fn for _, leaf in flatten(tree, "") if isinstance(leaf, Tensor)]
