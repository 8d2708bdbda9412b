"""Sites of named tensors: state, batch, loss, gradients, outputs of modules."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_callbacks.digest.components import tensor_bits
from det_callbacks.digest.device.deferred import Bits
from det_callbacks.digest.host import digest_spans
from det_callbacks.internals.torch import CHILDREN, storage_address
from det_callbacks.runs.program import AFTER_STEP, IN_FLIGHT, Role, Site, SiteRow, scalar_bits
from det_callbacks.trace.attribution.backward import scope_in
from det_callbacks.trace.attribution.places import Places
from det_callbacks.trace.attribution.tensor_names import Addresses, addresses_of, has_address
from det_callbacks.trace.collectives import Collectives
from det_callbacks.trace.compiled.captures import GraphCaptures
from det_callbacks.trace.op.call_graph import CallNode, SharedRows
from det_callbacks.trace.op.components import PLAIN, STRIDED, address_of, has_parts, holds_data, unwrapped
from det_callbacks.trace.op.layouts import LayoutSlot
from det_callbacks.trace.op.sites import SpecialInput
from det_callbacks.trace.op.storages import PartialWrites
from det_callbacks.trace.state.generators import GeneratorTrail, process_generators
from det_callbacks.trace.state.leaves import flatten
from det_callbacks.trace.step import Step


class Derived(NamedTuple):
    """What was computed from a value in a group, or the layout of a value that cannot be read."""

    bits: Bits
    slot: LayoutSlot


Entry = tuple[str, Tensor | int | float | bool]
DerivedEntry = tuple[str | SpecialInput, Derived]


class NamedSites:
    def __init__(
        self, step: Step, places: Places, generators: GeneratorTrail, collectives: Collectives, captures: GraphCaptures
    ) -> None:
        self._step, self._places, self._generators = step, places, generators
        self._collectives, self._captures = collectives, captures
        self._parameters: frozenset[str] = frozenset()
        self._rows: dict[tuple[str, str | None, Role, str], SiteRow] = {}  # valid for the current parameters

    def generators(self, *, is_end: bool = False) -> None:
        step, trail = self._step, self._generators
        first = step.num_sites
        names: list[str] = []
        reads: list[int | None] = []
        for number, (name, generator) in enumerate(process_generators(trail.homes)):
            names.append(name + AFTER_STEP if is_end else name)
            reads += (*trail.read(name, first + number), None)
            step.digests.append(trail.reader.read(name, generator))
        step.layout_indices.extend([step.layouts.none.index] * len(names))
        self._step_to("generators", "rng", "", reads, names, "generator")

    def group(
        self,
        label: str,
        phase: str,
        entries: Sequence[Entry | DerivedEntry],
        *,
        owner: str | None = None,
        is_source: bool = False,
    ) -> dict[Addresses, str]:
        """Record named tensors and numbers as sites, in row-major order; return spans of ordinary strided tensors.

        ``label`` distinguishes groups at the same place. Their module is ``owner``, or is taken from each
        name. If ``is_source``, later ops that read the tensors read these sites.
        """
        if self._captures.is_captured():
            return {}
        names: list[str | SpecialInput] = []
        reads: list[int | None] = []
        indices: list[int] = []
        spans: list[tuple[int, int]] = []  # in host memory
        others: list[tuple[int, Any]] = []
        sources: list[Any] = []
        found: dict[Addresses, str] = {}
        name: Any
        value: Any
        step = self._step
        layouts, writers = step.layouts, step.ledger.writers
        for name, value in entries:
            edges: Sequence[int] = ()
            is_plain = value.__class__ in PLAIN and value.layout is STRIDED and value.is_cpu and not value.is_nested
            storage = value.untyped_storage() if is_plain else None
            place = storage_address(storage) if storage is not None else 0
            known: Any = writers.get(place)
            if storage is not None and known.__class__ is not PartialWrites:
                edges = () if known is None else (known,)
                slot = layouts.slots.get((value.dtype, value.shape, value.stride())) or layouts.of(value)
                address = address_of(value)
                if slot.num_bytes:
                    found.setdefault((place, address), name)
                if slot.is_row_major and address and not value.is_neg() and storage.nbytes() >= slot.num_bytes:
                    spans.append((address, slot.num_bytes))
                else:
                    others.append((len(names), value))
            elif not isinstance(value, Tensor):
                slot = value.slot if isinstance(value, Derived) else layouts.special(scalar_bits(value)[1])
                others.append((len(names), value))
            elif not holds_data(value):
                continue
            elif self._collectives.arrive(value):
                edges, slot = step.writers_of(value), layouts.of(value)
                others.append((len(names), value))
                if has_address(value):
                    found.setdefault(addresses_of(value), name)
            else:
                edges, slot = step.writers_of(value), layouts.without_bits(value, IN_FLIGHT)
                others.append((len(names), 0))
            names.append(name)
            reads += edges
            reads.append(None)
            indices.append(slot.index)
            if is_source:
                sources.append(value)
        if not names:
            return found
        self._step_to(label, phase, owner, reads, names)
        first = step.num_sites
        digests = digest_spans(spans)
        for index, value in others:
            bits = value.bits if isinstance(value, Derived) else self._bits_of(value)
            digests.insert(index, step.deferred.defer(first + index, bits))
        step.digests.extend(digests)
        step.layout_indices.extend(indices)
        for position, value in enumerate(sources, start=first):
            if isinstance(value, Tensor) and not has_parts(value) and value.numel():
                step.ledger.write(value, position)
        step.deferred.end_group()
        return found

    def output(self, phase: str, module: str, name: str, tensor: Tensor) -> None:
        step = self._step
        if not holds_data(tensor) or self._captures.is_captured():
            return
        if not self._collectives.arrive(tensor):
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
        names: Sequence[str | SpecialInput],
        role: Role = "named",
    ) -> None:
        def build(node: CallNode) -> None:
            parameters = self._places.parameters
            if parameters != self._parameters:
                self._parameters = parameters
                self._rows.clear()
            node.shared = SharedRows(rows=tuple([self._row(phase, owner, role, name) for name in names]))
            node.edges = _by_row(reads)

        scope = scope_in(owner or "", recomputed=False)
        self._step.graph.step_to(label, phase, scope, reads, names, len(names), build)

    def _bits_of(self, value: Tensor | int | float | bool) -> Bits:
        return tensor_bits(value, self._step.deferred) if isinstance(value, Tensor) else scalar_bits(value)[0]

    def _row(self, phase: str, owner: str | None, role: Role, name: str | SpecialInput) -> SiteRow:
        if isinstance(name, SpecialInput):
            role, name = name.role, name.name or ""
        key = (phase, owner, role, name)
        row = self._rows.get(key)
        if row is None:
            module = self._places.owner_of(name) if owner is None else owner
            row = self._rows[key] = SiteRow.of(Site(phase=phase, module=module, role=role, name=name))
        return row


def _by_row(reads: Iterable[int | None]) -> list[list[int]]:
    """Return the sorted reads of each row, from a list with None after each row's positions."""
    found: list[list[int]] = []
    positions: set[int] = set()
    for at in reads:
        if at is None:
            found.append(sorted(positions))
            positions = set()
        else:
            positions.add(at)
    return found


class ModuleOutputs:
    """Records outputs of selected modules, and their gradients: full backward hooks break in-place activations."""

    def __init__(self, named: NamedSites, places: Places, lock: RLock) -> None:
        self._named, self._places, self._lock = named, places, lock
        self._step: object = None

    def open(self) -> None:
        self._step = object()
        self._places.modules.on_output = self._record

    def close(self) -> None:
        self._step = None
        self._places.modules.on_output = None

    def _record(self, module: str, output: Any) -> None:
        places = self._places
        phase, scope = places.phase, scope_in(module, recomputed=False)
        is_recorded = places.selects(phase, scope)
        is_followed = places.selects("backward", scope) and torch.is_grad_enabled()
        if not (is_recorded or is_followed):
            return
        entries = (("output", output),) if isinstance(output, Tensor) else flatten(output, "output")
        for name, tensor in entries:
            if not isinstance(tensor, Tensor):
                continue
            inner = unwrapped(tensor)
            if is_recorded:
                with self._lock:
                    self._named.output(phase, module, name, inner)
            if is_followed and inner is tensor and tensor.requires_grad and not has_parts(tensor):
                tensor.register_hook(partial(self._record_gradient, self._step, module, f"grad of {name}"))

    def _record_gradient(self, step: object, module: str, name: str, gradient: Tensor | None) -> None:
        # None is a zero gradient that autograd did not materialise
        if gradient is not None and step is self._step:
            with self._lock:
                self._named.output("backward", module, name, gradient)


class StateWalker:
    """Lists parameters and buffers of a module by qualified name, shared ones once.

    Unlike ``nn.Module.named_parameters``, it builds names only if the tree of modules changed.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules: list[tuple[str, nn.Module, tuple[int, ...]]] = []

    def walk(self, *kinds: str) -> list[tuple[str, Tensor]]:
        """Return (name, tensor) pairs from the attributes ``kinds`` of the modules, "_parameters" or "_buffers"."""
        if not self._is_known():
            self._modules = [
                (f"{name}." if name else "", module, _children_of(module))
                for name, module in self._root.named_modules()
            ]
        known = set()
        entries: list[tuple[str, Tensor]] = []
        for kind in kinds:
            for prefix, module, _ in self._modules:
                for name, value in getattr(module, kind).items():
                    if value is not None and id(value) not in known:
                        known.add(id(value))
                        entries.append((prefix + name, value))
        return entries

    def _is_known(self) -> bool:
        for _, module, children in self._modules:  # twice in a step: ``any`` costs more
            if children != _children_of(module):
                return False
        return bool(self._modules)


def _children_of(module: nn.Module) -> tuple[int, ...]:
    return tuple(map(id, getattr(module, CHILDREN).values()))


def states_of_parameters(
    optimizers: Iterable[Optimizer], parameter_names: Mapping[int, str]
) -> list[tuple[Tensor, Entry]]:
    """Return the optimizers' tensors and numbers: (parameter, ("exp_avg of net.head.weight", tensor))."""
    entries: list[tuple[Tensor, Entry]] = []
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                owner = parameter_names.get(id(parameter)) or f"optimizer {index} group {group_index} [{number}]"
                for key, value in (optimizer.state.get(parameter) or {}).items():
                    is_one = isinstance(value, Tensor | bool | int | float)
                    for path, item in ((key, value),) if is_one else flatten(value, str(key)):
                        entries.append((parameter, (f"{path} of {owner}", item)))
    return entries
