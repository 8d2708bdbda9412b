"""Collectives in a step: what goes in, before the call; what came out, when it is there and somebody reads it.

Each call of a ``c10d`` op or a functional collective makes rows of role "sent", one for each tensor that this rank
puts in (one without bits where it puts in none). Its outputs are not looked at: their storages are marked, and the
first read of them, by an op, another collective, ``wait_tensor`` or a group of named tensors, makes a row of role
"delivered" with an edge to the rows of what went in. A tensor that is read while the collective is under way gets a
row without bits.
"""

import json
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # looked at in torch 2.13

from det_callbacks.runs.program import IN_FLIGHT, Site
from det_callbacks.trace.building import input_row, source_of
from det_callbacks.trace.calls import tensors_in
from det_callbacks.trace.collective_calls import arguments_of, group_of, received_tensors, sent_tensors
from det_callbacks.trace.components import has_parts, holds_data, parts_of
from det_callbacks.trace.deliveries import DeliveredName, Delivery, work_of
from det_callbacks.trace.layouts import LayoutSlot
from det_callbacks.trace.overloads import OpPlan
from det_callbacks.trace.source import capture_source
from det_callbacks.trace.storages import PartialWrites, region_of
from det_callbacks.trace.tree import Context, Event

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder

_graph_task_id = torch._C._current_graph_task_id  # torch 2.13: -1 outside a backward pass

WAIT = "_c10d_functional.wait_tensor"
_WAITS = frozenset({WAIT, "c10d_functional.wait_tensor"})
_WITHOUT_DATA = frozenset(
    {
        "c10d.barrier",
        "c10d.monitored_barrier_",
        "c10d.check_for_nan",
        "_c10d_functional._wrap_tensor_autograd",  # puts the wrapper that waits around a result
    }
)


class Collectives:
    """Records the collectives of one step after the other.

    Args:
        recorder: whose sites are made.

    Attributes:
        num_digested: calls in this step of which rows were made.
    """

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._deliveries: list[Delivery] = []
        self._under_way: list[tuple[weakref.ref[Tensor], Delivery]] = []
        self._is_sending = False
        self.num_digested = 0

    def begin(self) -> None:
        """Start a step; what the one before left under way follows from nothing in this one."""
        under_way, self._under_way = self._under_way, []
        self._deliveries.clear()
        self.num_digested = 0
        for reference, delivery in under_way:
            tensor = reference()
            if tensor is not None and not delivery.has_arrived():
                delivery.number = len(self._deliveries)
                delivery.inputs = ()
                self._deliveries.append(delivery)
                self._under_way.append((reference, delivery))
                self._recorder.ledger.deliver(tensor, delivery.number)

    def end(self) -> None:
        """End a step: let go of what has arrived."""
        self._under_way = [
            (tensor, delivery)
            for tensor, delivery in self._under_way
            if tensor() is not None and not delivery.has_arrived()
        ]
        self._deliveries.clear()

    def run(self, plan: OpPlan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective, or the op that waits for one."""
        recorder = self._recorder
        given = {**dict(zip(plan.argument_names, args, strict=False)), **kwargs}
        if plan.base in _WAITS:
            out = func(*args, **kwargs)
            self.num_digested += 1
            self._waited(next(iter(given.values())))
            return out
        if "gather" in plan.base:  # FSDP frees what it gathered, by a method of the storage that no mode sees
            recorder.late.is_freed_unseen = True
        if plan.base in _WITHOUT_DATA:
            recorder.passing.skipped[plan.kind.value] += 1
            return func(*args, **kwargs)
        phase, context = self._place()
        is_known = not plan.base.startswith("symm_mem.")
        tensors = list(tensors_in(given.values()))
        if not is_known or not recorder.selects(phase, context) or not all(map(holds_data, tensors)):
            recorder.passing.skipped[plan.kind.value] += 1
            out = func(*args, **kwargs)
            for tensor in (*tensors, *tensors_in([out])):
                self._forget(tensor)
            return out
        return self._run(plan, func, phase, context, given, args, kwargs)

    def read(
        self,
        tensor: Tensor,
        numbers: Sequence[int],
        edges: Sequence[int],
        reads: list[int],
        names: list[str | None],
        row_edges: list[tuple[int, ...]],
    ) -> None:
        """Make the row of a tensor that collectives delivered, at its first read.

        Args:
            tensor: what is read.
            numbers: of the deliveries into its bytes.
            edges: sites that wrote others of its bytes.
            reads: gets the row's position.
            names: gets the row's name.
            row_edges: gets what the row follows from.
        """
        recorder = self._recorder
        deliveries = [self._deliveries[number] for number in numbers]
        has_arrived = all(delivery.has_arrived(for_collective=self._is_sending) for delivery in deliveries)
        position = len(recorder.digests)
        names.append(DeliveredName.of(deliveries[-1], recorder.names.of(tensor), has_arrived=has_arrived))
        row_edges.append(tuple(sorted({*edges, *(place for delivery in deliveries for place in delivery.inputs)})))
        reads.append(position)
        if has_arrived:
            recorder.append(tensor)
            recorder.ledger.write(tensor, position)
        else:
            recorder.append_bits(0, self.slot_in_flight(tensor))
            recorder.passing.skipped["in_flight"] += 1

    def wait(self, tensor: AsyncCollectiveTensor) -> None:
        """Wait for a functional collective whose result is about to be read by an op that waits for it anyway.

        The wrapper is not told: the op's own wait, which modes may see, then happens as ever.
        """
        torch.ops._c10d_functional.wait_tensor(tensor.elem)
        self._note_wait(tensor.elem)

    def arrive(self, tensor: Tensor) -> bool:
        """Make the rows of what collectives delivered into a tensor that is about to be recorded by its name.

        Returns:
            False when some of it is still under way, and must not be digested.
        """
        if not self._deliveries:
            return True
        parts = list(_parts(tensor))
        delivered = [part for part in parts if self._numbers(part)]
        if delivered:
            self._enter_arrivals(delivered)
        return not any(map(self._numbers, delivered))

    def note_copy(self, *tensors: Tensor) -> None:
        """Take a copy from memory that nobody knows, into what a reduce-scatter delivers, for its last act.

        Gloo reduces into a buffer of its own, and copies this rank's part when it is waited for, by an op that modes
        see (torch 2.13, ``ProcessGroupGloo::reduce_scatter`` and ``_reduce_scatter_base``).

        Args:
            tensors: target and source of the copy.
        """
        if not self._deliveries or len(tensors) < 2 or any(map(has_parts, tensors)):
            return
        target, source = tensors
        if target.nbytes != source.nbytes or source.untyped_storage()._cdata in self._recorder.ledger.writers:
            return
        for number in self._numbers(target):
            delivery = self._deliveries[number]
            if "reduce_scatter" in delivery.op:
                delivery.work = None
                self._recorder.ledger.deliver(source, number)

    def slot_in_flight(self, tensor: Tensor) -> LayoutSlot:
        """Return the layout of a tensor that is still under way."""
        return self._recorder.layouts.special(
            str(tensor.dtype).removeprefix("torch."), tuple(map(int, tensor.shape)), IN_FLIGHT
        )

    def _run(
        self,
        plan: OpPlan,
        func: Any,
        phase: str,
        context: Context,
        given: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        recorder = self._recorder
        mark = len(recorder.digests)
        reads: list[int] = []
        names: list[str | None] = []
        group = group_of(given)
        arguments = json.dumps(arguments_of(given, group), separators=(",", ":"))
        sent: list[tuple[Tensor, tuple[int, ...], bool]] = []
        self._is_sending = True
        try:
            for tensor in sent_tensors(plan.base, given, group):
                first, num_names = len(reads), len(names)
                recorder.reads.read(tensor, reads, names)
                is_in_flight = any(
                    isinstance(name, DeliveredName) and name.endswith(IN_FLIGHT) for name in names[num_names:]
                )
                sent.append((tensor, tuple(reads[first:]), is_in_flight))
            start = len(recorder.digests)
            for tensor, _, is_in_flight in sent:
                if is_in_flight:
                    recorder.append_bits(0, self.slot_in_flight(tensor))
                else:
                    recorder.append(tensor)
            if not sent:
                recorder.append_bits(0, recorder.layouts.none)
            positions = tuple(range(start, len(recorder.digests)))
            recorder.late.flush()  # before another stream writes there
            out = func(*args, **kwargs)
        except BaseException:  # Ctrl-C too: a user may catch it and go on with the step
            recorder.reads.roll_back(mark)
            raise
        finally:
            self._is_sending = False
        edges = [edges for _, edges, _ in sent] or [()]
        event = self._enter(func, phase, context, [arguments], reads, names, len(positions))
        if not event.rows:
            sites = [
                Site(
                    phase=phase,
                    module=event.module,
                    op=plan.name,
                    occurrence=0,
                    output=index,
                    role="sent",
                    arguments=arguments,
                    inputs=tuple(sorted(set(inputs))),
                    source=event.source,
                )
                for index, inputs in enumerate(edges)
            ]
            event.rows = (*self._input_rows(event), *sites)
        recorder.reads.row_edges.clear()
        self.num_digested += 1
        self._deliver(plan, event, positions, out, given)
        return out

    def _deliver(self, plan: OpPlan, event: Event, positions: tuple[int, ...], out: Any, given: dict[str, Any]) -> None:
        is_functional = not plan.base.startswith("c10d.")
        # who asks for a synchronous call waits for it before anything else runs; some works of gloo (reduce_scatter of
        # lists, torch 2.13) never say that they are done
        is_synchronous = given.get("async_op", True) is False
        work = None if is_functional or is_synchronous else work_of(out)
        for delivery in self._deliveries:
            if delivery.work is not None:
                delivery.has_arrived()  # lets go of the tensors of what is done
        for index, tensor in enumerate(received_tensors(plan.base, given, out)):
            for part in _parts(tensor):
                number = len(self._deliveries)
                on_host = part.is_cpu
                self._deliveries.append(
                    Delivery(
                        op=f"{WAIT}.default" if is_functional else plan.name,
                        phase=event.phase,
                        module=event.module,
                        source=event.source,
                        output=index,
                        number=number,
                        inputs=positions,
                        # on a device a work is not done until long after the training has waited for it, in its stream
                        work=work if on_host else None,
                        has_to_be_waited_for=is_functional,
                        is_in_stream_order=on_host or is_synchronous,
                    )
                )
                self._recorder.ledger.deliver(part, number)
                self._under_way.append((weakref.ref(part), self._deliveries[-1]))

    def _enter(
        self,
        func: object,
        phase: str,
        context: Context,
        consts: list[Any],
        reads: list[int],
        names: list[str | None],
        num_sites: int,
    ) -> Event:
        """Go to the event of a call: the likely one, a sibling, or a new one without rows."""
        recorder = self._recorder
        parent = recorder.at
        group = (func, phase, context, consts, reads, names, num_sites)
        event = parent.likely
        if event is None or not event.fits(*group):
            event = next((child for child in parent.children if child.fits(*group)), None)
            if event is None:
                event = Event(parent, *group)
                event.source = source_of(context) or capture_source()
                recorder.tree.add(event)
            parent.likely = event
        recorder.at = event
        return event

    def _input_rows(self, event: Event) -> Iterator[Site]:
        pairs = zip(event.names, self._recorder.reads.row_edges, strict=True)
        return (input_row(name, edges, module=event.module, source=event.source) for name, edges in pairs)

    def _enter_arrivals(self, tensors: Sequence[Tensor]) -> None:
        """Make the rows of deliveries that no op reads, in an event of their own."""
        recorder = self._recorder
        reads: list[int] = []
        names: list[str | None] = []
        for tensor in tensors:
            recorder.reads.read(tensor, reads, names)
        if names:
            phase, context = self._place()
            event = self._enter("arrival", phase, context, [], reads, names, 0)
            if not event.rows:
                event.rows = tuple(self._input_rows(event))
            recorder.reads.row_edges.clear()

    def _waited(self, tensor: Tensor) -> None:
        parts = list(_parts(tensor))
        for part in parts:
            self._note_wait(part)
        if delivered := [part for part in parts if self._numbers(part)]:
            self._enter_arrivals(delivered)

    def _note_wait(self, tensor: Tensor) -> None:
        for number in self._numbers(tensor):
            self._deliveries[number].has_to_be_waited_for = False
            self._deliveries[number].is_in_stream_order = True

    def _numbers(self, tensor: Tensor) -> list[int]:
        """Return the deliveries into a tensor that nobody has read yet."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        known = self._recorder.ledger.writers.get(tensor.untyped_storage()._cdata)
        return known.deliveries(region_of(tensor)) if isinstance(known, PartialWrites) else []

    def _forget(self, tensor: Tensor) -> None:
        for part in _parts(tensor):
            self._recorder.ledger.forget(part)

    def _place(self) -> tuple[str, Context]:
        """Return phase and context of a collective.

        One that runs when a gradient was accumulated (DDP's reducer) belongs to many parameters, not to that one.
        """
        recorder = self._recorder
        if _graph_task_id() == -1:
            return recorder.phase, recorder.modules.current
        context = recorder.backward.context()
        return "backward", "" if context.name is not None else context


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the ordinary tensors that hold a tensor's bytes; wrappers that wait are left as they are."""
    if isinstance(tensor, AsyncCollectiveTensor) or not has_parts(tensor):
        yield tensor
        return
    for part in parts_of(tensor):
        yield from (part,) if part is tensor else _parts(part)
