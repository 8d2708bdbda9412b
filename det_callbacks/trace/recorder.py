"""The recorder: what one step did, op by op, with as little work per op as can be.

On the hot path (``Recorder.op``) there is no logging, no string formatting and no schema parsing; a call that fits the
event predicted at this position costs look-ups and comparisons, its reads, and the digests of what it wrote.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from det_callbacks.digest import digest_memory, digest_output
from det_callbacks.trace.building import build_op_event, forward_codes, light_event
from det_callbacks.trace.components import has_parts, parts_of
from det_callbacks.trace.generators import GeneratorTrail, digest_generator, generator_of
from det_callbacks.trace.layouts import LayoutSlot, LayoutTable
from det_callbacks.trace.modules import ModuleStack
from det_callbacks.trace.nodes import BackwardMap
from det_callbacks.trace.overloads import OpKind, OpPlan, make_plan
from det_callbacks.trace.selection import PHASES, Selection
from det_callbacks.trace.steps import Expectation, StepTrace
from det_callbacks.trace.storages import PartialWrites, StorageLedger, byte_extent
from det_callbacks.trace.tree import Context, Event, ProgramTree, argument_bits, scalar_bits

_graph_task_id = torch._C._current_graph_task_id  # torch 2.13: -1 outside a backward pass
_is_grad_enabled = torch.is_grad_enabled
_PLAIN = frozenset({Tensor, nn.Parameter})
_NO_DATA = (FakeTensor, FunctionalTensor)
_STRIDED = torch.strided
_SCALARS = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format})
_MAX_SIBLINGS = 64


class Recorder:
    """Records one step at a time; ``begin`` and ``finish`` enclose a step.

    Args:
        selection: what is digested.
        root: the module that module names are relative to; None names outermost modules by their class.

    Attributes:
        phase: phase of what runs outside a backward pass; set by whoever knows (the callback, the optimizer hooks).
        names: address of a tensor's first element -> qualified name, for parameters, buffers and optimizer state.
        parameter_names: ``id`` of a parameter -> qualified name.
    """

    def __init__(self, selection: Selection, root: nn.Module | None = None) -> None:
        self.selection = selection
        self.names: dict[int, str] = {}
        self.parameter_names: dict[int, str] = {}
        self.phase = "other"
        self.tree = ProgramTree()
        self.layouts = LayoutTable()
        self.ledger = StorageLedger()
        self.backward = BackwardMap(self.parameter_names)
        self.generators = GeneratorTrail()
        self.modules = ModuleStack(root)
        self.digests = array("Q")
        self.layout_indices: list[int] = []
        self.at = self.tree.root
        self._plans: dict[Any, OpPlan] = {}
        self._selected: dict[tuple[str, str], bool] = {}
        self._selects_all = selection.modules == ("*",) and len(selection.phases) == len(PHASES)
        self._row_edges: list[tuple[int, ...]] = []
        self._expected: Expectation | None = None
        self._skipped: Counter[str] = Counter()
        self._num_views = 0
        self._num_digested = 0
        self._opaque: set[str] = set()

    def begin(self, expected: Expectation | None = None) -> None:
        """Start a step.

        Args:
            expected: what the reference had in this step; lets the recorder look at an op's inputs while they are
                still alive when its output differs.
        """
        self.tree.trim()
        self.layouts.trim()
        self.ledger.close()
        self.backward.clear()
        self.generators.clear()
        self.digests = array("Q")
        self.layout_indices = []
        self.at = self.tree.root
        self._expected = expected
        self._skipped.clear()
        self._num_views = 0
        self._num_digested = 0
        self._opaque.clear()

    def finish(self) -> StepTrace:
        """End the step and return what it did."""
        skipped = {"view": self._num_views, **self._skipped}
        program = self.tree.program_at(
            self.at,
            ops_seen=self._num_digested + sum(skipped.values()),
            ops_digested=self._num_digested,
            skipped=skipped,
            opaque_regions=tuple(sorted(self._opaque)),
        )
        trace = StepTrace(
            program=program,
            digests=np.frombuffer(self.digests, dtype=np.uint64) if self.digests else np.empty(0, np.uint64),
            layout_id=self.layouts.layout_id(self.layout_indices),
            unseen_writes=frozenset() if self._expected is None else frozenset(self._expected.unseen_writes),
            _layout_indices=self.layout_indices,
            _layouts=self.layouts,
        )
        self.abandon()
        return trace

    def abandon(self) -> None:
        """Drop the step under way and every weak reference it holds; may be called more than once."""
        self.ledger.close()
        self.backward.clear()
        self._expected = None

    @property
    def num_sites(self) -> int:
        """Sites recorded so far in this step."""
        return len(self.digests)

    def op(self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and record it."""
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plan(func)
        if plan.kind is not OpKind.DIGEST:
            return self._pass_through(plan, func, args, kwargs)
        if _graph_task_id() == -1:
            phase = self.phase
            context: Context = self.modules.current
        else:
            phase = "backward"
            context = self._backward_context(func)
        if not self._selects_all and not self.selects(phase, context):
            return self._unrecorded("unselected", plan, func, phase, context, args, kwargs)
        if types and any(issubclass(kind, _NO_DATA) for kind in types):
            return func(*args, **kwargs)

        digests = self.digests
        mark = len(digests)
        consts: list[Any] = []
        reads: list[int] = []
        names: list[str | None] = []
        ledger = self.ledger
        writers = ledger.writers
        is_functional = plan.is_functional
        expected = self._expected
        was_changed = False
        try:
            if plan.is_overwrite:
                self._gather_unwritten(plan, args, kwargs, consts, reads, names)
            else:
                for value in (*args, *kwargs.values()) if kwargs else args:
                    kind = value.__class__
                    # only ordinary tensors are known by their storage; `writer` is then the one site that wrote it
                    if kind in _PLAIN and value.layout is _STRIDED:
                        writer = writers.get(value.untyped_storage()._cdata)
                        if writer.__class__ is int:
                            reads.append(writer)  # type: ignore[arg-type]
                        else:
                            self._read(value, reads, names)
                    elif kind in _SCALARS:
                        consts.append(value)
                    else:
                        self._gather(value, consts, reads, names)
            if plan.draws_random:
                self._read_generator(args, kwargs, reads, names)
            if expected is not None and not is_functional and phase != "optimizer" and not plan.is_overwrite:
                was_changed = any(self._is_changed(tensor) for tensor in self._written(plan, args, kwargs))
            out = plan.call(*args, **kwargs)
        except BaseException:
            self._roll_back(mark)
            raise
        if is_functional and out.__class__ is Tensor and plan.is_plain:
            outputs: Sequence[Any] = (out,)
        else:
            outputs = self._outputs(plan, out, args, kwargs)

        event = self.at.likely
        if (
            event is None
            or event.func is not func
            or event.reads != reads
            or event.consts != consts
            or event.context is not context
            or event.phase is not phase
            or event.names != names
            or event.num_outputs != len(outputs)
            or (event.exact is not None and event.exact != repr(consts))
        ):
            event = self._other_event(func, phase, context, consts, reads, names, outputs, plan, args, kwargs)
        self.at = event
        if names:
            self._row_edges.clear()
        self._num_digested += 1
        if phase != "optimizer" and (phase != "backward" or _is_grad_enabled()):
            self.backward.register(event)
        indices = self.layout_indices
        if event.varying:
            bits, tag = argument_bits([consts[index] for index in event.varying])
            digests.append(bits)
            indices.append(self.layouts.special(tag).index)
        first = len(digests)
        slots = self.layouts.slots
        for output in outputs:
            if output.__class__ in _PLAIN and output.layout is _STRIDED:
                key = (output.dtype, output.shape, output.stride())
                slot = slots.get(key)
                if slot is None:
                    slot = self.layouts.add_strided(key)
                storage = output.untyped_storage()
                if is_functional:
                    address = storage._weak_ref()
                    ledger.pins.append(address)
                    writers[address] = len(digests)
                elif slot.is_dense and storage.nbytes() == slot.num_bytes and (address := storage._cdata) in writers:
                    writers[address] = len(digests)
                else:
                    ledger.write(output, len(digests), is_dense=slot.is_dense)
                if slot.is_raw and output.is_cpu and (address := output.data_ptr()):
                    digests.append(digest_memory(address, slot.num_bytes))
                else:
                    digests.append(digest_output(output))
                indices.append(slot.index)
            else:
                self._append_special(output)
        if plan.draws_random:
            self.generators.note_draw(first)
        if expected is not None:
            self._compare_with_expected(expected, first, plan, args, kwargs, was_changed)
        return out

    def append(self, tensor: Tensor) -> None:
        """Digest a tensor, in memory order where it is dense, as the next site."""
        slot = self.layouts.of(tensor)
        self.digests.append(_digest(tensor, slot))
        self.layout_indices.append(slot.index)

    def append_output(self, tensor: Tensor, writers: Sequence[int]) -> None:
        """Append a module's output; the digest of the one site that wrote the same bytes is taken over."""
        slot = self.layouts.of(tensor)
        if len(writers) == 1 and slot.is_raw:
            written = self.layouts.at(self.layout_indices[writers[0]])
            if written.is_raw and written.num_bytes == slot.num_bytes == tensor.untyped_storage().nbytes():
                self.append_bits(self.digests[writers[0]], slot)
                return
        self.append_bits(_digest(tensor, slot), slot)

    def append_bits(self, bits: int, slot: LayoutSlot) -> None:
        """Append a site whose 64 bits are known."""
        self.digests.append(bits)
        self.layout_indices.append(slot.index)

    # what a call reads

    def _read(self, tensor: Tensor, reads: list[int], names: list[str | None]) -> None:
        """Collect who wrote the bytes of a tensor; make an input site where nobody recorded did."""
        if has_parts(tensor):
            for part in parts_of(tensor):
                self._read(part, reads, names)
            return
        known = self.ledger.writers.get(tensor.untyped_storage()._cdata)
        if isinstance(known, int):
            reads.append(known)
            return
        if tensor.numel() == 0 or tensor.is_meta:
            return
        edges: tuple[int, ...] = ()
        if known is not None:
            low, high = byte_extent(tensor)
            edges = tuple(known.writers(low, high))
            reads.extend(edges)
            if known.is_born or known.covers(low, high):
                return
        position = len(self.digests)
        names.append(self.names.get(tensor.data_ptr()))
        self._row_edges.append(edges)
        self.append(tensor)
        reads.append(position)
        self.ledger.write(tensor, position, is_dense=self.layouts.of(tensor).is_dense)

    def _gather(self, value: Any, consts: list[Any], reads: list[int], names: list[str | None]) -> None:
        if isinstance(value, Tensor):
            self._read(value, reads, names)
        elif isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            for item in value:
                if isinstance(item, Tensor):
                    self._read(item, reads, names)
                else:
                    consts.append(item)
        else:
            consts.append(None if value.__class__ is Generator else value)

    def _gather_unwritten(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        consts: list[Any],
        reads: list[int],
        names: list[str | None],
    ) -> None:
        written = {write.name for write in plan.writes}
        for name, value in (*zip(plan.argument_names, args, strict=False), *kwargs.items()):
            if name not in written:
                self._gather(value, consts, reads, names)

    def _read_generator(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], reads: list[int], names: list[str | None]
    ) -> None:
        name, generator = generator_of(args, kwargs)
        position = len(self.digests)
        names.append(name)
        self._row_edges.append(self.generators.read(name, position))
        self.append_bits(digest_generator(generator), self.layouts.none)
        reads.append(position)

    def _roll_back(self, mark: int) -> None:
        """Undo the input sites of a call that raised."""
        del self.digests[mark:]
        del self.layout_indices[mark:]
        self._row_edges.clear()
        self.ledger.drop_from(mark)

    # what a call wrote

    @staticmethod
    def _written(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors among the arguments that a call writes."""
        if plan.is_hidden_write and not _is_training(plan, args, kwargs):
            return []
        written: list[Tensor] = []
        for write in plan.writes:
            value = args[write.index] if write.index < len(args) else kwargs.get(write.name)
            if write.name == plan.declared_only and kwargs.get("grad_scale") is None:
                continue
            if isinstance(value, Tensor):
                written.append(value)
            elif isinstance(value, list | tuple):
                written.extend(item for item in value if isinstance(item, Tensor))
        return written

    def _outputs(self, plan: OpPlan, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return what a call wrote: fresh tensors and numbers first, then the arguments it wrote."""
        if plan.may_be_in_flight and self._is_in_flight(plan, out, args, kwargs):
            self.ledger.forget(out)
            self._skipped["in_flight"] += 1
            return ()
        if plan.is_functional:
            if out.__class__ is Tensor and not plan.opaque_outputs:
                return (out,)
            fresh = out if isinstance(out, list | tuple) else (out,)
        else:
            fresh = ()
            if plan.fresh_returns:
                returned = out if isinstance(out, list | tuple) else (out,)
                fresh = tuple(returned[index] for index in plan.fresh_returns if index < len(returned))
        outputs: list[Any] = []
        for index, value in enumerate(fresh):
            if index in plan.opaque_outputs:
                continue
            if isinstance(value, list | tuple):
                outputs.extend(item for item in value if item is not None)
            elif value is not None:
                outputs.append(value)
        if plan.writes:
            outputs.extend(self._written(plan, args, kwargs))
        return outputs

    @staticmethod
    def _is_in_flight(plan: OpPlan, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether this is a copy from a device to the host that nobody has waited for."""
        index = plan.argument_names.index("non_blocking")
        is_non_blocking = args[index] if index < len(args) else kwargs.get("non_blocking", False)
        if not is_non_blocking or not isinstance(out, Tensor) or not out.is_cpu:
            return False
        return any(isinstance(value, Tensor) and not value.is_cpu for value in args)

    def _append_special(self, output: Any) -> None:
        """Append a number, or a tensor that is not an ordinary strided one."""
        if not isinstance(output, Tensor):
            bits, tag = scalar_bits(output)
            self.append_bits(bits, self.layouts.special(tag))
            return
        position = len(self.digests)
        if output.is_meta and not has_parts(output):
            self.append_bits(0, self.layouts.special("meta"))
            return
        self.append(output)
        for part in parts_of(output) if has_parts(output) else (output,):
            self.ledger.write(part, position, is_dense=True)

    # prediction

    def _other_event(
        self,
        func: Any,
        phase: str,
        context: Context,
        consts: list[Any],
        reads: list[int],
        names: list[str | None],
        outputs: Sequence[Any],
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Event:
        """Return the event of a call that is not the likely one: a sibling, or a new one."""
        parent = self.at
        for child in parent.children[: -_MAX_SIBLINGS - 1 : -1]:
            if child.fits(func, phase, context, consts, reads, names, len(outputs)):
                parent.likely = child
                return child
        event = Event(parent, func, phase, context, consts, reads, names, len(outputs))
        if phase == "forward" and not _is_grad_enabled():
            event.frame_codes = forward_codes()
        is_named = not plan.is_functional
        output_names = [
            self.names.get(output.data_ptr()) if is_named and output.__class__ in _PLAIN and output.layout is _STRIDED else None
            for output in outputs
        ]
        build_op_event(
            event,
            plan,
            args,
            kwargs,
            varying=self.tree.varying(event),
            row_edges=self._row_edges,
            outputs=outputs,
            output_names=output_names,
        )
        self.tree.add(event)
        parent.likely = event
        return event

    def _backward_context(self, func: Any) -> Context:
        if self.modules.is_in_backward:
            return self.backward.in_module(self.modules.current)
        return self.backward.attribute(func, self.at)

    def selects(self, phase: str, context: Context) -> bool:
        """Return whether ops at this place are digested."""
        module = context if isinstance(context, str) else context.module
        key = (phase, module)
        selected = self._selected.get(key)
        if selected is None:
            selected = self.selection.selects_phase(phase) and self.selection.selects_module(module)
            self._selected[key] = selected
        return selected

    # ops that are not digested

    def _plan(self, func: Any) -> OpPlan:
        plan = self._plans[func] = make_plan(func)
        return plan

    def _pass_through(self, plan: OpPlan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan.kind is OpKind.VIEW:
            self._num_views += 1
            if _is_grad_enabled():
                self._touch(func, plan)
            return plan.call(*args, **kwargs)
        self._skipped[plan.kind.value] += 1
        out = func(*args, **kwargs)
        if plan.kind is OpKind.UNINITIALISED:
            if out.__class__ is Tensor and out.layout is _STRIDED:
                self.ledger.born(out)
        elif plan.kind is OpKind.OPAQUE:
            self._opaque.add(plan.name)
        elif plan.kind is not OpKind.IGNORED:
            self._forget(args, kwargs)
        return out

    def _unrecorded(
        self,
        reason: str,
        plan: OpPlan,
        func: Any,
        phase: str,
        context: Context,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an op outside the selection: what it writes is unknown from here on."""
        self._skipped[reason] += 1
        if _is_grad_enabled() or phase == "forward":
            self._touch(func, plan)
        out = func(*args, **kwargs)
        for tensor in self._written(plan, args, kwargs):
            self._forget((tensor,), {})
        return out

    def _touch(self, func: Any, plan: OpPlan) -> None:
        """Note an op that is not digested: the autograd node it may own leads back to its module."""
        if _graph_task_id() == -1:
            phase = self.phase
            context: Context = self.modules.current
        else:
            phase = "backward"
            context = self._backward_context(func)
        event = self.at.likely
        if event is None or not event.fits(func, phase, context, [], [], [], 0):
            event = next(
                (child for child in self.at.children if child.fits(func, phase, context, [], [], [], 0)), None
            )
            if event is None:
                event = light_event(self.at, func, plan, phase, context)
                self.tree.add(event)
            self.at.likely = event
        self.at = event
        self.backward.register(event)

    def _forget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                for part in parts_of(value) if has_parts(value) else (value,):
                    self.ledger.forget(part)
            elif isinstance(value, list | tuple):
                self._forget(tuple(value), {})

    # origins in a verify run

    def _is_changed(self, tensor: Tensor) -> bool:
        """Return whether a tensor is not what the recorded site that wrote it had left."""
        if has_parts(tensor):
            return False
        writer = self.ledger.writers.get(tensor.untyped_storage()._cdata)
        if not isinstance(writer, int):
            return False
        slot = self.layouts.of(tensor)
        return slot.index == self.layout_indices[writer] and _digest(tensor, slot) != self.digests[writer]

    def _compare_with_expected(
        self,
        expected: Expectation,
        first: int,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        was_changed: bool,
    ) -> None:
        positions = range(first, len(self.digests))
        if not expected.checks_left or not any(expected.differs(i, self.digests[i]) for i in positions):
            return
        expected.checks_left -= 1
        written = {id(tensor) for tensor in self._written(plan, args, kwargs)}
        flat = [item for value in (*args, *kwargs.values()) for item in (value if isinstance(value, list) else [value])]
        if was_changed or any(
            isinstance(value, Tensor) and id(value) not in written and self._is_changed(value) for value in flat
        ):
            expected.unseen_writes.update(positions)


def _digest(tensor: Tensor, slot: LayoutSlot) -> int:
    if slot.is_raw and tensor.is_cpu and not tensor.is_neg() and (address := tensor.data_ptr()):
        return digest_memory(address, slot.num_bytes)
    return digest_output(tensor)


def _is_training(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "training" not in plan.argument_names:
        return True
    index = plan.argument_names.index("training")
    return bool(args[index] if index < len(args) else kwargs.get("training"))
