"""Sites that are no ops: losses, gradients, parameters, buffers, optimizer state and generators."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_callbacks.digest import Bits, digest_spans
from det_callbacks.rng import PROCESS, digest_generator, is_readable, used_generators
from det_callbacks.runs.program import Role, Site
from det_callbacks.runs.values import scalar_bits
from det_callbacks.trace.appending import append_output
from det_callbacks.trace.building import owner_of
from det_callbacks.trace.components import has_parts, holds_data, parts_of
from det_callbacks.trace.generators import GeneratorName
from det_callbacks.trace.layouts import LayoutSlot
from det_callbacks.trace.leaves import flatten
from det_callbacks.trace.names import Place, address_of, has_place, place_of
from det_callbacks.trace.recorder import Recorder
from det_callbacks.trace.tree import Event

_PLAIN = frozenset({Tensor, nn.Parameter})
_STRIDED = torch.strided

Entry = tuple[str, Tensor | int | float | bool]


def record_generators(recorder: Recorder) -> None:
    """Record the states of the generators of Python, NumPy and torch (phase rng), those of devices among them.

    While a graph is captured those of devices are left out: nothing can read them.
    """
    for text, generator in (*PROCESS.items(), *used_generators(recorder.generators.homes)):
        if is_readable(generator):
            name = GeneratorName(text)
            recorder.generators.read(name, recorder.num_sites)
            record_bits(recorder, "generator", "rng", name, digest_generator(generator), role="generator")


def record_group(
    recorder: Recorder,
    label: str,
    phase: str,
    entries: Sequence[Entry],
    *,
    owner: str | None = None,
    is_source: bool = False,
) -> dict[Place, str]:
    """Record named tensors and numbers as sites, in row-major order of their elements.

    Tensors without data (meta, fake, uninitialised) are left out, and so is what a CUDA graph that is being captured
    will hold. Costs 2 microseconds a tensor besides the digest.

    Args:
        recorder: whose step it is.
        label: what kind of group it is; tells groups at the same place apart.
        phase: of the sites.
        entries: (name, tensor or number).
        owner: module of all of them; None takes it from the name ("net.head" for "net.head.weight").
        is_source: ops that read these tensors later in the step read these sites.

    Returns:
        Where the ordinary strided tensors lie, with their names.
    """
    if recorder.passing.is_captured():
        return {}
    names: list[str | None] = []
    reads: list[list[int]] = []
    slots: list[LayoutSlot] = []
    spans: list[tuple[int, int]] = []
    others: list[tuple[int, Any]] = []
    places: dict[Place, str] = {}
    layouts = recorder.layouts
    writers = recorder.ledger.writers
    for name, value in entries:
        if value.__class__ in _PLAIN and value.layout is _STRIDED and value.is_cpu and not value.is_nested:
            storage = value.untyped_storage()
            storage_address = storage._cdata
            writer = writers.get(storage_address)
            if writer.__class__ is int:
                reads.append([writer])
            elif writer is None:
                reads.append([])
            else:
                has_arrived = recorder.passing.collectives.arrive(value)
                reads.append(recorder.ledger.writers_of(value))
                if not has_arrived:
                    others.append((len(names), 0))
                    names.append(name)
                    slots.append(recorder.passing.collectives.slot_in_flight(value))
                    continue
            slot = layouts.slots.get((value.dtype, value.shape, value.stride())) or layouts.of(value)
            address = address_of(value)
            if slot.num_bytes:
                places.setdefault((storage_address, address), name)
            if slot.is_row_major and address and not value.is_neg() and storage.nbytes() >= slot.num_bytes:
                spans.append((address, slot.num_bytes))
            else:
                others.append((len(names), value))
        elif isinstance(value, Tensor):
            if not holds_data(value):
                continue
            has_arrived = recorder.passing.collectives.arrive(value)
            reads.append(_writers_of(recorder, value))
            if not has_arrived:
                others.append((len(names), 0))
                names.append(name)
                slots.append(recorder.passing.collectives.slot_in_flight(value))
                continue
            slot = layouts.of(value)
            if has_place(value):
                places.setdefault(place_of(value), name)
            others.append((len(names), value))
        else:
            reads.append([])
            slot = layouts.special(scalar_bits(value)[1])
            others.append((len(names), value))
        names.append(name)
        slots.append(slot)
    if not names:
        return places
    _enter(recorder, label, phase, owner, reads, names)
    first = recorder.num_sites
    digests = digest_spans(spans)
    for index, value in others:
        bits = recorder.late.digest_row_major(first + index, value) if isinstance(value, Tensor) else None
        digests.insert(index, scalar_bits(value)[0] if bits is None else bits)
    recorder.digests.extend(digests)
    recorder.layout_indices.extend([slot.index for slot in slots])
    if is_source:
        held = (value for _, value in entries if not isinstance(value, Tensor) or holds_data(value))
        for position, value in enumerate(held, start=first):
            if isinstance(value, Tensor) and not has_parts(value) and value.numel():
                recorder.ledger.write(value, position)
    recorder.late.end_group()
    return places


def record_output(recorder: Recorder, phase: str, module: str, name: str, tensor: Tensor) -> None:
    """Record an output of a module, or the gradient of one.

    It is digested in memory order like the outputs of ops, and not a second time where one recorded op wrote the whole
    of it.
    """
    if not holds_data(tensor) or recorder.passing.is_captured():
        return
    if not recorder.passing.collectives.arrive(tensor):
        recorder.passing.skipped["in_flight"] += 1
    else:
        reads = _writers_of(recorder, tensor)
        _enter(recorder, "output", phase, module, [reads], [name])
        append_output(recorder, tensor, reads)
        recorder.late.end_group()


def record_bits(
    recorder: Recorder, label: str, phase: str, name: str, bits: Bits, *, role: Role, slot: LayoutSlot | None = None
) -> None:
    """Record 64 bits that are no tensor's, such as the digest of a generator."""
    _enter(recorder, label, phase, "", [], [name], role)
    recorder.append_bits(recorder.late.later(recorder.num_sites, bits), slot or recorder.layouts.none)


def _enter(
    recorder: Recorder,
    label: str,
    phase: str,
    owner: str | None,
    reads: list[list[int]],
    names: list[str | None],
    role: Role = "named",
) -> None:
    """Go to the event of a group: the likely one, a sibling, or a new one."""
    event = recorder.at.likely
    group: tuple[Any, ...] = (label, phase, owner or "", [], reads, names, len(names))
    if event is None or not event.fits(*group):
        siblings = recorder.at.children
        event = next((child for child in siblings if child.fits(*group)), None)
        if event is None:
            event = _new_group(recorder, label, phase, reads, names, owner, role)
        recorder.at.likely = event
    recorder.at = event


def _new_group(
    recorder: Recorder,
    label: str,
    phase: str,
    reads: list[list[int]],
    names: list[str | None],
    owner: str | None,
    role: Role,
) -> Event:
    event = Event(recorder.at, label, phase, owner or "", [], reads, names, len(names))
    event.rows = tuple(
        Site(
            phase=phase,
            module=owner_of(str(name)) if owner is None else owner,
            op="",
            occurrence=0,
            output=0,
            role=role,
            name=str(name),
            inputs=tuple(sorted(set(edges))),
        )
        for name, edges in zip(names, reads or [[]], strict=True)
    )
    recorder.tree.add(event)
    return event


def _writers_of(recorder: Recorder, value: object) -> list[int]:
    """Return the sites of this step that wrote a tensor's bytes."""
    if not isinstance(value, Tensor):
        return []
    if not has_parts(value):
        return recorder.ledger.writers_of(value)
    return sorted({writer for part in parts_of(value) for writer in recorder.ledger.writers_of(part)})


class StateWalker:
    """Lists the parameters and buffers of a module by qualified name, shared ones once.

    ``nn.Module.named_parameters`` builds every name at every call; here modules are walked once, and again when one
    of them got or lost a child.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules: list[tuple[str, nn.Module, tuple[int, ...]]] = []

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Return (name, parameter); 0.3 microseconds a module and parameter."""
        self._refresh()
        return self._walk("_parameters")

    def state(self) -> list[Entry]:
        """Return (name, tensor): parameters first, then buffers; 0.3 microseconds a module and tensor."""
        self._refresh()
        return [*self._walk("_parameters"), *self._walk("_buffers")]

    def _refresh(self) -> None:
        if not self._modules or any(
            children != tuple(map(id, module._modules.values())) for _, module, children in self._modules
        ):
            self._modules = [
                (f"{name}." if name else "", module, tuple(map(id, module._modules.values())))
                for name, module in self._root.named_modules()
            ]

    def _walk(self, kind: str) -> list[tuple[str, Tensor]]:
        known = set()
        entries: list[tuple[str, Tensor]] = []
        for prefix, module, _ in self._modules:
            for name, value in getattr(module, kind).items():
                if value is not None and id(value) not in known:
                    known.add(id(value))
                    entries.append((prefix + name, value))
        return entries


def optimizer_state(optimizers: Iterable[Optimizer], parameter_names: Mapping[int, str]) -> list[Entry]:
    """Return the tensors and numbers of the optimizers' states: ("exp_avg of net.head.weight", tensor)."""
    return [entry for _, entry in states_of_parameters(optimizers, parameter_names)]


def states_of_parameters(
    optimizers: Iterable[Optimizer], parameter_names: Mapping[int, str]
) -> list[tuple[Tensor, Entry]]:
    """Return what ``optimizer_state`` does, each with the parameter that it belongs to."""
    entries: list[tuple[Tensor, Entry]] = []
    for index, optimizer in enumerate(optimizers):
        known = optimizer.state
        for group_index, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                state = known.get(parameter)
                if not state:
                    continue
                owner = parameter_names.get(id(parameter)) or f"optimizer {index} group {group_index} [{number}]"
                for key, value in state.items():
                    if isinstance(value, Tensor | bool | int | float):
                        entries.append((parameter, (f"{key} of {owner}", value)))
                    elif value is not None:
                        entries.extend(
                            (parameter, (f"{path} of {owner}", item))
                            for path, item in flatten(value, str(key))
                            if path != key
                        )
    return entries


def gradients(parameters: Iterable[nn.Parameter], parameter_names: Mapping[int, str]) -> list[Entry]:
    """Return the gradients that are there: ("grad of net.head.weight", tensor)."""
    return [
        (f"grad of {parameter_names.get(id(parameter)) or f'parameter {number}'}", parameter.grad)
        for number, parameter in enumerate(parameters)
        if parameter.grad is not None
    ]
