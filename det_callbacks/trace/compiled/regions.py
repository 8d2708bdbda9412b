"""The compiled regions of a step: which are recorded, forward and backward, and how they run."""

from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from det_callbacks.trace.allowed import call_if_allowed
from det_callbacks.trace.calls import comes_apart, in_flight, tensors_in, written_arguments, written_by_call
from det_callbacks.trace.compiled.graphs import GraphInput, TracedGraph
from det_callbacks.trace.compiled.hook import WATCHERS
from det_callbacks.trace.compiled.inside import Inside
from det_callbacks.trace.compiled.rows import RegionRows, parts_with_memory, version_of
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.dispatch import TAKE_APART, breaks_graph
from det_callbacks.trace.exchange import begin_kept_call, exchange_outputs
from det_callbacks.trace.nodes import COMPILED
from det_callbacks.trace.overloads import OpKind
from det_callbacks.trace.tree import Attribution, Context, module_of

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder

_graph_task_id = torch._C._current_graph_task_id  # torch 2.13: -1 outside a backward pass
_next_sequence_number = torch._C._autograd._get_sequence_nr  # looked at in torch 2.13
_MAX_NODES = 1000
"""How many nodes that a region made are looked at to find those: a region has few, views and copies aside."""


class CompiledRegions:
    """Records the compiled regions of one step after the other.

    Args:
        recorder: whose sites are made.

    Attributes:
        inside: thread -> the opaque region that runs in it.
        opaque: names of the regions of this step of which not every op was seen.
        num_digested: regions and ops inside them of which rows were made in this step.
        lock: see ``Passing``.
    """

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._graphs = recorder.passing.graphs
        self.lock = recorder.passing.lock
        self._stance: Any = None
        self._depth = 0
        self._earlier: dict[tuple[int, bool], TracedGraph] = {}
        self.step: object = None
        self.inside: dict[int, Inside] = {}
        self.opaque: set[str] = set()
        self.num_digested = 0

    @property
    def is_open(self) -> bool:
        """Whether compiled graphs are recorded."""
        return self._depth > 0 and self._recorder.selection.level != "state"

    def open(self) -> None:
        """Watch from here on, or have nothing compiled run; ``open`` and ``close`` may lie one inside the other."""
        self._depth += 1
        if self._depth > 1:
            return
        if self._recorder.selection.compiled == "eager":
            self._stance = torch.compiler.set_stance("force_eager")
        if self._recorder.selection.level != "state":
            WATCHERS.watch(self)

    def close(self) -> None:
        """Undo one ``open``; may be called more than once."""
        self._depth = max(self._depth - 1, 0)
        if not self._depth:
            stance, self._stance = self._stance, None
            if stance is not None:
                stance.__exit__(None, None, None)
            WATCHERS.unwatch(self)
            self.inside.clear()

    def begin(self) -> None:
        """Start a step."""
        self.step = object()
        self.inside.clear()
        self.opaque.clear()
        self.num_digested = 0

    def end(self) -> None:
        """End a step: backward passes of graphs that outlive it are not recorded."""
        self.step = None
        self.inside.clear()

    def run(self, graph: TracedGraph, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a compiled graph in the forward pass, or where a checkpoint repeats it."""
        if self.step is None or get_ident() in self.inside or self._graphs.is_capturing():
            return call(*args)
        phase, context = self._place()
        context = self._in_own_module(graph, args, context)
        if not self._selects(graph, phase, context):
            return self._unselected(graph, call, args)
        rows = RegionRows(self._recorder, graph, phase, context)
        rows.enter(args)
        number = _next_sequence_number()
        self._start(rows)
        modules = self._recorder.modules
        modules.current = module_of(context)
        try:
            outputs = call(*args)
        finally:
            self.inside.pop(get_ident(), None)
            modules.return_to_stack()
        rows.leave(outputs, is_seen_through=graph.is_transparent)
        self._let_go(rows)
        if "backward" in self._recorder.selection.phases and torch.is_grad_enabled():
            self._follow_backward(rows, outputs, number)
        return outputs

    def run_unknown(self, name: str, call: Callable[[], Any], inputs: list[Any], *, is_graphed: bool) -> Any:
        """Run a graph that inductor compiled before anybody watched, forward or backward."""
        if self.step is None or get_ident() in self.inside or self._graphs.is_capturing():
            return call()
        phase, context = self._place()
        if not self._recorder.selects(phase, context):
            self._recorder.late.flush()
            return call()
        kind = len(inputs), is_graphed
        graph = self._earlier.get(kind)
        if graph is None:
            names = tuple(GraphInput(name=f"input {index}") for index in range(len(inputs)))
            graph = TracedGraph(name=name, backend="inductor", inputs=names, is_graphed=is_graphed)
            self._earlier[kind] = graph
        rows = RegionRows(self._recorder, graph, phase, context)
        rows.enter(inputs)
        rows.forget_values()  # the graph frees each of its inputs as soon as it can
        inputs.clear()
        self._start(rows)
        try:
            outputs = call()
        finally:
            self.inside.pop(get_ident(), None)
        rows.leave(outputs, is_seen_through=False)
        self._let_go(rows)
        return outputs

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op while an opaque region runs in some thread; of this one's, record what the op wrote."""
        recorder = self._recorder
        inside = self.inside.get(get_ident())
        if inside is None:
            return recorder.op(func, args, kwargs)
        if inside.is_graphed:
            return recorder.passing.captured(func, args, kwargs)
        plan = recorder.plan_of(func)
        if comes_apart(plan, args, kwargs):
            return TAKE_APART
        plan = plan.whole or plan
        if plan.kind is not OpKind.DIGEST:
            recorder.passing.skipped[plan.kind.value] += 1
            return func(*args, **kwargs)
        mark = recorder.num_sites
        if recorder.late.is_used and not plan.is_functional:
            recorder.late.before_write(written_arguments(plan, args, kwargs))
        phase, context = inside.phase, inside.context
        keeper = recorder.keeper
        kept = None
        if keeper is not None:
            kept = begin_kept_call(keeper, recorder.names, plan, phase, context, args, kwargs, recorder.late)
        try:
            out = plan.call(*args, **kwargs)
        except RuntimeError as error:
            out = call_if_allowed(recorder, error, mark, func, phase, context, args, kwargs)
        if plan.may_be_in_flight and all(flying := in_flight(plan, out, args, kwargs)):
            recorder.passing.fly(*flying)
            return out
        outputs: Sequence[Any] = written_by_call(plan, out, args, kwargs)
        if recorder.exchange is not None:
            out, outputs = exchange_outputs(recorder.exchange, plan, phase, context, out, outputs, recorder.late)
        outputs = [output for output in outputs if not isinstance(output, Tensor) or holds_data(output)]
        if not outputs:
            recorder.passing.skipped["no_data"] += 1
            return out
        if keeper is not None and kept is not None:
            keeper.end_call(kept, outputs, recorder.num_sites)
        inside.record(recorder, func, plan.name, outputs)
        self.num_digested += 1
        return out

    def _start(self, rows: RegionRows) -> None:
        """Let the ops of this thread be those of a region, unless each of them is seen with what it reads."""
        self._recorder.late.flush()  # its kernels reuse memory, also of what it is given
        if not rows.graph.is_transparent:
            self.opaque.add(rows.graph.region)
            self.inside[get_ident()] = Inside(
                phase=rows.phase,
                context=rows.context,
                reads=rows.reads_of_inner,
                source=rows.source,
                digests=rows.inner,
                is_graphed=rows.graph.is_graphed,
            )

    def _let_go(self, rows: RegionRows) -> None:
        """Hold nothing of what a CUDA graph of inductor's gave: it looks at who does before it reuses that memory."""
        if rows.graph.is_graphed:
            self._recorder.late.flush()

    def _place(self) -> tuple[str, Context]:
        recorder = self._recorder
        if _graph_task_id() == -1:
            return recorder.phase, recorder.modules.current
        return "backward", recorder.backward.context()

    def _in_own_module(self, graph: TracedGraph, args: Sequence[Any], context: Context) -> Context:
        """Return the context in the module whose code was traced, told by the name of one of its parameters.

        ``nn.Module.compile`` compiles the call of a module with its hooks, so that the stack does not show it.
        """
        names = self._recorder.parameter_names
        for known, value in zip(graph.inputs, args, strict=False):
            name = names.get(id(value)) if known.path else None
            if name is None or not name.endswith(str(known.path)):
                continue
            module = name[: -len(str(known.path))].rstrip(".")
            if module.replace("._orig_mod", "") == module_of(context).replace("._orig_mod", ""):
                return context
            if isinstance(context, str):
                return module
            return self._recorder.backward.in_module(module, recomputed=context.recomputed)
        return context

    def _selects(self, graph: TracedGraph, phase: str, context: Context) -> bool:
        """Return whether the region's module is selected, or one that is called inside."""
        selects = self._recorder.selects
        if selects(phase, context):
            return True
        owner = module_of(context).replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip(".")
        names = self._recorder.modules.names_unwrapped
        paths = (f"{owner}.{path}" if owner and path else path or owner for path in graph.modules)
        return any(selects(phase, names.get(path, path)) for path in paths)

    def _unselected(self, graph: TracedGraph, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a region outside the selection: what it writes is unknown from here on."""
        self._recorder.late.flush()
        versions = [version_of(value) for value in args]
        outputs = call(*args)
        written = [value for value, before in zip(args, versions, strict=True) if version_of(value) != before]
        for value in tensors_in([outputs, *written]):
            for part in parts_with_memory(value):
                self._recorder.ledger.forget(part)
        self._recorder.passing.skipped["unselected"] += 1
        return outputs

    def _follow_backward(self, forward: RegionRows, outputs: Any, number: int) -> None:
        """Record the backward pass of a region, too, when it comes within this step."""
        forward.forget_values()
        for node in _compiled_nodes(outputs, number):
            attribution = Attribution(module=module_of(forward.context), source=forward.source)
            self._recorder.backward.claim(node, attribution)
            names = {
                value.output_nr: f"grad of output {index}"
                for index, value in enumerate(tensors_in([outputs]))
                if value.grad_fn is node
            }
            follower = _Backward(self, forward, attribution, names)
            node.register_prehook(follower.before)
            node.register_hook(follower.after)

    def is_captured(self) -> bool:
        """Return whether what runs here is being captured, so that it makes no rows."""
        return self._graphs.is_capturing()

    def start_backward(
        self, forward: RegionRows, context: Context, gradients: Sequence[Any], names: Mapping[int, str]
    ) -> RegionRows:
        """Record the gradients that come back to a region's outputs; ``names`` are theirs by number."""
        # what is none of the outputs is an input that the region wrote, or what views among the outputs are of
        shown = tuple(names.get(index, f"grad of result {index}") for index in range(len(gradients)))
        rows = RegionRows(self._recorder, forward.graph.backward(shown), "backward", context)
        rows.follow(forward)
        rows.enter(gradients)
        rows.forget_values()
        self._start(rows)
        return rows

    def end_backward(self, rows: RegionRows, forward: RegionRows, gradients: Sequence[Any]) -> None:
        """Record the gradients of its inputs."""
        self.inside.pop(get_ident(), None)
        rows.leave(gradients, is_seen_through=rows.graph.is_transparent, names=forward.gradient_names(len(gradients)))
        self._let_go(rows)


class _Backward:
    """Hooks of the autograd node of a region."""

    __slots__ = ("_attribution", "_forward", "_names", "_regions", "_rows", "_step")

    def __init__(
        self, regions: CompiledRegions, forward: RegionRows, attribution: Attribution, names: Mapping[int, str]
    ) -> None:
        self._regions = regions
        self._forward = forward
        self._attribution = attribution
        self._names = names
        self._step = regions.step
        self._rows: RegionRows | None = None

    @breaks_graph("det_callbacks: what goes into a compiled region is recorded when it runs")
    def before(self, gradients: Sequence[Any]) -> None:
        """Called with the gradients of the outputs, None where there is none."""
        if self._step is self._regions.step and not self._regions.is_captured():
            with self._regions.lock:
                self._rows = self._regions.start_backward(self._forward, self._attribution, gradients, self._names)

    @breaks_graph("det_callbacks: what comes out of a compiled region is recorded when it has run")
    def after(self, gradients: Sequence[Any], _of_outputs: Sequence[Any]) -> None:
        """Called with the gradients of the inputs."""
        rows, self._rows = self._rows, None
        if rows is not None and self._step is self._regions.step:
            with self._regions.lock:
                self._regions.end_backward(rows, self._forward, gradients)


def _compiled_nodes(outputs: Any, number: int) -> list[Any]:
    """Return the autograd nodes of compiled code among those that were made from a sequence number on."""
    found: list[Any] = []
    waiting = [value.grad_fn for value in tensors_in([outputs]) if value.grad_fn is not None]
    seen: set[Any] = set()
    while waiting and len(seen) < _MAX_NODES:
        node = waiting.pop()
        if node in seen or node.name().endswith("AccumulateGrad") or node._sequence_nr() < number:
            continue
        seen.add(node)
        if node.name() == COMPILED:
            found.append(node)
        waiting.extend(parent for parent, _ in node.next_functions if parent is not None)
    return sorted(found, key=lambda node: node._sequence_nr())
