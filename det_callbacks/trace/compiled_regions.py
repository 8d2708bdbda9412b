"""Regions that torch.compile compiled: what goes into one, what comes out, and what is seen inside.

One call of a compiled graph makes: the rows of inputs that no recorded op of this step wrote, as for any op; a row of
role "graph"; rows of role "entering" for all inputs; rows of the ops that a dispatch mode sees inside (extern kernels
and custom ops), and one of role "inside" that sums those up; and, when it has run, rows for its outputs and for the
inputs that it wrote, which follow from all of those.

Inductor reuses buffers, so that of what is seen inside only the region can be told to be the origin. A graph that was
compiled before anybody followed may have written anything.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from det_callbacks.digest import Bits, digest_bytes, digest_output
from det_callbacks.runs.program import MISSES_PARAMETERS, REGION, Role, Site
from det_callbacks.trace.arguments import arguments_json
from det_callbacks.trace.backward import compiled_nodes
from det_callbacks.trace.compiled_graphs import COMPILED_GRAPHS, GraphInput, TracedGraph
from det_callbacks.trace.components import holds_data, parts_with_memory
from det_callbacks.trace.dispatch import TAKE_APART, breaks_graph
from det_callbacks.trace.named_tensors import has_place
from det_callbacks.trace.overloads import OpKind, comes_apart, in_flight, tensors_in, written_arguments, written_by_call
from det_callbacks.trace.program_trie import CallNode, OpScope
from det_callbacks.trace.sites import InputName, source_of
from det_callbacks.trace.tensor_hooks import begin_kept_call, hook_outputs

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder

_next_sequence_number = torch._C._autograd._get_sequence_nr  # looked at in torch 2.13
_EARLIER = f"{REGION}graph_compiled_earlier"


class _Input:
    """One input of a call of a region."""

    __slots__ = ("index", "name", "position", "value", "version")

    def __init__(self, index: int, name: str, value: Any) -> None:
        self.index = index
        self.name = name
        self.value = value
        self.version = _version_of(value)
        self.position = -1


class Region:
    """The rows of one call of a compiled graph: ``enter`` before it, ``leave`` after it.

    Args:
        recorder: whose step it is.
        graph: that is called.
        phase: of the rows.
        scope: where the call belongs.
        forward: the call in the forward pass of which this is the backward pass; it reads what that saved.
    """

    def __init__(
        self, recorder: "Recorder", graph: TracedGraph, phase: str, scope: OpScope, forward: "Region | None" = None
    ) -> None:
        self._recorder = recorder
        self.graph = graph
        self.phase = phase
        self.scope = scope
        self.source: tuple[str, ...] = ()
        self._is_op_level = recorder.selection.level == "op"
        self._saved: tuple[int, ...] = () if forward is None else forward.reads
        self.misses_parameters: bool = forward is not None and forward.misses_parameters
        self.names: dict[int, str] = {}
        self._inputs: list[_Input] = []
        self.reads: tuple[int, ...] = ()
        self._reads_of_inner: list[int] = []
        self._inner: list[Bits] = []

    def enter(self, inputs: Iterable[tuple[str, Any]]) -> None:
        """Record what goes in.

        At level module without the parameters, which the state before the step has, and the gradients made of them.
        """
        recorder = self._recorder
        self._inputs = [
            _Input(index, name, value)
            for index, (name, value) in enumerate(inputs)
            if (isinstance(value, Tensor) and holds_data(value)) or isinstance(value, bool | int | float)
        ]
        if not self._is_op_level:
            self.misses_parameters |= any(isinstance(one.value, nn.Parameter) for one in self._inputs)
            self._inputs = [one for one in self._inputs if not isinstance(one.value, nn.Parameter)]
        self.names = {one.index: one.name for one in self._inputs}
        reads: list[list[int]] = []
        input_names: list[InputName] = []
        for one in self._inputs:
            writers: list[int] = []
            if isinstance(one.value, Tensor) and self._is_op_level:
                recorder.reads.read(one.value, writers, input_names)
            reads.append(writers)
        every = sorted({writer for writers in reads for writer in writers}.union(self._saved))
        arguments = {"backend": self.graph.backend, **({MISSES_PARAMETERS: True} if self.misses_parameters else {})}
        written_down = arguments_json(arguments)
        names = [*input_names, *self.names.values()]

        def build(node: CallNode) -> None:
            node.source = source_of(self.scope)
            rows = [
                self._site(node, "inputs", index, "entering", one.name, edges)
                for index, (one, edges) in enumerate(zip(self._inputs, reads, strict=True))
            ]
            graph = self._site(node, "graph", 0, "graph", None, every, written_down)
            node.rows = (*recorder.reads.sites(node), graph, *rows)

        self._step_to("inputs", reads, names, build, every)
        recorder.reads.row_edges.clear()
        graph_row = recorder.num_sites
        detail = f"{self.graph.num_ops} ops, {self.graph.fingerprint:016x}"
        recorder.append_bits(self.graph.fingerprint, recorder.layouts.special("graph", (), detail))
        for one, writers in zip(self._inputs, reads, strict=True):
            one.position = recorder.num_sites
            recorder.append_value(one.value, writers if isinstance(one.value, nn.Parameter) else ())
        self.reads = (*every, graph_row, *(one.position for one in self._inputs))
        # an op inside follows from the graph, and the inputs but the parameters
        own = [one.position for one in self._inputs if not isinstance(one.value, nn.Parameter)]
        self._reads_of_inner = [graph_row, *own]

    def forget_values(self) -> None:
        """Let go of the inputs; those that the call writes are then not looked for."""
        self._inputs.clear()

    def record_op(self, func: object, name: str, outputs: Sequence[Any]) -> None:
        """Make the rows of an op that was seen inside; its lines are those that called the region."""
        recorder = self._recorder

        def build(node: CallNode) -> None:
            node.source = self.source
            node.rows = tuple(
                Site(
                    phase=self.phase,
                    module=self.scope.module,
                    op=name,
                    occurrence=0,
                    output=index,
                    role="output" if isinstance(output, Tensor) else "value",
                    inputs=tuple(self._reads_of_inner),
                    source=self.source,
                )
                for index, output in enumerate(outputs)
            )

        recorder.trie.step_to((func, self.phase, self.scope, [], list(self._reads_of_inner), [], len(outputs)), build)
        for output in outputs:
            recorder.append_value(output)
            self._inner.append(recorder.late.bits_of(recorder.num_sites - 1, recorder.digests))
        recorder.late.flush()  # the region's kernels, which nobody sees, reuse this memory

    def leave(self, outputs: Sequence[tuple[str | None, Tensor]]) -> None:
        """Record what came out."""
        recorder = self._recorder
        if self._inner:
            position, inner = recorder.num_sites, self._inner
            self._step_to("inside", [list(self.reads)], [None])
            recorder.append_bits(recorder.late.derive(position, inner, _joined), recorder.layouts.none)
            self.reads += (position,)
        if self.graph.is_graphed:
            # inductor looks at who holds what a CUDA graph of its gave, before it reuses that memory
            recorder.late.unhold(part for _, value in outputs for part in parts_with_memory(value))
        is_seen_through = self.graph.is_transparent  # outputs then follow from the ops that wrote them
        values = [*outputs, *(() if is_seen_through else self._written())]
        recorder.counts.num_digested += 1
        if values:
            writers = [recorder.writers_of(value) if is_seen_through else [] for _, value in values]
            reads = [list(found or self.reads) for found in writers]
            self._step_to("outputs", reads, [name for name, _ in values])
            for _, value in values:
                position = recorder.num_sites
                recorder.append_value(value)
                self.reads += (position,)
                for part in () if is_seen_through else parts_with_memory(value):
                    recorder.ledger.write(part, position)
            recorder.late.end_group()
        if self.graph.is_graphed:
            recorder.late.flush()

    def _step_to(
        self,
        part: str,
        reads: list[list[int]],
        names: Sequence[InputName],
        build: Callable[[CallNode], None] | None = None,
        saved: Sequence[int] = (),
    ) -> None:
        role: Role = "inside" if part == "inside" else "output"

        def build_part(node: CallNode) -> None:
            node.source = source_of(self.scope)
            pairs = enumerate(zip(names, reads, strict=True))
            node.rows = tuple(self._site(node, part, index, role, name, edges) for index, (name, edges) in pairs)

        call = (self.graph, self.phase, self.scope, [part, *saved], reads, list(names), len(reads))
        self.source = self._recorder.trie.step_to(call, build or build_part).source

    def _site(
        self, node: CallNode, part: str, index: int, role: Role, name: Any, edges: Iterable[int], arguments: str = "{}"
    ) -> Site:
        return Site(
            phase=self.phase,
            module=self.scope.module,
            op=f"{self.graph.region}.{part}",
            occurrence=0,
            output=index,
            role=role,
            name=name,
            arguments=arguments,
            inputs=tuple(sorted(set(edges))),
            source=node.source,
        )

    def _written(self) -> list[tuple[str | None, Tensor]]:
        """Return the inputs that have other bits now.

        Autograd is told of some writes only: not of those to buffers, nor of any where no gradients are computed.
        """
        recorder = self._recorder
        may_write_parameters = self.phase == "optimizer" or not torch.is_grad_enabled()
        written: list[tuple[str | None, Tensor]] = []
        for one in self._inputs:
            if not isinstance(one.value, Tensor):
                continue
            is_written = _version_of(one.value) != one.version
            if not is_written and (may_write_parameters or not isinstance(one.value, nn.Parameter)):
                # of a device that computes digests it is only known whether it may have
                is_late = one.position in recorder.late.bits
                is_written = is_late or digest_output(one.value) != recorder.digests[one.position]
            if is_written:
                written.append((one.name, one.value))
        return written


class CompiledRegions:
    """Records the compiled regions of one step after the other.

    Attributes:
        inside: thread -> the region that runs in it, unless each of its ops is seen with what it reads; None for a
            graph of which nothing is known.
    """

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._stance: Any = None
        self._depth = 0
        self._step: object = None
        self.inside: dict[int, Region | None] = {}

    def open(self) -> None:
        """Watch from here on, or have nothing compiled run; ``open`` and ``close`` may lie one inside the other."""
        self._depth += 1
        if self._depth > 1:
            return
        if self._recorder.selection.compiled == "eager":
            self._stance = torch.compiler.set_stance("force_eager")
        if self._recorder.selection.level != "state":
            COMPILED_GRAPHS.watch(self)

    def close(self) -> None:
        """Undo one ``open``; may be called more than once."""
        self._depth = max(self._depth - 1, 0)
        if not self._depth:
            stance, self._stance = self._stance, None
            if stance is not None:
                stance.__exit__(None, None, None)
            COMPILED_GRAPHS.unwatch(self)
            self.inside.clear()

    def begin(self) -> None:
        """Start a step."""
        self._step = object()
        self.inside.clear()

    def end(self) -> None:
        """End a step: backward passes of graphs that outlive it are not recorded."""
        self._step = None
        self.inside.clear()

    def is_inside(self) -> bool:
        """Return whether a region runs in this thread."""
        return get_ident() in self.inside

    def run(self, graph: TracedGraph, call: Callable[..., Any], *args: Any) -> Any:
        """Run a compiled graph in the forward pass, or where a checkpoint repeats it."""
        recorder = self._recorder
        if not self._is_recorded():
            return call(*args)
        phase, scope = recorder.place()
        scope = self._in_own_module(graph, args, scope)
        if not self._selects(graph, phase, scope):
            return self._unselected(call, args)
        region = Region(recorder, graph, phase, scope)
        given = [*zip(graph.inputs, args, strict=True), *graph.held]
        region.enter((self._name(known, value, scope), value) for known, value in given)
        number = _next_sequence_number()
        self._start(region)
        recorder.modules.current = scope
        try:
            outputs = call(*args)
        finally:
            self.inside.pop(get_ident(), None)
            recorder.modules.return_to_stack()
        region.leave([(None, value) for value in tensors_in([outputs]) if holds_data(value)])
        if "backward" in recorder.selection.phases and torch.is_grad_enabled():
            region.forget_values()
            for node in compiled_nodes(outputs, number):
                results = enumerate(tensors_in([outputs]))
                names = {one.output_nr: f"grad of output {index}" for index, one in results if one.grad_fn is node}
                self._follow_backward(region, node, names)
        return outputs

    def run_earlier(self, call: Callable[[], Any]) -> Any:
        """Run a graph that inductor compiled before anybody followed, forward or backward."""
        if not self._is_recorded():
            return call()
        self._recorder.late.before_any_write()
        self.inside[get_ident()] = None
        try:
            return call()
        finally:
            self.inside.pop(get_ident(), None)
            self._recorder.run_unseen(_EARLIER)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op while an opaque region runs in some thread; of this one's, record what the op wrote."""
        recorder = self._recorder
        if not self.is_inside():
            return recorder.op(func, args, kwargs)
        region = self.inside[get_ident()]
        if region is None or region.graph.is_graphed:
            return recorder.undigested.captured(func, args, kwargs)
        plan = recorder.plan_of(func)
        if comes_apart(plan, args, kwargs):
            return TAKE_APART
        plan = plan.whole or plan
        if plan.kind is not OpKind.DIGEST:
            recorder.counts.skipped[plan.kind.value] += 1
            return func(*args, **kwargs)
        phase, scope = region.phase, region.scope
        if recorder.late.is_used and not plan.is_functional:
            recorder.late.before_write(written_arguments(plan, args, kwargs))
        kept = begin_kept_call(recorder, plan, phase, scope, args, kwargs)
        try:
            out = plan.call(*args, **kwargs)
        except RuntimeError as error:
            out = recorder.call_if_allowed(error, recorder.num_sites, func, phase, scope, args, kwargs)
        if plan.may_be_in_flight and all(flying := in_flight(plan, out, args, kwargs)):
            recorder.undigested.mark_in_flight(*flying)
            return out
        outputs = written_by_call(plan, out, args, kwargs)
        out, outputs = hook_outputs(recorder, plan, phase, scope, out, outputs, args, kwargs)
        outputs = [output for output in outputs if not isinstance(output, Tensor) or holds_data(output)]
        if not outputs:
            recorder.counts.skipped["no_data"] += 1
            return out
        if recorder.keeper is not None and kept is not None:
            recorder.keeper.end_call(kept, outputs, recorder.num_sites)
        region.record_op(func, plan.name, outputs)
        recorder.counts.num_digested += 1
        return out

    def _is_recorded(self) -> bool:
        """Return whether a graph that is about to run makes rows, and is not a part of another one, or of a capture."""
        return self._step is not None and not self.is_inside() and not self._recorder.undigested.is_capturing()

    def _start(self, region: Region) -> None:
        self._recorder.late.flush()  # its kernels reuse memory, also of what it is given
        if not region.graph.is_transparent:
            self._recorder.counts.opaque.add(region.graph.region)
            self.inside[get_ident()] = region

    def _name(self, known: GraphInput, value: Any, scope: OpScope) -> str:
        name = self._recorder.parameter_names.get(id(value))
        if name is None and isinstance(value, Tensor) and has_place(value):
            name = self._recorder.names.of(value)
        if name is not None or known.path is None:
            return name or known.name
        return f"{scope.module}.{known.path}" if scope.module not in ("", "?") else known.path

    def _in_own_module(self, graph: TracedGraph, args: Sequence[Any], scope: OpScope) -> OpScope:
        """Return the scope in the module whose code was traced, told by the name of one of its parameters.

        ``nn.Module.compile`` compiles the call of a module with its hooks, so that the stack does not show it.
        """
        for known, value in zip(graph.inputs, args, strict=False):
            name = self._recorder.parameter_names.get(id(value)) if known.path else None
            if name is None or not name.endswith(str(known.path)):
                continue
            module = name[: -len(str(known.path))].rstrip(".")
            if _unwrapped(module) == _unwrapped(scope.module):
                return scope
            return self._recorder.backward.in_module(module, recomputed=scope.recomputed)
        return scope

    def _selects(self, graph: TracedGraph, phase: str, scope: OpScope) -> bool:
        """Return whether the region's module is selected, or one that is called inside."""
        recorder = self._recorder
        if recorder.selects(phase, scope):
            return True
        owner = _unwrapped(scope.module)
        inside = {f"{owner}.{path}".strip(".") for path in graph.modules}
        names = (name for name in recorder.modules.names if _unwrapped(name) in inside)
        return any(recorder.selects(phase, OpScope(module=name)) for name in names)

    def _unselected(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a region outside the selection: what it writes is unknown from here on."""
        self._recorder.late.flush()
        versions = [_version_of(value) for value in args]
        outputs = call(*args)
        written = [value for value, before in zip(args, versions, strict=True) if _version_of(value) != before]
        for value in tensors_in([outputs, *written]):
            for part in parts_with_memory(value):
                self._recorder.ledger.forget(part)
        self._recorder.counts.skipped["unselected"] += 1
        return outputs

    def _follow_backward(self, forward: Region, node: Any, names: Mapping[int, str]) -> None:
        """Record the backward pass of a region, too, when it comes within this step; ``names`` are by output number."""
        step, recorder = self._step, self._recorder
        scope = OpScope(module=forward.scope.module, source=forward.source)
        recorder.backward.claim(node, scope)
        running: list[Region] = []

        @breaks_graph("det_callbacks: what goes into a compiled region is recorded when it runs")
        def before(gradients: Sequence[Any]) -> None:
            if step is not self._step or recorder.undigested.is_capturing():
                return
            with recorder.lock:
                running.append(Region(recorder, forward.graph, "backward", scope, forward))
                # what is none of the outputs is an input that the region wrote, or what views among them are of
                given = enumerate(gradients)
                running[-1].enter((names.get(index, f"grad of result {index}"), value) for index, value in given)
                running[-1].forget_values()
                self._start(running[-1])

        @breaks_graph("det_callbacks: what comes out of a compiled region is recorded when it has run")
        def after(gradients: Sequence[Any], _of_outputs: Sequence[Any]) -> None:
            if not running or step is not self._step:
                return
            with recorder.lock:
                self.inside.pop(get_ident(), None)
                shown = _names_of_gradients(forward, len(gradients))
                pairs = zip(shown, gradients, strict=True)
                running.pop().leave(
                    [(name, one) for name, one in pairs if name != "" and isinstance(one, Tensor) and holds_data(one)]
                )

        node.register_prehook(before)
        node.register_hook(after)


def _names_of_gradients(forward: Region, num_gradients: int) -> list[str | None]:
    """Return names for the gradients of a region's inputs, "" for one that is not recorded."""
    inputs = forward.graph.inputs
    if num_gradients != len(inputs):
        return [None] * num_gradients
    names = forward.names
    if forward.misses_parameters:
        return [f"grad of {names[index]}" if index in names else "" for index in range(num_gradients)]
    return [f"grad of {names.get(index, known.name)}" for index, known in enumerate(inputs)]


def _unwrapped(name: str) -> str:
    """Return a module's name without the parts that ``torch.compile`` adds by wrapping a module."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _version_of(value: Any) -> int:
    """Return how often a tensor was written, as far as autograd was told; 0 for what does not count it."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _joined(digests: list[int]) -> int:
    return digest_bytes(array("Q", digests).tobytes())
