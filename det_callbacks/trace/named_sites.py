"""Sites of named tensors: state, batch, loss, gradients, outputs of modules."""

import struct
from collections.abc import Collection, Iterable, Sequence
from ctypes import string_at
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from det_callbacks.digest.components import tensor_bits
from det_callbacks.digest.deferred import Bits, derived
from det_callbacks.digest.host import digest_bytes, digest_rows, digest_spans
from det_callbacks.digest.unobserved import hidden
from det_callbacks.internals.torch import is_batched, storage_address, without_dispatch
from det_callbacks.runs.program import (
    IN_FLIGHT,
    UNREAD,
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
    holds_data,
    unwrapped,
)
from det_callbacks.trace.deferred_sites import DeferredSites
from det_callbacks.trace.generators import GeneratorTrail, process_generators
from det_callbacks.trace.leaves import Entry, is_constant, leaves
from det_callbacks.trace.places import Addresses, Places, addresses_of, has_address
from det_callbacks.trace.sites import SpecialName
from det_callbacks.trace.step import Step
from det_callbacks.trace.storages import PartialWrites

MAX_SAMPLES = 1024  # samples of larger batches are not digested individually
MAX_SKETCHED = 8  # digests in a sketch; ``compare.evidence`` searches fewer of them

_DTYPES_OF_ARRAYS = frozenset(
    [
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    ]
)
_WORD_SIZES = (1, 2, 4, 8)  # bytes


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


class ModuleOutputs:
    """Records outputs of selected modules, and their gradients.

    Full backward hooks break in-place activations, so it uses hooks of tensors.
    """

    def __init__(self, named: NamedSites, places: Places, lock: RLock) -> None:
        self._named, self._places, self._lock = named, places, lock
        self._open_token: object = None  # hooks that outlive their step hold another

    def open(self) -> None:
        self._open_token = object()
        self._places.modules.on_output = self._record

    def close(self) -> None:
        self._open_token = None
        self._places.modules.on_output = None

    @hidden
    def _record(self, module: str, output: Any) -> None:
        places = self._places
        phase, scope = places.phase, scope_in(module, recomputed=False)
        is_recorded = places.selects(phase, scope)
        is_followed = places.selects("backward", scope) and torch.is_grad_enabled()
        if not (is_recorded or is_followed):
            return
        entries = (
            (("output", output),)
            if isinstance(output, Tensor)
            else self._named.readable(output, "output")
        )
        for name, tensor in entries:
            if not isinstance(tensor, Tensor):
                continue
            inner = unwrapped(tensor)
            if is_recorded:
                with self._lock:
                    self._named.record_output(phase, module, name, inner)
            if is_followed and inner is tensor and tensor.requires_grad and not has_parts(tensor):
                node = tensor.grad_fn
                number = None if node is None else tensor.output_nr
                receive = partial(
                    self._record_gradient, self._open_token, module, f"grad of {name}", number
                )
                # a hook of the tensor would be among those that the
                # program sees; a leaf has no node
                (tensor.register_hook if node is None else node.register_prehook)(receive)

    @hidden
    def _record_gradient(
        self, token: object, module: str, name: str, number: int | None, gradients: Any
    ) -> None:
        """Record what the hook of a tensor (``number`` is None) or of a node gets."""
        gradient: Tensor | None = gradients if number is None else gradients[number]
        # None is a zero gradient that autograd did not materialise
        if (
            gradient is not None
            and token is self._open_token
            and not self._places.elsewhere.is_running()
        ):
            with self._lock:
                self._named.record_output("backward", module, name, unwrapped(gradient))


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a batch tensor (dimension 0), independent of their order.

    The sketch, the 8 smallest digests of samples, identifies batches of the same data in a
    different order (bottom-k, Cohen and Kaplan 2007). Samples of 8 bytes or less
    have none, since they repeat.
    """

    digest: int
    sketch: tuple[int, ...]
    num_bytes: int  # of one sample


def record_batch(
    step: Step, named: NamedSites, batch: Any, samples: list[Samples], name_of_batch: str = "batch"
) -> None:
    """Record the tensors of a batch (phase data), each of 2 to 1,024 samples with an
    order-independent digest of these.

    Opaque objects are recorded by their type. Appends to ``samples`` those of each tensor; of a
    tensor on a device only when the step is settled, and never if they have 1, 2, 4 or 8 bytes,
    since they have no sketch.
    """
    entries: list[Entry | DerivedEntry] = []
    unread: dict[str, str] = {}
    for name, leaf in leaves(batch, name_of_batch, is_whole=True):
        value = tensor_of_array(leaf) if type(leaf) is np.ndarray else leaf
        if issubclass(type(value), Tensor | int | float):
            entries.append((name, value))
            if _has_samples(value):
                bits = _digest_samples(step.deferred, value, samples)
                if value.shape[0] > 1:
                    entries.append((SpecialName("samples", name), Derived(bits, step.layouts.none)))
        elif not is_constant(value):
            unread.setdefault(f"{type(value).__module__}.{type(value).__qualname__}", name)
    for kind, name in unread.items():
        entries.append((name, Derived(0, step.layouts.special(kind, (), UNREAD))))
        step.counts.opaque.add(f"{name} ({kind})")
    named.record_group("batch", "data", entries, owner="", is_writer=True)


def tensor_of_array(array: np.ndarray) -> Any:
    """Return the tensor that shares the memory of a NumPy array, or a copy;
    the array if torch lacks its dtype.
    """
    if array.dtype.name not in _DTYPES_OF_ARRAYS or not array.dtype.isnative:
        return array
    # as torch needs them
    are_whole = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    is_shared = array.flags.writeable and are_whole
    return torch.from_numpy(array if is_shared else array.copy())


def _has_samples(value: Any) -> TypeGuard[Tensor]:
    """Return whether the rows of a tensor are digested one by one."""
    if (
        not isinstance(value, Tensor)
        or has_parts(value)
        or not holds_data(value)
        or value.is_quantized
    ):
        return False
    # nested tensors of the older layout have no sizes
    return (
        not value.is_nested
        and value.numel() > 0
        and value.dim() > 0
        and value.shape[0] <= MAX_SAMPLES
    )


def _digest_samples(deferred: DeferredSites, tensor: Tensor, samples: list[Samples]) -> Bits:
    """Return the digest of a tensor's samples, and append them to ``samples`` as ``record_batch``
    does.
    """
    if not deferred.is_deferred(tensor):
        samples.append(samples_of(tensor))
        return samples[-1].digest
    size = tensor.numel() // tensor.shape[0] * tensor.itemsize
    if size in _WORD_SIZES:
        copy = deferred.fetch(tensor)
        return derived((), lambda _: samples_of(copy).digest)
    rows = deferred.digest_rows(tensor)
    deferred.when_known(rows, lambda digests: samples.append(_of_digests(digests, size)))
    return derived(rows, lambda digests: _of_digests(digests, size).digest)


def samples_of(tensor: Tensor) -> Samples:
    """Return the samples of a strided tensor.

    The digest covers the sorted digests of the samples, or the sorted samples if
    they have 1, 2, 4 or 8 bytes.
    """
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        with without_dispatch(), torch.no_grad():
            tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    num_samples, address = tensor.shape[0], tensor.data_ptr()
    size = tensor.numel() // num_samples * tensor.itemsize
    if size not in _WORD_SIZES:
        return _of_digests(digest_rows(address, num_samples, size), size)
    words = np.sort(np.frombuffer(string_at(address, num_samples * size), dtype=f"<u{size}"))
    return Samples(digest_bytes(words.tobytes()), (), size)


def _of_digests(digests: Sequence[int], size: int) -> Samples:
    digests = sorted(digests)
    sketch = tuple(digests[:MAX_SKETCHED]) if size > max(_WORD_SIZES) else ()
    return Samples(digest_bytes(struct.pack(f"<{len(digests)}Q", *digests)), sketch, size)
