"""The rows that one call of a compiled graph makes.

First its inputs that no recorded op of this step wrote, as for any op; then a row of role "graph", which says which
graph it is; rows of role "entering" for all its inputs; rows of the ops that are seen inside, and one of role "inside"
that sums those up; and, when it has run, rows for its outputs and for the inputs that it wrote, which follow from all
of those.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from det_callbacks.digest import Bits, digest_bytes, digest_output
from det_callbacks.runs.program import MISSES_PARAMETERS, Site
from det_callbacks.runs.values import scalar_bits
from det_callbacks.trace.appending import append_output
from det_callbacks.trace.building import input_row, source_of
from det_callbacks.trace.calls import tensors_in
from det_callbacks.trace.compiled.graphs import GraphInput, TracedGraph
from det_callbacks.trace.components import has_parts, holds_data, parts_of
from det_callbacks.trace.names import has_place
from det_callbacks.trace.tree import Context, Event, arguments_json, module_of

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder

LEFT_OUT = "left out"

_Row = Callable[[int, tuple[int, ...], tuple[str, ...]], Site]


class _Entered:
    """One input of a call."""

    __slots__ = ("index", "known", "position", "value", "version")

    def __init__(self, index: int, known: GraphInput, value: Any) -> None:
        self.index = index
        self.known = known
        self.value = value
        self.version = version_of(value)
        self.position = -1


class RegionRows:
    """Makes the rows of one call of a compiled graph: ``enter`` before it, ``leave`` after it.

    Args:
        recorder: whose step it is.
        graph: that is called.
        phase: of the rows.
        context: where the call belongs.
    """

    def __init__(self, recorder: "Recorder", graph: TracedGraph, phase: str, context: Context) -> None:
        self._recorder = recorder
        self.graph = graph
        self.phase = phase
        self.context = context
        self.source: tuple[str, ...] = ()
        self._module = module_of(context)
        self._is_op_level = recorder.selection.level == "op"
        self._may_write_parameters = phase == "optimizer" or not torch.is_grad_enabled()
        self._names: dict[int, str] = {}
        self._forward: tuple[int, ...] = ()
        self._misses_parameters = False
        self._entered: list[_Entered] = []
        self._reads: tuple[int, ...] = ()
        self.reads_of_inner: tuple[int, ...] = ()
        """What an op inside an opaque region follows from: the graph, and the inputs but the parameters."""
        self.inner: list[Bits] = []
        """Digests of what the ops inside an opaque region gave."""

    def enter(self, args: Sequence[Any]) -> None:
        """Record what goes in.

        At level module without the parameters, which the state before the step has, and the gradients made of them.
        """
        recorder = self._recorder
        self._entered = [
            _Entered(index, known, value)
            for index, (known, value) in enumerate(self.graph.with_held(args))
            if (isinstance(value, Tensor) and holds_data(value)) or isinstance(value, bool | int | float)
        ]
        if not self._is_op_level:
            self._entered = [entered for entered in self._entered if not isinstance(entered.value, nn.Parameter)]
        self._misses_parameters |= not self._is_op_level and any(isinstance(value, nn.Parameter) for value in args)
        reads: list[list[int]] = []
        input_names: list[str | None] = []
        row_edges = recorder.reads.row_edges
        row_edges.clear()
        for entered in self._entered:
            writers: list[int] = []
            if isinstance(entered.value, Tensor) and self._is_op_level:
                recorder.reads.read(entered.value, writers, input_names)
            reads.append(writers)
        edges = [list(edge) for edge in row_edges]
        row_edges.clear()
        num_inputs = len(edges)
        every = sorted({writer for writers in reads for writer in writers}.union(self._forward))
        names = [self._name(entered) for entered in self._entered]
        self._names = {entered.index: name for entered, name in zip(self._entered, names, strict=True)}
        shown = [*input_names, None, *names]
        self._go_to(
            self.graph.entering,
            [*edges, every, *reads],
            shown,
            lambda index, inputs, source: self._row_of_input(index, num_inputs, shown, inputs, source),
        )
        graph_row = recorder.num_sites
        fingerprint = self.graph.fingerprint
        detail = f"{self.graph.num_ops} ops, {fingerprint:016x}"
        recorder.append_bits(fingerprint, recorder.layouts.special("graph", (), detail))
        for entered, writers in zip(self._entered, reads, strict=True):
            entered.position = recorder.num_sites
            self._append(entered.value, writers if isinstance(entered.value, nn.Parameter) else ())
        own = [entered.position for entered in self._entered]
        self._reads = (*every, graph_row, *own)
        self.reads_of_inner = (
            graph_row,
            *(entered.position for entered in self._entered if not isinstance(entered.value, nn.Parameter)),
        )

    def follow(self, forward: "RegionRows") -> None:
        """Let what comes follow from the rows of a forward pass, too: it reads what that saved."""
        self._forward = forward._reads
        self._misses_parameters = forward._misses_parameters

    def gradient_names(self, num_gradients: int) -> list[str | None]:
        """Return names for the gradients of the inputs, as the backward pass returns them."""
        if num_gradients != len(self.graph.inputs):
            return [None] * num_gradients
        if self._misses_parameters:
            return [
                f"grad of {self._names[index]}" if index in self._names else LEFT_OUT for index in range(num_gradients)
            ]
        return [f"grad of {self._names.get(index, known.name)}" for index, known in enumerate(self.graph.inputs)]

    def forget_values(self) -> None:
        """Let go of the inputs; those that the call writes are then not looked for."""
        self._entered.clear()

    def leave(self, outputs: Any, *, is_seen_through: bool, names: Sequence[str | None] | None = None) -> None:
        """Record what came out.

        Args:
            outputs: of the call.
            is_seen_through: every op inside was recorded with what it read, so that outputs follow from their writers.
            names: of the outputs, None where they have none.
        """
        recorder = self._recorder
        self._sum_up()
        values: list[tuple[str | None, Tensor]] = (
            [(None, value) for value in tensors_in([outputs]) if holds_data(value)]
            if names is None
            else [
                (name, value)
                for name, value in zip(names, outputs, strict=True)
                if isinstance(value, Tensor) and holds_data(value) and name is not LEFT_OUT
            ]
        )
        if self.graph.is_graphed:
            recorder.late.unhold(part for _, value in values for part in parts_with_memory(value))
        if not is_seen_through:
            values += self._written()
        recorder.compiled.num_digested += 1
        if not values:
            return
        shown = [name for name, _ in values]
        reads = [(self._writers(value) if is_seen_through else []) or list(self._reads) for _, value in values]
        self._go_to(
            self.graph.leaving,
            reads,
            shown,
            lambda index, inputs, source: Site(
                phase=self.phase,
                module=self._module,
                op=f"{self.graph.region}.outputs",
                occurrence=0,
                output=index,
                role="output",
                name=shown[index],
                inputs=inputs,
                source=source,
            ),
        )
        for _, value in values:
            position = recorder.num_sites
            self._append(value, ())
            self._reads += (position,)
            if not is_seen_through:
                for part in parts_with_memory(value):
                    recorder.ledger.write(part, position)
        recorder.late.end_group()

    def _sum_up(self) -> None:
        """Make one row of all that ops inside an opaque region gave: the region's, which may be the origin."""
        if not self.inner:
            return
        recorder = self._recorder
        position = recorder.num_sites
        self._go_to(
            self.graph.inside,
            [list(self._reads)],
            [None],
            lambda _, inputs, source: Site(
                phase=self.phase,
                module=self._module,
                op=f"{self.graph.region}.inside",
                occurrence=0,
                output=0,
                role="inside",
                inputs=inputs,
                source=source,
            ),
        )
        recorder.append_bits(recorder.late.derive(position, self.inner, _joined), recorder.layouts.none)
        self._reads += (position,)
        self.inner = []

    def _row_of_input(
        self, index: int, num_inputs: int, names: Sequence[str | None], inputs: tuple[int, ...], source: tuple[str, ...]
    ) -> Site:
        if index < num_inputs:
            return input_row(names[index], inputs, module=self._module, source=source)
        is_graph = index == num_inputs
        return Site(
            phase=self.phase,
            module=self._module,
            op=f"{self.graph.region}.{'graph' if is_graph else 'inputs'}",
            occurrence=0,
            output=0 if is_graph else index - num_inputs - 1,
            role="graph" if is_graph else "entering",
            name=names[index],
            arguments=self._arguments() if is_graph else "{}",
            inputs=inputs,
            source=source,
        )

    def _arguments(self) -> str:
        if self._misses_parameters:
            return arguments_json(("backend", MISSES_PARAMETERS), (self.graph.backend, True))
        return arguments_json(("backend",), (self.graph.backend,))

    def _go_to(self, func: object, reads: list[list[int]], names: list[str | None], row: _Row) -> None:
        """Go to the event of these rows: the likely one, a sibling, or a new one."""
        recorder = self._recorder
        parent = recorder.at
        like: tuple[Any, ...] = (func, self.phase, self.context, [], reads, names, len(names))
        event = parent.likely
        if event is None or not event.fits(*like):
            event = next((child for child in parent.children if child.fits(*like)), None)
            if event is None:
                event = Event(parent, *like)
                event.source = source_of(self.context)
                event.rows = tuple(
                    row(index, tuple(sorted(set(edges))), event.source) for index, edges in enumerate(reads)
                )
                recorder.tree.add(event)
            parent.likely = event
        recorder.at = event
        self.source = event.source

    def _append(self, value: Any, writers: Sequence[int]) -> None:
        """Append the bits of a value; of a tensor that one site alone wrote, ``writers``, its digest is taken over."""
        recorder = self._recorder
        if not isinstance(value, Tensor):
            bits, tag = scalar_bits(value)
            recorder.append_bits(bits, recorder.layouts.special(tag))
        elif writers:
            append_output(recorder, value, writers)
        else:
            recorder.append(value)

    def _name(self, entered: _Entered) -> str:
        recorder = self._recorder
        value, path = entered.value, entered.known.path
        name = recorder.parameter_names.get(id(value))
        if name is None and isinstance(value, Tensor) and has_place(value):
            name = recorder.names.of(value)
        if name is not None or path is None:
            return name or entered.known.name
        module = self._module
        if f"{module}._orig_mod" in recorder.modules.names_known:
            module = f"{module}._orig_mod"
        return f"{module}.{path}" if module and module != "?" else path

    def _written(self) -> list[tuple[str | None, Tensor]]:
        """Return the inputs that have other bits now.

        Autograd is told of some writes only: not of those to buffers, nor of any where no gradients are computed.
        """
        written: list[tuple[str | None, Tensor]] = []
        for entered in self._entered:
            value = entered.value
            if not isinstance(value, Tensor):
                continue
            is_told = version_of(value) != entered.version
            may_be = self._may_write_parameters or not isinstance(value, nn.Parameter)
            if is_told or (may_be and self._is_other(entered, value)):
                written.append((self._name(entered), value))
        return written

    def _is_other(self, entered: "_Entered", value: Tensor) -> bool:
        """Return whether an input has other bits now; on a device that computes digests, whether it may have."""
        recorder = self._recorder
        if entered.position in recorder.late.bits:
            return self._may_write_parameters or entered.known.path is not None
        return digest_output(value) != recorder.digests[entered.position]

    def _writers(self, value: Tensor) -> list[int]:
        ledger = self._recorder.ledger
        return sorted({writer for part in parts_with_memory(value) for writer in ledger.writers_of(part)})


def _joined(digests: list[int]) -> int:
    return digest_bytes(array("Q", digests).tobytes())


def version_of(value: Any) -> int:
    """Return how often a tensor was written, as far as autograd was told; 0 for what does not count it."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def parts_with_memory(tensor: Tensor) -> Sequence[Tensor]:
    """Return the ordinary tensors that a tensor consists of: itself, or its parts."""
    return list(parts_of(tensor)) if has_parts(tensor) else [tensor]
