"""What a call reads: the sites that wrote its inputs, and an input site for each
input that no site wrote.
"""

from collections.abc import Iterator
from typing import Any

import torch
from msgspec.structs import replace
from torch import Generator, Tensor

from det_callbacks.digest.host import digest_memory
from det_callbacks.internals.torch import AsyncCollectiveTensor, storage_address
from det_callbacks.runs.program import IN_FLIGHT, UNWRITTEN, Site, is_passed, subject_of
from det_callbacks.settings.generators import digest_generator
from det_callbacks.trace.call_graph import CallNode
from det_callbacks.trace.components import address_of, has_parts, parts_of
from det_callbacks.trace.generators import GeneratorTrail, generator_of
from det_callbacks.trace.overloads import OpPlan, tensors_read
from det_callbacks.trace.places import Places
from det_callbacks.trace.sites import InputName, SpecialName
from det_callbacks.trace.step import Step
from det_callbacks.trace.storages import region_of

_ELEMENTWISE = ("aten._foreach_", "aten._fused_")


class Reads:
    """Collects what a call reads; the recorder handles the common case itself.

    It extends ``reads`` by the positions of sites, and ``names`` by the names of the input sites
    that it appends.
    """

    # ``Collectives``, which imports this module; the recorder sets it before the first step
    collectives: Any

    def __init__(self, step: Step, places: Places, generators: GeneratorTrail) -> None:
        self._step, self._places, self._generators = step, places, generators
        # edges of each input site added for the current call
        self.row_edges: list[tuple[int, ...]] = []
        # tensors that the current call reads, and that this step allocated and did not fill
        self.unwritten: list[Tensor] = []

    def begin(self) -> None:
        """Start a step; an exception may have ended the last one in the middle of a call."""
        self.row_edges.clear()
        self.unwritten.clear()

    def read(self, tensor: Tensor, reads: list[int], names: list[InputName]) -> None:
        """Collect the sites that wrote a tensor; make an input site for it if
        no recorded site did.
        """
        step = self._step
        if has_parts(tensor):
            if isinstance(tensor, AsyncCollectiveTensor):
                self.collectives.wait(tensor)
            parts = list(parts_of(tensor))
            if not parts:
                if step.holds_data(tensor):  # no storage (mkldnn), so its writer is unknown
                    names.append(None)
                    self.row_edges.append(())
                    reads.append(len(step.digests))
                    step.append(tensor)
                return
            if parts[0] is not tensor:
                for part in parts:
                    self.read(part, reads, names)
                return
        writer = step.ledger.writers.get(storage_address(tensor.untyped_storage()))
        if isinstance(writer, int):
            reads.append(writer)
            return
        if tensor.numel() == 0 or tensor.is_meta:
            return
        edges: tuple[int, ...] = ()
        if writer is not None:
            region = region_of(tensor)
            edges = tuple(writer.writers(region))
            reads.extend(edges)
            if writer.covers(region):
                if writer.is_empty and not writer.is_filled(region):
                    self.unwritten.append(tensor)
                return
            delivered = writer.deliveries(region)
            if delivered:
                self.collectives.read(tensor, delivered, edges, reads, names)
                return
        self._append_input(tensor, edges, reads, names)

    def _append_input(
        self, tensor: Tensor, edges: tuple[int, ...], reads: list[int], names: list[InputName]
    ) -> None:
        """Append an input site for a tensor of which recorded sites (``edges``) wrote a part, or
        nothing.
        """
        step, places = self._step, self._places
        ledger, storage = step.ledger, tensor.untyped_storage()
        if places.elsewhere.nodes:
            places.elsewhere.note_read(tensor)
        position = len(step.digests)
        name = places.names.of(tensor)
        names.append(SpecialName("graph_output", name) if ledger.is_invalidated else name)
        self.row_edges.append(edges)
        reads.append(position)
        # a device may still be copying into it, and the recorder cannot see whether the host waited
        if storage_address(storage) in ledger.in_flight:
            step.append_bits(0, step.layouts.without_bits(tensor, IN_FLIGHT))
            return
        is_ordinary = not has_parts(tensor) and not tensor.is_nested
        offset = 0
        if is_ordinary and tensor.storage_offset() and places.now()[0] == "forward":
            offset = places.names.offset_in(tensor)
        slot = step.append(tensor, step.layouts.of(tensor, offset))
        is_whole = slot.is_dense and slot.num_bytes == storage.nbytes()
        if is_whole and storage_address(storage) not in ledger.writers:
            ledger.writers[ledger.pin(tensor)] = position
        else:
            ledger.write(tensor, position)

    def read_first(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        reads: list[int],
        names: list[InputName],
    ) -> None:
        """Do what ``read`` does, faster, for a strided tensor whose storage this
        step has not written or read.
        """
        step = self._step
        ledger = step.ledger
        is_plain = tensor.is_cpu and not tensor.is_neg() and not tensor.is_nested
        if is_plain and not ledger.is_invalidated and not self._places.elsewhere.nodes:
            slot = step.layouts.slots.get((tensor.dtype, tensor.shape, tensor.stride()))
            address = address_of(tensor)  # 0 for an efficient zero tensor, which has no memory
            if slot is not None and slot.is_raw and slot.num_bytes == storage.nbytes() and address:
                pin = ledger.pin(tensor)
                reads.append(len(step.digests))
                ledger.writers[pin] = len(step.digests)
                names.append(self._places.names.known.get((pin, address)))
                self.row_edges.append(())
                step.append_bits(digest_memory(address, slot.num_bytes), slot)
                return
        self.read(tensor, reads, names)

    def gather(
        self, value: Any, consts: list[Any], reads: list[int], names: list[InputName]
    ) -> None:
        """Collect the reads, and the constants, of one argument of any kind."""
        if isinstance(value, Tensor):
            self.read(value, reads, names)
        elif isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            for item in value:
                if isinstance(item, Tensor):
                    self.read(item, reads, names)
                else:
                    consts.append(item)
        else:
            consts.append(None if value.__class__ is Generator else value)

    def read_generator(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: list[int],
        names: list[InputName],
    ) -> None:
        """Append an input site for the state of the generator that an op draws from."""
        step = self._step
        name, generator = generator_of(args, kwargs, self._generators.homes)
        position = len(step.digests)
        names.append(SpecialName("generator", name))
        passed = generator if is_passed(name) else None
        self.row_edges.append(self._generators.read(name, position, passed))
        step.append_bits(digest_generator(generator), step.layouts.none)
        reads.append(position)

    def note_draw(self, position: int) -> None:
        """Note that the op at a position advanced the generator that was last read."""
        self._generators.note_draw(position)

    def read_unwritten(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: list[int],
        names: list[InputName],
    ) -> None:
        """Add a site without bits for each tensor that a call reads and that
        no recorded op has filled.

        Arguments that the call only writes, or ignores, get none: they may be uninitialised.
        """
        unwritten, self.unwritten = self.unwritten, []
        step = self._step
        ids_read = {id(tensor) for tensor in tensors_read(plan, args, kwargs)}
        for tensor in unwritten:
            if id(tensor) in ids_read:
                position = len(step.digests)
                names.append(self._places.names.of(tensor))
                self.row_edges.append(tuple(step.ledger.writers_of(tensor)))
                reads.append(position)
                step.append_bits(0, step.layouts.without_bits(tensor, UNWRITTEN))
                step.ledger.write(tensor, position)

    def positions_read_by_output(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], num_outputs: int
    ) -> list[list[int]] | None:
        """Return the sites that each output of an op on lists of tensors reads,
        or None for other ops.

        Output i of a ``_foreach`` or ``_fused`` op reads the i-th tensor of each list,
        and the tensors in no list.
        """
        if not plan.base.startswith(_ELEMENTWISE):
            return None
        writers_of = self._step.ledger.writers_of
        lists: list[list[Tensor]] = []
        shared: list[int] = []
        for _, value in plan.inputs(args, kwargs):
            if isinstance(value, Tensor):
                shared.extend(writers_of(value))
            elif (
                isinstance(value, list | tuple)
                and value
                and all(isinstance(item, Tensor) for item in value)
            ):
                lists.append(list(value))
        num_items = len(lists[0]) if lists else 0
        if (
            not num_items
            or num_outputs % num_items
            or any(len(tensors) != num_items for tensors in lists)
        ):
            return None
        if any(has_parts(tensor) for tensors in lists for tensor in tensors):
            return None
        return [
            [
                *shared,
                *(writer for tensors in lists for writer in writers_of(tensors[index % num_items])),
            ]
            for index in range(num_outputs)
        ]

    def sites(self, node: CallNode) -> Iterator[Site]:
        """Yield the input sites of the current call, for its new node;
        ``row_edges`` has what each reads.
        """
        for name in node.names[: len(self.row_edges)]:  # a compiled region appends further names
            special = name if isinstance(name, SpecialName) else SpecialName("input", name)
            role, text = special.role, special.name
            if role == "delivered":
                site = self.collectives.site_of(special)
                yield replace(site, **subject_of(text, phase=site.phase, role=role))
                continue
            phase = {"input": "input", "generator": "rng"}.get(role, "other")
            module, source = node.module, node.source
            if text is not None:
                module, source = self._places.owner_of(text), ()
            if role == "generator":
                module = ""
            subject = subject_of(text, phase=phase, role=role)
            yield Site(phase=phase, module=module, role=role, source=source, **subject)

    def roll_back(self, mark: int) -> None:
        """Undo the input sites of a call that raised, or that has no data."""
        self._step.roll_back(mark)
        self._generators.roll_back(mark)
        self.row_edges.clear()
        self.unwritten.clear()
