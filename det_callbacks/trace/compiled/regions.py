"""Regions compiled by torch.compile: records the graph, its inputs and outputs,
and the kernels and ops seen inside.

Where all kernels are seen, each depends on what it reads. Elsewhere generated code may have written
any memory: an inner op depends on all inputs, and the region is the origin, never the op. The
backward pass also depends on the inner ops, whose outputs it may have saved.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from det_callbacks.internals.dynamo import ORIGINAL
from det_callbacks.internals.torch import next_sequence_number, num_writes
from det_callbacks.runs.program import REGION
from det_callbacks.runs.steps import Expectation
from det_callbacks.trace.backward import compiled_nodes, scope_in
from det_callbacks.trace.call_graph import OpScope
from det_callbacks.trace.compiled.captures import GraphCaptures
from det_callbacks.trace.compiled.graphs import TracedGraph
from det_callbacks.trace.compiled.kernels import SEEN_KERNELS, KernelCall
from det_callbacks.trace.compiled.region import InnerReads, Region
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.dispatch import TAKE_APART, breaks_graph
from det_callbacks.trace.nondeterministic_ops import Plans
from det_callbacks.trace.overloads import (
    OpKind,
    OpPlan,
    comes_apart,
    in_flight,
    tensors_in,
    tensors_read,
    written_arguments,
    written_by_call,
)
from det_callbacks.trace.places import Places, has_address
from det_callbacks.trace.reads import Reads
from det_callbacks.trace.step import OutputHooks, Step
from det_callbacks.trace.undigested_ops import UndigestedOps
from det_callbacks.trace.unseen_writes import UnseenWriteCheck

_EARLIER = f"{REGION}graph_compiled_earlier"


class _RegionKernelWatcher(NamedTuple):
    """Sees the kernels of a region."""

    regions: "CompiledRegions"
    region: Region

    def run_kernel(self, call: KernelCall) -> Any:
        return self.regions.run_kernel(self.region, call)

    def note_allocation(self, tensor: Tensor) -> None:
        self.regions.step.ledger.mark_uninitialised(tensor, is_empty=True)


class CompiledRegions:
    """Runs the compiled graphs of a step, and records them at level op or module."""

    def __init__(
        self,
        step: Step,
        places: Places,
        reads: Reads,
        plans: Plans,
        undigested: UndigestedOps,
        captures: GraphCaptures,
        output_hooks: OutputHooks,
        unseen_writes: UnseenWriteCheck,
    ) -> None:
        self.step, self._places, self._reads, self._plans = step, places, reads, plans
        self._undigested, self._captures = undigested, captures
        self.before_capture, self.before_replay = captures.before_capture, captures.before_replay
        self._output_hooks, self._unseen_writes = output_hooks, unseen_writes
        self._running_regions = places.running_regions
        self._stances: list[Any] = []  # one for each ``open``, or None if compiled code runs
        self._token: object = None  # identifies the step
        self._expected: Expectation | None = None

    def open(self) -> None:
        """Record regions from here on, or have torch run eager code; may be nested."""
        is_eager = self._places.selection.compiled == "eager"
        self._stances.append(torch.compiler.set_stance("force_eager") if is_eager else None)

    def close(self) -> None:
        if self._stances and (stance := self._stances.pop()) is not None:
            stance.__exit__(None, None, None)

    def begin(self, expected: Expectation | None = None) -> None:
        self._token, self._expected = object(), expected

    def end(self) -> None:
        """End a step; backward passes of graphs that outlive it are not recorded."""
        self._token = self._expected = None
        self._running_regions.clear()

    def run(self, graph: TracedGraph, call: Callable[..., Any], *args: Any) -> Any:
        """Run a compiled graph and return its outputs; record it if a step is under way."""
        step, places = self.step, self._places
        if not self._is_recorded():
            return self._unrecorded(call, *args)
        with step.lock:
            phase, scope = places.now()
            scope = self._in_own_module(graph, args, scope)
            is_selected = self._selects(phase, scope)
            if is_selected:
                region = Region(step, places, self._reads, graph, phase, scope)
                entering = [*zip(graph.inputs, args, strict=True), *graph.held]
                inputs = [(self._name(traced, value), value) for traced, value in entering]
                with_rows = region.enter(inputs)
                number = next_sequence_number()
                self._start(region)
                places.modules.current = scope
        if not is_selected:
            return self._unselected(call, args)
        try:
            outputs = call(*args)
        finally:
            self._end(region)
            places.modules.return_to_stack()
        results = list(tensors_in([outputs]))
        with self.step.lock:
            region.leave(((None, value) for value in results), with_rows)
        if "backward" in places.selection.phases and torch.is_grad_enabled():
            for node in compiled_nodes(results, number):
                outer = {
                    result.output_nr: f"grad of output {index}"
                    for index, result in enumerate(results)
                    if result.grad_fn is node
                }
                self._follow_backward(region, node, outer, inputs[: len(args)])
        return outputs

    def run_earlier(self, call: Callable[[], Any]) -> Any:
        """Run a graph that was compiled before any recorder was active,
        and that may write any memory.
        """
        if not self._is_recorded():
            return self._unrecorded(call)
        self.step.deferred.before_any_write()
        try:
            return self._without_rows(call)
        finally:
            with self.step.lock:
                self.step.add_unseen_writer(_EARLIER, *self._places.now())

    def run_inductor(self, graph: Any, call: Callable[[], Any]) -> Any:
        """Run a graph that inductor compiled; inside a region, record its kernels."""
        region = self._running_regions.get(get_ident())
        if not isinstance(region, Region) or self._places.selection.level != "op":
            return self.run_earlier(call)
        modules = SEEN_KERNELS.modules_of(graph)
        why = {SEEN_KERNELS.code_of(module).unseen for module in modules} - {""}
        if why or not modules:
            region.unseen |= why or {"no generated module"}
            return call()
        region.sees_kernels = True
        with SEEN_KERNELS.of(modules, _RegionKernelWatcher(self, region)):
            return call()

    def run_kernel(self, region: Region, call: KernelCall) -> Any:
        """Run a kernel of a region, and record what it read and wrote."""
        step, kernel, thread = self.step, call.kernel, get_ident()
        written_indices = [
            index for index in sorted(kernel.writes) if isinstance(call.arguments[index], Tensor)
        ]
        written = [call.arguments[index] for index in written_indices]
        if not written:
            return call.run()
        phase, scope = region.phase, region.scope
        tensors = [
            (index, value)
            for index, value in enumerate(call.arguments)
            if isinstance(value, Tensor)
        ]
        not_read = kernel.writes | kernel.scratch
        read = [value for index, value in tensors if index not in not_read]
        fresh = call.code.first_writes.get(call.line, frozenset()) - kernel.updates
        with step.lock:
            mark = step.num_sites
            reads = region.read_exactly(
                read, (value for index, value in tensors if index in kernel.writes - fresh)
            )
            step.deferred.before_writes(written)
            # ops in it, such as those of autotuning, are not part of the graph
            self._running_regions[thread] = None
            try:
                out = call.run()
            except BaseException:  # including Ctrl-C: the user may catch it and continue the step
                self._reads.roll_back(mark)
                raise
            finally:
                self._running_regions[thread] = region
            plan = OpPlan(name=kernel.op, base=kernel.op, kind=OpKind.DIGEST, call=call.run)
            _, outputs = self._output_hooks.call(
                plan, phase, scope, out, written, call.arguments, {}
            )
            names = [self._name_of_written(phase, value) for value in outputs]
            describe = partial(region.describe_kernel, call, written_indices)
            region.record_inner(kernel, kernel.op, outputs, reads, names, describe)
            self._check_inputs(mark, len(outputs), read, reads)
            step.counts.num_digested += 1
        return out

    def _check_inputs(
        self, mark: int, num_outputs: int, read: list[Tensor], reads: InnerReads
    ) -> None:
        if self._expected is not None:
            first = self.step.num_sites - num_outputs
            self._unseen_writes.check_after_call(
                self._expected, mark, first, lambda: read, reads.positions, was_changed=False
            )

    def _name_of_written(self, phase: str, value: Tensor) -> str | None:
        names = self._places.names
        return (names.of if phase == "backward" else names.of_written)(value)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that a region calls, as ``Recorder.op`` does outside of one."""
        step, region = self.step, self._running_regions[get_ident()]
        if not isinstance(region, Region):
            return self._undigested.captured(func, args, kwargs)
        plan = self._plans.of(func)
        if comes_apart(plan, args, kwargs):
            return TAKE_APART
        plan = plan.whole or plan
        if plan.kind is not OpKind.DIGEST:
            step.counts.skipped[plan.kind.value] += 1
            out = plan.call(*args, **kwargs)
            if plan.kind is OpKind.UNINITIALISED:
                step.ledger.mark_uninitialised(out, is_empty=True)
            elif plan.kind not in (OpKind.VIEW, OpKind.RELAYOUT, OpKind.IGNORED):
                region.unseen.add(plan.name)
            return out
        phase, scope = region.phase, region.scope
        mark, reads, read = step.num_sites, InnerReads([*region.reads_of_inner], []), list[Tensor]()
        if region.sees_kernels:
            read = tensors_read(plan, args, kwargs)
            reads = region.read_exactly(
                read, () if plan.is_overwrite else written_arguments(plan, args, kwargs)
            )
            if plan.draws_random:
                self._reads.read_generator(args, kwargs, reads.positions, reads.names)
        if step.deferred.is_used and not plan.is_functional:
            step.deferred.before_writes(written_arguments(plan, args, kwargs))
        out = plan.call(*args, **kwargs)
        if plan.may_be_in_flight and (flying := in_flight(plan, out, args, kwargs)) is not None:
            self._undigested.mark_in_flight(*flying)
            return out
        outputs: Sequence[Any] = [
            output for output in written_by_call(plan, out, args, kwargs) if holds_data(output)
        ]
        if not outputs:
            step.counts.skipped["no_data"] += 1
            return out
        out, outputs = self._output_hooks.call(plan, phase, scope, out, outputs, args, kwargs)
        for index in plan.opaque_outputs:
            if index < len(out) and isinstance(out[index], Tensor):
                step.ledger.mark_uninitialised(out[index])
        names = [None] * len(outputs)
        describe = partial(region.describe_op, sys._getframe(1))
        region.record_inner(func, plan.name, outputs, reads, names, describe)
        if region.sees_kernels and plan.draws_random:
            self._reads.note_draw(step.num_sites - len(outputs))
        self._check_inputs(mark, len(outputs), read, reads)
        step.counts.num_digested += 1
        return out

    def _is_recorded(self) -> bool:
        places = self._places
        is_open = (
            bool(self._stances) and self._token is not None and places.selection.level != "state"
        )
        if not is_open or places.modules.is_elsewhere() or places.elsewhere.is_running():
            return False
        return not places.is_in_region() and not self._captures.is_capturing()

    def _unrecorded(self, call: Callable[..., Any], *args: Any) -> Any:
        outputs = call(*args)
        if self._token is not None and self._places.modules.is_elsewhere():
            self._places.elsewhere.note_call(outputs)
        return outputs

    def _start(self, region: Region) -> None:
        self.step.deferred.flush()  # the region's kernels reuse memory, even that of inputs
        if region.graph.is_graphed:
            region.unseen.add("CUDA graph")
        self._running_regions[get_ident()] = None if region.graph.is_graphed else region

    def _end(self, region: Region) -> None:
        self._running_regions.pop(get_ident(), None)
        if region.unseen or not region.sees_kernels:
            why = f" ({', '.join(sorted(region.unseen))})" if region.unseen else ""
            self.step.counts.opaque.add(f"{region.graph.region}{why}")

    def _without_rows(self, call: Callable[..., Any], *args: Any) -> Any:
        self._running_regions[get_ident()] = None
        try:
            return call(*args)
        finally:
            self._running_regions.pop(get_ident(), None)

    def _name(self, traced: str, value: Any) -> str:
        """Return the name of an input, or the one that it has in the traced graph."""
        name = self._places.parameter_names.get(id(value))
        if name is None and isinstance(value, Tensor) and has_address(value):
            name = self._places.names.of(value)
        return name or traced

    def _in_own_module(self, graph: TracedGraph, args: Sequence[Any], scope: OpScope) -> OpScope:
        """Return the scope of the traced module, found by the name of one of its parameters.

        The module stack misses calls that ``nn.Module.compile`` compiled with their hooks.
        """
        for traced, value in zip(graph.inputs, args, strict=False):
            name = self._places.parameter_names.get(id(value), "")
            if traced in graph.members and name.endswith(traced):
                module = name[: -len(traced)].rstrip(".")
                is_known = _unwrapped(module) == _unwrapped(scope.module)
                return scope if is_known else scope_in(module, recomputed=scope.recomputed)
        return scope

    def _selects(self, phase: str, scope: OpScope) -> bool:
        places = self._places
        inside = (
            name for name in places.modules.names if name.startswith(f"{scope.module}.".lstrip("."))
        )
        return any(places.selects(phase, OpScope(module=name)) for name in (scope.module, *inside))

    def _unselected(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a region outside the selection, whose writes are unknown."""
        self.step.deferred.flush()
        versions = [_version_of(value) for value in args]
        outputs = self._without_rows(call, *args)
        written = [
            value
            for value, before in zip(args, versions, strict=True)
            if _version_of(value) != before
        ]
        with self.step.lock:
            for value in tensors_in([outputs, *written]):
                self.step.forget(value)
        self.step.counts.skipped["unselected"] += 1
        return outputs

    def _follow_backward(
        self, forward: Region, node: Any, outer: dict[int, str], inputs: Sequence[tuple[str, Any]]
    ) -> None:
        """Record the backward pass when its ``node`` runs in this step;
        ``outer`` names gradients by output.
        """
        token, step, places = self._token, self.step, self._places
        scope = scope_in(forward.scope.module, source=forward.source)
        is_op_level = places.selection.level == "op"  # below level op, parameters have no rows
        names = [
            f"grad of {name}" if is_op_level or not isinstance(value, nn.Parameter) else ""
            for name, value in inputs
        ]
        running: list[Region] = []

        @breaks_graph("det_callbacks: records the inputs of a compiled region when it runs")
        def before(gradients: Sequence[Any]) -> None:
            if (
                token is not self._token
                or self._captures.is_capturing()
                or places.elsewhere.is_running()
            ):
                return
            with step.lock:
                # the forward pass may have saved any output seen in it
                reads = [*forward.reads, *forward.inner]
                region = Region(step, places, self._reads, forward.graph, "backward", scope, reads)
                # a gradient may belong to an input that the region wrote, or to the base of a view
                region.enter(
                    (outer.get(index, f"grad of result {index}"), value)
                    for index, value in enumerate(gradients)
                )
                running.append(region)
                self._start(region)

        @breaks_graph("det_callbacks: records the outputs of a compiled region after it has run")
        def after(gradients: Sequence[Any], _of_outputs: Sequence[Any]) -> None:
            if not running or token is not self._token:
                return
            with step.lock:
                self._end(running[-1])
                named = names if len(gradients) == len(names) else [None] * len(gradients)
                running.pop().leave(
                    pair for pair in zip(named, gradients, strict=True) if pair[0] != ""
                )

        node.register_prehook(before)
        node.register_hook(after)


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != ORIGINAL)


def _version_of(value: Any) -> int:
    return num_writes(value) if isinstance(value, Tensor) and not value.is_inference() else 0
