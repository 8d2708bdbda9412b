"""Tensors that have names: which one an op reads or writes, and the sites of those that no op makes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_callbacks.digest.components import tensor_bits
from det_callbacks.digest.device.deferred import Bits
from det_callbacks.host_digest import digest_spans
from det_callbacks.internals.torch import pin_storage, storage_address, unpin_storage
from det_callbacks.runs.program import AFTER_STEP, IN_FLIGHT, Role, Site, scalar_bits
from det_callbacks.trace.backward import scope_in
from det_callbacks.trace.components import PLAIN, STRIDED, address_of, has_parts, holds_data, parts_of, unwrapped
from det_callbacks.trace.generators import process_generators
from det_callbacks.trace.layouts import LayoutSlot
from det_callbacks.trace.leaves import flatten
from det_callbacks.trace.program_trie import CallNode
from det_callbacks.trace.sites import owner_of
from det_callbacks.trace.storages import PartialWrites

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder


Place = tuple[int, int]
"""Address of a tensor's storage, and of its first element."""

Entry = tuple[str, Tensor | int | float | bool]


class NameTable:
    """Place of a parameter, a buffer or a state of an optimizer -> its qualified name.

    Names are those at the step's beginning (and of an optimizer's state when it is first seen), so that a resumed run
    gives the same ones as one that was never interrupted. Every storage in the table is pinned by a weak reference, so
    that neither part of a place can come to mean another tensor.
    """

    def __init__(self) -> None:
        self.list_state: Callable[[], Iterable[tuple[str, object]]] = tuple
        self.list_parameters: Callable[[torch.Size], Iterable[tuple[str, Tensor]]] = lambda shape: ()
        self.known: dict[Place, str] = {}  # public because the reads of a step use it once per tensor
        self._pins: list[int] = []
        self._begins: dict[int, list[int]] = {}  # storage -> where its named tensors lie

    def refresh(self) -> None:
        """List the named tensors as they are now; 1 microsecond each."""
        entries = [(name, value) for name, value in self.list_state() if has_place(value)]
        self.keep({place_of(value): name for name, value in reversed(entries)}, entries)

    def keep(self, names: dict[Place, str], entries: Iterable[tuple[str, object]]) -> None:
        """Replace the table; the tensors at these places are among ``entries``."""
        if names != self.known:
            self.close()
            self.known = names
            for storage, address in names:
                self._begins.setdefault(storage, []).append(address)
            # declared as storages, and are addresses
            self._pins = [pin_storage(next(parts_of(one)).untyped_storage()) for _, one in entries if has_place(one)]

    def of(self, tensor: Tensor) -> str | None:
        """Return the name of an ordinary strided tensor, None when it has none."""
        return self.known.get(place_of(tensor))

    def offset_in(self, tensor: Tensor) -> int:
        """Return the element that a tensor begins with, of the named tensor that it is a part of, or of its storage.

        Where a named tensor lies in its storage is no matter of the step: a checkpoint brings back its values only.
        """
        address = address_of(tensor)
        begins = self._begins.get(storage_address(tensor.untyped_storage()), ())
        begin = max((one for one in begins if one <= address), default=None)
        return int(tensor.storage_offset()) if begin is None else (address - begin) // tensor.itemsize

    def of_written(self, tensor: Tensor) -> str | None:
        """Return the name of an ordinary strided tensor that an op has written, which may be a gradient."""
        if (known := self.of(tensor)) is not None or not (address := address_of(tensor)):
            return known
        for name, parameter in self.list_parameters(tensor.shape):
            gradient = parameter.grad
            if gradient.__class__ is Tensor and gradient.layout is STRIDED and address_of(gradient) == address:
                return f"grad of {name}"
        return None

    def close(self) -> None:
        """Forget everything and let the storages' addresses go."""
        self.known, self._begins = {}, {}
        pins, self._pins = self._pins, []  # each is let go once, also where Ctrl-C ends this and it is called again
        for pin in pins:
            unpin_storage(pin)

    def __del__(self) -> None:
        self.close()


def has_place(value: object) -> TypeGuard[Tensor]:
    """Return whether a value has its elements in one strided tensor in memory: itself, or its shard of a DTensor."""
    if not isinstance(value, Tensor) or not holds_data(value):
        return False
    parts = parts_of(value) if has_parts(value) else (value,)
    return [part.numel() > 0 and not has_parts(part) for part in parts] == [True]


def place_of(tensor: Tensor) -> Place:
    """Return where an ordinary strided tensor, or the shard of a DTensor, lies."""
    part = next(parts_of(tensor)) if has_parts(tensor) else tensor
    return storage_address(part.untyped_storage()), address_of(part)


def record_generators(recorder: "Recorder", *, is_end: bool = False) -> None:
    """Record the states of the generators of the process as the step begins or ends (phase rng)."""
    trail, first = recorder.generators, recorder.num_sites
    names: list[str] = []
    reads: list[list[int]] = []
    for number, (name, generator) in enumerate(process_generators(trail.homes)):
        names.append(name + AFTER_STEP if is_end else name)
        reads.append([*trail.read(name, first + number)])
        recorder.digests.append(trail.reader.read(name, generator))
    recorder.layout_indices.extend([recorder.layouts.none.index] * len(names))
    _step_to(recorder, "generators", "rng", "", reads, names, "generator")


def record_group(
    recorder: "Recorder",
    label: str,
    phase: str,
    entries: Sequence[Entry],
    *,
    owner: str | None = None,
    is_source: bool = False,
) -> dict[Place, str]:
    """Record named tensors and numbers as sites, in row-major order; return where ordinary strided tensors lie.

    ``label`` tells groups at the same place apart. Their module is ``owner``, or follows from each name ("net.head" for
    "net.head.weight"). Where it ``is_source``, ops that read these tensors later in the step read these sites. Left out
    are tensors without data (meta, fake, uninitialised), and what a CUDA graph that is being captured will hold.
    """
    if recorder.undigested.is_captured():
        return {}
    names: list[str] = []
    reads: list[list[int]] = []
    indices: list[int] = []
    spans: list[tuple[int, int]] = []  # of memory of the host, which is digested at once
    others: list[tuple[int, Any]] = []
    sources: list[Any] = []
    places: dict[Place, str] = {}
    value: Any  # told apart by class, which is sooner done than by isinstance
    layouts, writers = recorder.layouts, recorder.ledger.writers
    for name, value in entries:
        edges: list[int] = []
        is_plain = value.__class__ in PLAIN and value.layout is STRIDED and value.is_cpu and not value.is_nested
        storage = value.untyped_storage() if is_plain else None
        known: Any = writers.get(storage_address(storage)) if storage is not None else None
        if storage is not None and known.__class__ is not PartialWrites:
            edges = [] if known is None else [known]
            slot = layouts.slots.get((value.dtype, value.shape, value.stride())) or layouts.of(value)
            address = address_of(value)
            if slot.num_bytes:
                places.setdefault((storage_address(storage), address), name)
            if slot.is_row_major and address and not value.is_neg() and storage.nbytes() >= slot.num_bytes:
                spans.append((address, slot.num_bytes))
            else:
                others.append((len(names), value))
        elif not isinstance(value, Tensor):
            slot = layouts.special(scalar_bits(value)[1])
            others.append((len(names), value))
        elif not holds_data(value):
            continue
        elif recorder.undigested.collectives.arrive(value):
            edges, slot = recorder.writers_of(value), layouts.of(value)
            others.append((len(names), value))
            if has_place(value):
                places.setdefault(place_of(value), name)
        else:
            edges, slot = recorder.writers_of(value), layouts.without_bits(value, IN_FLIGHT)
            others.append((len(names), 0))
        names.append(name)
        reads.append(edges)
        indices.append(slot.index)
        if is_source:
            sources.append(value)
    if not names:
        return places
    _step_to(recorder, label, phase, owner, reads, names)
    first = recorder.num_sites
    digests = digest_spans(spans)
    for index, value in others:
        bits = tensor_bits(value, recorder.deferred) if isinstance(value, Tensor) else scalar_bits(value)[0]
        digests.insert(index, recorder.deferred.defer(first + index, bits))
    recorder.digests.extend(digests)
    recorder.layout_indices.extend(indices)
    for position, value in enumerate(sources, start=first):
        if isinstance(value, Tensor) and not has_parts(value) and value.numel():
            recorder.ledger.write(value, position)
    recorder.deferred.end_group()
    return places


def record_bits(
    recorder: "Recorder", label: str, phase: str, name: str, bits: Bits, *, role: Role, slot: LayoutSlot | None = None
) -> None:
    """Record 64 bits that are no tensor's."""
    _step_to(recorder, label, phase, "", [[]], [name], role)
    recorder.append_bits(recorder.deferred.defer(recorder.num_sites, bits), slot or recorder.layouts.none)


def _step_to(
    recorder: "Recorder",
    label: str,
    phase: str,
    owner: str | None,
    reads: list[list[int]],
    names: Sequence[str],
    role: Role = "named",
) -> None:
    def build(node: CallNode) -> None:
        parameters = recorder.parameter_names.values()
        modules = [owner_of(name, parameters) if owner is None else owner for name in names]
        node.rows = tuple(
            Site(phase=phase, module=module, role=role, name=name, inputs=tuple(sorted(set(edges))))
            for module, name, edges in zip(modules, names, reads, strict=True)
        )

    recorder.trie.step_to((label, phase, scope_in(owner or "", recomputed=False), [], reads, names, len(names)), build)


class ModuleOutputs:
    """Records what selected modules return, and the gradients of it: full backward hooks break in-place activations."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._step: object = None

    def open(self) -> None:
        """Listen from here on."""
        self._step = object()
        self._recorder.modules.on_output = self._record

    def close(self) -> None:
        """Stop listening; gradients of graphs that outlive the step are not recorded."""
        self._step = None
        self._recorder.modules.on_output = None

    def _record(self, module: str, output: Any) -> None:
        recorder = self._recorder
        phase = recorder.phase
        if not recorder.selects(phase, scope_in(module, recomputed=False)):
            return
        is_followed = "backward" in recorder.selection.phases and torch.is_grad_enabled()
        entries = (("output", output),) if isinstance(output, Tensor) else flatten(output, "output")
        for name, tensor in entries:
            if not isinstance(tensor, Tensor):
                continue
            inner = unwrapped(tensor)
            self._record_output(phase, module, name, inner)
            if is_followed and inner is tensor and tensor.requires_grad and not has_parts(tensor):
                tensor.register_hook(partial(self._record_gradient, self._step, module, f"grad of {name}"))

    def _record_output(self, phase: str, module: str, name: str, tensor: Tensor) -> None:
        """Record an output of a module, or the gradient of one, in memory order like the outputs of ops."""
        recorder = self._recorder
        if not holds_data(tensor) or recorder.undigested.is_captured():
            return
        if not recorder.undigested.collectives.arrive(tensor):
            recorder.counts.skipped["in_flight"] += 1
        else:
            reads = recorder.writers_of(tensor)
            _step_to(recorder, "output", phase, module, [reads], [name])
            recorder.append_output(tensor, reads)
            recorder.deferred.end_group()

    def _record_gradient(self, step: object, module: str, name: str, gradient: Tensor | None) -> None:
        # undefined: autograd runs the hooks of a node with zeros that it does not make
        if gradient is not None and step is self._step:
            with self._recorder.lock:
                self._record_output("backward", module, name, gradient)


class StateWalker:
    """Lists the parameters and buffers of a module by qualified name, shared ones once.

    ``nn.Module.named_parameters`` builds every name at every call; here only when a module got or lost a child.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules: list[tuple[str, nn.Module, tuple[int, ...]]] = []

    def walk(self, *kinds: str) -> list[tuple[str, Tensor]]:
        """Return (name, tensor) of what modules have in these attributes, "_parameters" and "_buffers", in turn."""
        if not self._modules or any(
            children != tuple(map(id, module._modules.values())) for _, module, children in self._modules
        ):
            self._modules = [
                (f"{name}." if name else "", module, tuple(map(id, module._modules.values())))
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
