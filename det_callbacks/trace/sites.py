"""The sites of a call: building new ones, and those whose digests wait for a device.

Sites whose digests a device computes: requested during the step, known at its end.

A tensor's memory must not change before the device has read it, so a caller calls ``before_writes``
or ``flush`` before anything writes. FSDP frees gathered memory without a call that we see: after a
collective has gathered anything, only new outputs of ops may wait.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from det_callbacks.digest.components import tensor_bits
from det_callbacks.digest.deferred import Bits, DeferredBits, DeferredDigests, value_of
from det_callbacks.digest.host import digest_memory
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.runs.program import Role, Site, plain_value, subject_of, to_compact_json
from det_callbacks.trace.call_graph import CallGraph, CallNode, is_number
from det_callbacks.trace.components import (
    PLAIN,
    LayoutSlot,
    address_of,
    has_parts,
    parts_with_memory,
)
from det_callbacks.trace.modules import source_of
from det_callbacks.trace.overloads import OpPlan
from det_callbacks.trace.places import Places
from det_callbacks.trace.source import is_of_torch


class SpecialName(NamedTuple):
    """Name of a site that is not a plain tensor: a generator's state, a digest of samples, a
    collective's output.
    """

    role: Role
    name: str | None
    key: tuple[Any, ...] = ()  # distinguishes calls whose sites have the same name


InputName = str | SpecialName | None


class ReadSites(Protocol):
    """What the current call reads, for its new node."""

    row_edges: list[tuple[int, ...]]  # the positions that each of its input sites reads

    def positions_read_by_output(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], num_outputs: int
    ) -> list[list[int]] | None:
        """Return the sites that each output of an op on lists of tensors reads,
        or None for other ops.
        """

    def sites(self, node: CallNode) -> Iterator[Site]:
        """Yield the input sites of the current call."""


def build_op(
    graph: CallGraph,
    places: Places,
    read: ReadSites,
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[Any],
    node: CallNode,
) -> None:
    """Fill in a new node for the call of an op."""
    scope = node.scope
    if node.phase != "optimizer":  # an optimizer's calls make no autograd nodes
        places.backward.note_stack(node)
    node.op_base, node.is_in_place, node.source = plan.base, bool(plan.writes), source_of_call(node)
    gradient_name = None if scope.name is None else f"grad of {scope.name}"
    output_names = [
        name or gradient_name for name in names_of_written(places, node.phase, plan, outputs)
    ]
    by_output = read.positions_read_by_output(plan, args, kwargs, len(outputs))
    argument_names = list(_names_of_arguments(plan, args, kwargs))
    numbers: list[int] = []
    constants: dict[str, Any] = {}
    for index, (argument, value) in enumerate(zip(argument_names, node.consts, strict=True)):
        if is_number(value):
            numbers.append(index)
        else:
            constants[argument] = value
    given = {*plan.argument_names[: len(args)], *kwargs}
    constants.update((name, value) for name, value in plan.defaults.items() if name not in given)
    node.number_indices = tuple(numbers)
    if plan.number_arguments:
        bases = [name.partition("[")[0] for name in argument_names]
        node.any_number_indices = tuple(
            index for index, base in enumerate(bases) if base in plan.number_arguments
        )
    graph.set_numbers(node, node.consts)
    varying = tuple([argument_names[index] for index in numbers])
    arguments = arguments_json(constants)
    read_by_call = sorted({at for at in node.read_positions if at is not None})
    common: dict[str, Any] = {
        "phase": node.phase,
        "module": node.module,
        "op": plan.name,
        "varying": varying,
        "recomputed": scope.recomputed,
        "source": node.source,
    }
    sites = list(read.sites(node))
    edges: list[Sequence[int]] = [*read.row_edges]
    if varying:
        sites.append(Site(role="argument", **common))
        edges.append(())
    for index, (output, name) in enumerate(zip(outputs, output_names, strict=True)):
        role: Role = "output" if isinstance(output, Tensor) else "value"
        subject = subject_of(name, phase=node.phase, role=role)
        sites.append(Site(output=index, role=role, arguments=arguments, **subject, **common))
        edges.append(read_by_call if by_output is None else sorted(set(by_output[index])))
    node.sites, node.edges = tuple(sites), edges


def names_of_written(
    places: Places, phase: str, plan: OpPlan, outputs: Sequence[Any]
) -> list[str | None]:
    """Return the known name of each output, or None."""
    if plan.is_functional:
        return [None] * len(outputs)
    # outside the backward pass, the name may be that of a gradient; inside it, a tensor may become
    # a gradient only after this op (autograd, DDP), so ``build_op`` takes the
    # name from ``OpScope.name``
    name_of = places.names.of if phase == "backward" else places.names.of_written
    return [
        name_of(one) if isinstance(one, Tensor) and not has_parts(one) else None for one in outputs
    ]


def source_of_call(node: CallNode) -> tuple[str, ...]:
    """Return the source lines of the call of an op.

    Where activation checkpointing repeats a module of torch, the stack holds no user code: return
    the lines of the op's first run, unless the module was called from several places.
    """
    source = source_of(node.scope)
    if not node.scope.recomputed or not is_of_torch(source):
        return source
    first_runs: set[tuple[str, ...]] = set()
    earlier = node.previous
    while earlier is not None:
        if (
            earlier.func is node.func
            and earlier.phase == "forward"
            and earlier.module == node.module
        ):
            first_runs.add(earlier.source)
        earlier = earlier.previous
    return first_runs.pop() if len(first_runs) == 1 else source


def _names_of_arguments(
    plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[str]:
    """Yield the names of the arguments that are not tensors, in the recorder's order."""
    for name, value in plan.inputs(args, kwargs):
        if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            yield from (
                f"{name}[{index}]"
                for index, item in enumerate(value)
                if not isinstance(item, Tensor)
            )
        elif not isinstance(value, Tensor):
            yield name


def arguments_json(arguments: Mapping[str, Any]) -> str:
    return to_compact_json({name: plain_value(value) for name, value in arguments.items()})


class DeferredSites(DeferredDigests):
    """The deferred sites of the current step; each has the digest 0 until ``settle``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_freed_unseen = False  # whether something unseen, such as FSDP, may free memory
        self._sees_writes = False
        self.bits: dict[int, Bits] = {}  # position of a site -> bits
        self._asked: list[tuple[Sequence[Bits], Callable[[list[int]], None]]] = []

    def see_writes(self, sees_writes: bool) -> None:
        """Set whether the recorder sees every op; while it does not,
        nothing may wait beyond the end of a group.
        """
        self.flush()
        self._sees_writes = sees_writes

    def end_group(self) -> None:
        """Record that the user's code may now write the recorded tensors."""
        if not self._sees_writes:
            self.flush()

    def end_read(self) -> None:
        """Record that the running op read or wrote a tensor that existed before."""
        if self.is_freed_unseen:
            self.flush()

    def digest(self, position: int, tensor: Tensor, slot: LayoutSlot) -> int:
        """Return the digest of a tensor, in memory order if it is dense;
        0 if the digest is deferred.
        """
        bits: Bits | None = None
        if slot.is_raw and tensor.__class__ in PLAIN and not tensor.is_neg():
            storage = tensor.untyped_storage()
            address = address_of(tensor)  # 0 for an efficient zero tensor, which has no memory
            first = tensor.storage_offset() * tensor.itemsize
            if address and storage.nbytes() >= first + slot.num_bytes:
                if tensor.is_cpu:
                    return digest_memory(address, slot.num_bytes)
                bits = self.add(storage, first, slot.num_bytes)
        return self.defer(
            position, tensor_bits(tensor, self, memory_order=True) if bits is None else bits
        )

    def defer(self, position: int, bits: Bits) -> int:
        """Return known bits; keep deferred ones for the site at ``position`` and return 0."""
        if not isinstance(bits, DeferredBits):
            return bits
        self.bits[position] = bits
        return 0

    def is_deferred(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on a device that computes digests."""
        return not tensor.is_cpu and self.computes_on(tensor.device)

    def tensor_bits(self, tensor: Tensor) -> Bits:
        """Return the digest of the current contents of a tensor, in row-major order."""
        bits = tensor_bits(tensor, self)
        self.end_group()
        return bits

    def digest_rows(self, tensor: Tensor) -> list[Bits]:
        """Return the digest of each row (dimension 0) of a tensor on a
        device that computes digests.
        """
        with unobserved(), torch.no_grad():
            rows = tensor.detach().resolve_conj().resolve_neg().contiguous()
            return [tensor_bits(row, self) for row in rows]

    def ask(self, parts: Sequence[Bits], then: Callable[[list[int]], None]) -> None:
        """Call a function with the digests once they are known; never if the step is abandoned."""
        self._asked.append((parts, then))

    def before_writes(self, tensors: Iterable[Tensor]) -> None:
        """Let the device read the waiting tensors first if any of them
        share memory with ``tensors``.
        """
        for tensor in tensors:
            for part in parts_with_memory(tensor):
                self.before_write(part.untyped_storage())

    def roll_back(self, mark: int) -> None:
        while self.bits and next(reversed(self.bits)) >= mark:
            self.bits.popitem()

    def settle(self, digests: "array[int]") -> frozenset[int]:
        """Wait for the devices, fill in the digests, and return the positions filled."""
        known = self.finish()
        for position, bits in self.bits.items():
            digests[position] = value_of(bits, known)
        for parts, then in self._asked:
            then([value_of(part, known) for part in parts])
        settled = frozenset(self.bits)
        self.bits.clear()
        self._asked.clear()
        return settled

    def begin(self) -> None:
        self.discard()
        self._sees_writes = False

    def discard(self) -> None:
        super().discard()
        self.bits.clear()
        self._asked.clear()
