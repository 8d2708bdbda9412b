"""Sites of named tensors and numbers: state, batch, loss, gradients, outputs of modules."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from det_callbacks.digest.components import tensor_bits
from det_callbacks.digest.deferred import Bits
from det_callbacks.digest.host import digest_spans
from det_callbacks.internals.torch import is_batched, storage_address
from det_callbacks.runs.program import (
    IN_FLIGHT,
    Role,
    Site,
    SiteRow,
    after_step,
    scalar_bits,
    subject_of,
)
from det_callbacks.trace.backward import scope_in
from det_callbacks.trace.call_graph import CallNode, SharedRows
from det_callbacks.trace.collectives import Collectives
from det_callbacks.trace.compiled.captures import GraphCaptures
from det_callbacks.trace.components import (
    PLAIN,
    STRIDED,
    LayoutSlot,
    address_of,
    has_parts,
)
from det_callbacks.trace.generators import GeneratorTrail, process_generators
from det_callbacks.trace.leaves import Entry, is_constant, leaves
from det_callbacks.trace.places import Addresses, Places, addresses_of, has_address
from det_callbacks.trace.sites import SpecialName
from det_callbacks.trace.step import Step
from det_callbacks.trace.storages import PartialWrites


class Derived(NamedTuple):
    """What was computed from a value in a group, or the layout of a value that cannot be read."""

    bits: Bits
    slot: LayoutSlot


DerivedEntry = tuple[str | SpecialName, Derived]


class NamedSites:
    """Records sites without an op: groups of named tensors and numbers, generators,
    and outputs of modules.
    """

    def __init__(
        self,
        step: Step,
        places: Places,
        generators: GeneratorTrail,
        collectives: Collectives,
        captures: GraphCaptures,
    ) -> None:
        self._step, self._places, self._generators = step, places, generators
        self._collectives, self._captures = collectives, captures
        self._parameter_names: frozenset[str] = frozenset()
        # valid for the current parameters
        self._rows: dict[tuple[str, str | None, Role, str], SiteRow] = {}

    def record_generators(self, *, is_end: bool = False) -> None:
        """Record the state of each generator, when a step begins or ends."""
        step, trail = self._step, self._generators
        first = step.num_sites
        names: list[str] = []
        reads: list[int | None] = []
        for number, (name, generator) in enumerate(process_generators(trail.homes)):
            names.append(after_step(name) if is_end else name)
            reads += (*trail.read(name, first + number), None)
            step.digests.append(trail.reader.read(name, generator))
        step.layout_indices.extend([step.layouts.none.index] * len(names))
        self._step_to("generators", "rng", "", reads, names, "generator")

    def record_group(
        self,
        label: str,
        phase: str,
        entries: Sequence[Entry | DerivedEntry],
        *,
        owner: str | None = None,
        is_writer: bool = False,
    ) -> dict[Addresses, str]:
        """Record named tensors and numbers as sites, in row-major order;
        return the first name at each address.

        ``label`` distinguishes groups at the same place. Their module is ``owner``, or is taken
        from each name. If ``is_writer``, later ops that read the tensors read these sites.

        A group has hundreds of tensors, so the loop calls no function for an ordinary one, and
        ``digest_spans`` digests them together.
        """
        if self._captures.skips():
            return {}
        names: list[str | SpecialName] = []
        reads: list[int | None] = []
        indices: list[int] = []
        spans: list[tuple[int, int]] = []  # address and number of bytes, in host memory
        # values that are digested without a span, in order, with their index
        others: list[tuple[int, Any]] = []
        written: list[Any] = []
        by_address: dict[Addresses, str] = {}
        name: Any
        value: Any
        step = self._step
        layouts, writers = step.layouts, step.ledger.writers
        for name, value in entries:
            edges: Sequence[int] = ()
            is_plain = (
                value.__class__ in PLAIN
                and value.layout is STRIDED
                and value.is_cpu
                and not value.is_nested
            )
            writer: Any = None
            if is_plain:
                storage = value.untyped_storage()
                of_storage = storage_address(storage)
                writer = writers.get(of_storage)
            if is_plain and writer.__class__ is not PartialWrites:
                edges = () if writer is None else (writer,)
                slot = layouts.slots.get((value.dtype, value.shape, value.stride())) or layouts.of(
                    value
                )
                address = address_of(value)
                if slot.num_bytes:
                    by_address.setdefault((of_storage, address), name)
                if (
                    slot.is_row_major
                    and address
                    and not value.is_neg()
                    and storage.nbytes() >= slot.num_bytes
                ):
                    spans.append((address, slot.num_bytes))
                else:
                    others.append((len(names), value))
            elif not isinstance(value, Tensor):
                slot = (
                    value.slot
                    if isinstance(value, Derived)
                    else layouts.special(scalar_bits(value)[1])
                )
                others.append((len(names), value))
            elif not step.holds_data(value):
                continue
            elif self._collectives.arrive(value):
                # also a plain tensor of which several sites wrote parts
                edges, slot = step.writers_of(value), layouts.of(value)
                others.append((len(names), value))
                if has_address(value):
                    by_address.setdefault(addresses_of(value), name)
            else:
                edges, slot = step.writers_of(value), layouts.without_bits(value, IN_FLIGHT)
                others.append((len(names), Derived(0, slot)))
            names.append(name)
            reads += edges
            reads.append(None)
            indices.append(slot.index)
            if is_writer:
                written.append(value)
        if not names:
            return by_address
        self._step_to(label, phase, owner, reads, names)
        first = step.num_sites
        digests = digest_spans(spans)
        for index, value in others:  # ascending, so each is inserted at its final index
            bits = value.bits if isinstance(value, Derived) else self._bits_of(value)
            digests.insert(index, step.deferred.defer(first + index, bits))
        step.digests.extend(digests)
        step.layout_indices.extend(indices)
        for position, value in enumerate(written, start=first):
            if isinstance(value, Tensor) and not has_parts(value) and value.numel():
                step.ledger.write(value, position)
        step.deferred.end_group()
        return by_address

    def readable(self, tree: Any, name: str) -> list[Entry]:
        """Return the tensors and numbers in a nested structure;
        the coverage names collections that stay closed.
        """
        entries: list[Entry] = []
        for path, leaf in leaves(tree, name):
            if issubclass(type(leaf), Tensor | float | int):
                entries.append((path, leaf))
            elif not is_constant(leaf) and issubclass(type(leaf), Collection):
                self._step.counts.opaque.add(
                    f"{path} ({type(leaf).__module__}.{type(leaf).__qualname__})"
                )
        return entries

    def record_output(self, phase: str, module: str, name: str, tensor: Tensor) -> None:
        """Record an output of a module or its gradient, unless it has no data or a
        collective is still pending.
        """
        step = self._step
        if not step.holds_data(tensor) or self._captures.skips():
            return
        if is_batched(tensor):
            step.counts.skipped["batched"] += 1
        elif not self._collectives.arrive(tensor):
            step.counts.skipped["in_flight"] += 1
        else:
            reads = step.writers_of(tensor)
            self._step_to("output", phase, module, [*reads, None], [name])
            step.append_output(tensor, reads)
            step.deferred.end_group()

    def _step_to(
        self,
        label: str,
        phase: str,
        owner: str | None,
        reads: list[int | None],
        names: Sequence[str | SpecialName],
        role: Role = "named",
    ) -> None:
        def build(node: CallNode) -> None:
            parameter_names = self._places.parameter_name_set
            if parameter_names != self._parameter_names:
                self._parameter_names = parameter_names
                self._rows.clear()
            node.shared = SharedRows(
                rows=tuple([self._row(phase, owner, role, name) for name in names])
            )
            node.edges = _by_row(reads)

        scope = scope_in(owner or "", recomputed=False)
        self._step.graph.step_to(label, phase, scope, reads, names, len(names), build)

    def _bits_of(self, value: Tensor | int | float | bool) -> Bits:
        return (
            tensor_bits(value, self._step.deferred)
            if isinstance(value, Tensor)
            else scalar_bits(value)[0]
        )

    def _row(self, phase: str, owner: str | None, role: Role, name: str | SpecialName) -> SiteRow:
        if isinstance(name, SpecialName):
            role, name = name.role, name.name or ""
        key = (phase, owner, role, name)
        row = self._rows.get(key)
        if row is None:
            module = self._places.owner_of(name) if owner is None else owner
            subject = subject_of(name, phase=phase, role=role)
            row = self._rows[key] = SiteRow.of(
                Site(phase=phase, module=module, role=role, **subject)
            )
        return row


def _by_row(reads: Iterable[int | None]) -> list[list[int]]:
    """Return the sorted reads of each row, each once, from a list that
    ``rowwise`` could have made.
    """
    rows: list[list[int]] = []
    row: set[int] = set()
    for position in reads:
        if position is None:
            rows.append(sorted(row))
            row = set()
        else:
            row.add(position)
    return rows
