"""One call of a compiled graph: its rows, and what each of them reads."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from det_callbacks.digest.components import digest_output
from det_callbacks.internals.torch import storage_address
from det_callbacks.runs.program import MISSES_PARAMETERS, Role, Site, subject_of
from det_callbacks.trace.call_graph import CallNode, OpScope, rowwise
from det_callbacks.trace.compiled.generated_code import KernelComment
from det_callbacks.trace.compiled.graphs import TracedGraph, UserOp, fused_source
from det_callbacks.trace.compiled.kernel_nodes import KERNEL_NODES, EagerCall
from det_callbacks.trace.compiled.kernels import SEEN_KERNELS, KernelCall
from det_callbacks.trace.components import holds_data, parts_with_memory
from det_callbacks.trace.modules import source_of
from det_callbacks.trace.places import Places
from det_callbacks.trace.reads import Reads
from det_callbacks.trace.sites import InputName, arguments_json
from det_callbacks.trace.step import Step

_Row = tuple[str, int, Role, str | None]  # op, number, role and name


class RowFacts(NamedTuple):
    """What a region knows of its rows: their lines, and for each output which call of eager code
    makes it.
    """

    source: tuple[str, ...]
    eager: Sequence[EagerCall | None] = ()
    choice: Mapping[str, Any] = {}  # the configuration of a kernel

    def fields(self, output: int) -> dict[str, Any]:
        """Return fields of an output's site."""
        eager = self.eager[output] if output < len(self.eager) else None
        fields: dict[str, Any] = {"source": self.source, "choice": arguments_json(self.choice)}
        if eager is not None:
            fields |= {"eager_op": eager.op, "eager_line": eager.line}
            fields |= {"eager_call": eager.call, "eager_calls": eager.calls}
        return fields


MakeRowFacts = Callable[[], RowFacts]


@dataclass(slots=True, eq=False)
class InnerReads:
    """What a kernel or an op inside a region reads."""

    positions: list[int]
    names: list[InputName]  # one for each new input site


@dataclass(slots=True, eq=False)
class Region:
    """The rows of one call of a compiled graph: call ``enter`` before it and ``leave`` after it."""

    step: Step
    places: Places
    input_reads: Reads
    graph: TracedGraph
    phase: str
    scope: OpScope
    reads: list[int] = field(default_factory=list)  # the sites that its outputs depend on
    reads_of_inner: list[int] = field(default_factory=list)
    inner: list[int] = field(default_factory=list)  # positions of inner ops and kernels
    source: tuple[str, ...] = ()
    sees_kernels: bool = False
    unseen: set[str] = field(default_factory=set)  # why some of its kernels cannot be seen
    numbers: list[int] = field(default_factory=list)  # rows of its inputs that are not tensors
    entered: dict[int, int] = field(default_factory=dict)  # storage -> row of an input

    def enter(self, inputs: Iterable[tuple[str, Any]]) -> list[tuple[str, Tensor, int]]:
        """Record the inputs; return name, tensor and position of those that have rows: of
        parameters only those that the region may write.
        """
        step = self.step
        is_op_level = self.places.selection.level == "op"
        may_write_parameters = is_op_level and (
            self.phase == "optimizer" or not torch.is_grad_enabled()
        )
        left_out = () if may_write_parameters else nn.Parameter
        entering: list[tuple[str, Any, list[int]]] = []
        read_first: list[InputName] = []
        for name, value in inputs:
            if not holds_data(value):
                continue
            writers: list[int] = []
            if isinstance(value, Tensor) and is_op_level:
                self.input_reads.read(value, writers, read_first)
                self.reads += writers
            if isinstance(value, Tensor | int | float) and not isinstance(value, left_out):
                entering.append((name, value, writers))
        every, region = sorted(set(self.reads)), self.graph.region
        reads = [every, *(writers for *_, writers in entering)]
        names = [name for name, *_ in entering]
        rows: list[_Row] = [(f"{region}.graph", 0, "graph", None)]
        rows += [
            (f"{region}.inputs", index, "region_input", name) for index, name in enumerate(names)
        ]
        self._step_to(self.graph, "inputs", reads, [*read_first, *names], rows)
        graph_row = step.num_sites
        detail = f"{self.graph.num_ops} ops, {self.graph.fingerprint:016x}"
        step.append_bits(self.graph.fingerprint, step.layouts.special("graph", (), detail))
        for _, value, _ in entering:
            step.append_value(value)
        self.reads_of_inner = [*range(graph_row, step.num_sites)]
        self.reads = [*every, *self.reads_of_inner]
        with_rows: list[tuple[str, Tensor, int]] = []
        for position, (name, value, _) in enumerate(entering, start=graph_row + 1):
            if isinstance(value, Tensor):
                with_rows.append((name, value, position))
                self.entered.update(
                    (storage_address(part.untyped_storage()), position)
                    for part in parts_with_memory(value)
                )
            else:
                self.numbers.append(position)
        return with_rows

    def read_exactly(self, tensors: Iterable[Tensor], updated: Iterable[Tensor] = ()) -> InnerReads:
        """Return what a kernel or an op reads, before it runs;
        ``updated`` are tensors that it also writes.
        """
        reads = InnerReads([*self.numbers], [])
        if self.unseen:  # something that has no rows may have written any of them
            reads.positions += [*self.reads_of_inner, *self.inner]
        else:
            for tensor in tensors:
                writers: list[int] = []
                self.input_reads.read(tensor, writers, reads.names)
                reads.positions += self._with_entered(tensor, writers)
            for tensor in updated:
                reads.positions += self._with_entered(tensor, self.step.writers_of(tensor))
            self.input_reads.unwritten.clear()
        return reads

    def _with_entered(self, tensor: Tensor, writers: list[int]) -> list[int]:
        """Add the row of an input that nothing in the region has written:
        it shows a write that was not recorded.
        """
        addresses = (storage_address(part.untyped_storage()) for part in parts_with_memory(tensor))
        rows = (self.entered.get(address) for address in addresses)
        return [
            *writers,
            *(row for row in rows if row is not None and all(writer < row for writer in writers)),
        ]

    def record_inner(
        self,
        func: object,
        op: str,
        outputs: Sequence[Any],
        reads: InnerReads,
        names: Sequence[str | None],
        describe: MakeRowFacts,
    ) -> None:
        """Record the outputs of an op or a kernel."""
        step = self.step
        rows: list[_Row] = [
            (op, index, "output" if isinstance(output, Tensor) else "value", name)
            for index, (output, name) in enumerate(zip(outputs, names, strict=True))
        ]
        positions = sorted(set(reads.positions))
        self._step_to(
            func, "inner", [positions for _ in outputs], [*reads.names, *names], rows, describe
        )
        first = step.num_sites
        for position, output in enumerate(outputs, start=first):
            self.inner.append(position)
            step.append_value(output)
            for part in parts_with_memory(output) if isinstance(output, Tensor) else ():
                step.ledger.write(part, position)
        step.deferred.flush()  # the region's kernels reuse this memory without a dispatch

    def leave(
        self,
        outputs: Iterable[tuple[str | None, Any]],
        inputs: Iterable[tuple[str, Tensor, int]] = (),
    ) -> None:
        """Record the outputs, and those ``inputs`` (see ``enter``) whose bits have changed or may
        have changed.

        A version counter would not do: a compiled graph increments none for buffers, and none at
        all without gradients.
        """
        step = self.step
        values = [
            (name, value)
            for name, value in outputs
            if isinstance(value, Tensor) and holds_data(value)
        ]
        if self.graph.is_graphed:
            # inductor reuses this memory only when nothing references it
            for _, value in values:
                for part in parts_with_memory(value):
                    step.deferred.skip_record_stream_for(part.untyped_storage())
        digests, deferred = step.digests, step.deferred.bits
        values += [
            (name, value)
            for name, value, position in inputs
            if position in deferred or digest_output(value) != digests[position]
        ]
        step.counts.num_digested += 1
        if values:
            names: list[InputName] = [name for name, _ in values]
            op = f"{self.graph.region}.outputs"
            rows: list[_Row] = [
                (op, index, "output", name) for index, (name, _) in enumerate(values)
            ]
            is_exact = self.sees_kernels and not self.unseen
            writers = [step.writers_of(value) if is_exact else [] for _, value in values]
            self._step_to(
                self.graph, "outputs", [exact or self.reads for exact in writers], names, rows
            )
            first = step.num_sites
            for position, ((_, value), exact) in enumerate(
                zip(values, writers, strict=True), start=first
            ):
                step.append_output(value, exact)
                for part in parts_with_memory(value):
                    step.ledger.write(part, position)
            self.reads = [*self.reads, *range(first, step.num_sites)]
            step.deferred.end_group()
        if self.graph.is_graphed:
            step.deferred.flush()

    def describe_kernel(self, call: KernelCall, written: Sequence[int]) -> RowFacts:
        """Return the lines of the nodes that a kernel computes, none if they are unknown;
        ``written`` are indices of its arguments.
        """
        key, lines, comment = call.code.key, self.graph.lines, call.comment
        if comment is not None:
            nodes = self._named_in(comment)
        else:
            nodes = KERNEL_NODES.of(key, call.name, lines)
        buffers = call.code.buffers.get(call.line, ())
        held = [buffers[at] if at < len(buffers) else "" for at in written]
        eager = KERNEL_NODES.held_by(key, held)
        return RowFacts(fused_source(nodes), eager, call.choice)

    def describe_op(self, frame: FrameType | None) -> RowFacts:
        """Return the line of the node that an op computes, or that of the region's call."""
        while frame is not None:
            code = SEEN_KERNELS.code_in(frame)
            if code is not None:
                comment = code.comments.get(frame.f_lineno)
                # the last one: those before made its inputs, if only by views
                source = fused_source(self._named_in(comment)[-1:] if comment is not None else ())
                held = KERNEL_NODES.held_by(code.key, code.buffers.get(frame.f_lineno, ()))
                return RowFacts(source or self.source, held)
            frame = frame.f_back
        return RowFacts(self.source)

    def _named_in(self, comment: KernelComment) -> list[UserOp]:
        """Return the nodes of a comment.

        Of a backward pass it also names nodes of inductor's own graph,
        which may have the names of others in Dynamo's.
        """
        own = {op.rpartition(".")[2] for op in comment.ops} if self.phase == "backward" else ()
        names = (name for name in comment.nodes if re.sub(r"_\d+$", "", name) not in own)
        return [self.graph.lines[name] for name in names if name in self.graph.lines]

    def _step_to(
        self,
        func: object,
        part: str,
        reads: list[list[int]],
        names: list[InputName],
        rows: Iterable[_Row],
        describe: MakeRowFacts | None = None,
    ) -> None:
        arguments: dict[str, Any] = {"backend": self.graph.backend}
        if self.places.selection.level != "op":
            arguments[MISSES_PARAMETERS] = True

        def build(node: CallNode) -> None:
            if describe is not None:
                facts = describe()
            else:
                facts = RowFacts(self.source or source_of(self.scope))
            node.source = facts.source
            sites = (
                Site(
                    phase=self.phase,
                    module=self.scope.module,
                    op=op,
                    output=index,
                    role=role,
                    **subject_of(name, phase=self.phase, role=role),
                    arguments=arguments_json(arguments if role == "graph" else {}),
                    **facts.fields(index),
                )
                for op, index, role, name in rows
            )
            node.sites = (*self.input_reads.sites(node), *sites)
            node.edges = [*self.input_reads.row_edges, *(sorted(set(edges)) for edges in reads)]

        node = self.step.graph.step_to(
            func,
            self.phase,
            self.scope,
            rowwise(reads),
            names,
            len(reads),
            build,
            consts=[part],
            edges=self.input_reads.row_edges,
        )
        if describe is None:
            self.source = node.source
        self.input_reads.row_edges.clear()
