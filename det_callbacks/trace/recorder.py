"""The recorder: what one step did, op by op, with as little work per op as can be.

On the hot path (``Recorder.op``) there is no logging, no string formatting and no schema parsing; a call that fits the
event predicted at this position costs look-ups and comparisons, its reads, and the digests of what it wrote.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from det_callbacks.digest import digest_memory
from det_callbacks.runs.selection import PHASES, Selection
from det_callbacks.runs.steps import Expectation, StepTrace, require_whole
from det_callbacks.runs.values import argument_bits
from det_callbacks.trace.alerts import Alerts
from det_callbacks.trace.allowed import call_if_allowed
from det_callbacks.trace.appending import append_special
from det_callbacks.trace.building import build_op_event
from det_callbacks.trace.calls import comes_apart, in_flight, written_arguments, written_by_call
from det_callbacks.trace.compiled import CompiledRegions
from det_callbacks.trace.components import has_parts, holds_data
from det_callbacks.trace.dispatch import TAKE_APART
from det_callbacks.trace.exchange import OutputExchange, TensorKeeper, begin_kept_call, exchange_outputs
from det_callbacks.trace.generators import GeneratorTrail
from det_callbacks.trace.late_sites import LateSites
from det_callbacks.trace.layouts import LayoutSlot, LayoutTable
from det_callbacks.trace.modules import ModuleStack
from det_callbacks.trace.names import NameTable, address_of
from det_callbacks.trace.nodes import ENGINE, BackwardMap
from det_callbacks.trace.overloads import OpKind, OpPlan, make_plan
from det_callbacks.trace.passing import Passing
from det_callbacks.trace.reads import Reads
from det_callbacks.trace.storages import StorageLedger
from det_callbacks.trace.tree import Context, Event, ProgramTree
from det_callbacks.trace.witness import Witness

_graph_task_id = torch._C._current_graph_task_id  # torch 2.13: -1 outside a backward pass
_is_grad_enabled = torch.is_grad_enabled
_PLAIN = frozenset({Tensor, nn.Parameter})
_STRIDED = torch.strided
_SCALARS = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format})
_DIGEST = OpKind.DIGEST
_MAX_SIBLINGS = 64
_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_READ_BACK = torch.ops.aten._local_scalar_dense.default


def _may_be_passed_on(func: Any, phase: str) -> bool:
    """Return whether Python gets a number that may become an argument of an op in any module."""
    return func is _READ_BACK and phase != "optimizer"


class Recorder:
    """Records one step at a time; ``begin`` and ``finish`` enclose a step.

    Args:
        selection: what is digested.
        root: the module that module names are relative to; None names outermost modules by their class.

    Attributes:
        late: the sites whose digests a device computes.
        alerts: what is told of ops without a deterministic implementation; set before the first step.
        exchange: what may put other bits into an op's outputs before they are digested.
        keeper: what keeps the tensors of chosen ops.
        names: the named tensors.
        parameter_names: ``id`` of a parameter -> qualified name.
    """

    def __init__(self, selection: Selection, root: nn.Module | None = None) -> None:
        self.selection = selection
        self.alerts: Alerts | None = None
        self.exchange: OutputExchange | None = None
        self.keeper: TensorKeeper | None = None
        self.names = NameTable()
        self.parameter_names: dict[int, str] = {}
        self._phase = "other"
        self.tree = ProgramTree()
        self.layouts = LayoutTable()
        self.ledger = StorageLedger()
        self.generators = GeneratorTrail()
        self.modules = ModuleStack(root)
        self.backward = BackwardMap(self.parameter_names, self.modules)
        self.reads = Reads(self)
        self.passing = Passing(self)
        self.compiled = CompiledRegions(self)
        self.witness = Witness(self)
        self.late = LateSites()
        self.digests = array("Q")
        self.layout_indices: list[int] = []
        self.at = self.tree.root
        self._plans: dict[int, OpPlan] = {}  # by id: hashing an OpOverload runs Python code; a plan keeps it alive
        self._accumulation: OpPlan | None = None
        self._selected: dict[tuple[str, str], bool] = {}
        self._selects_all = selection.modules == ("*",) and len(selection.phases) == len(PHASES)
        self._expected: Expectation | None = None
        self._num_digested = 0

    @property
    def phase(self) -> str:
        """Phase of what runs outside a backward pass; set by whoever knows (the callback, the optimizer hooks)."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.late.flush()
        self._phase = phase
        self.witness.begin_update()

    def begin(self, expected: Expectation | None = None) -> None:
        """Start a step; where an output is not as ``expected``, the op's inputs are looked at while they live."""
        self.late.begin()
        self.tree.trim()
        self.layouts.trim()
        self.ledger.close()
        self.backward.clear()
        self.generators.clear()
        self.digests = array("Q")
        self.layout_indices = []
        self.at = self.tree.root
        self._expected = expected
        self.tree.expected = () if expected is None else expected.programs
        self.passing.clear()
        self.compiled.begin()
        self._num_digested = 0

    def finish(self) -> StepTrace:
        """End the step and return what it did."""
        skipped = {"view": self.passing.num_views, **self.passing.skipped}
        ops_digested = sum((self._num_digested, self.passing.collectives.num_digested, self.compiled.num_digested))
        program = self.tree.program_at(
            self.at,
            ops_seen=ops_digested + sum(skipped.values()),
            ops_digested=ops_digested,
            skipped=skipped,
            opaque_regions=tuple(sorted(self.passing.opaque | self.compiled.opaque)),
        )
        require_whole(program, self.digests)
        late = self.late.settle(self.digests)
        if self._expected is not None and late:
            self.witness.look_back(self._expected, program, late)
        trace = StepTrace(
            program=program,
            digests=np.frombuffer(self.digests, dtype=np.uint64) if self.digests else np.empty(0, np.uint64),
            layout_id=self.layouts.layout_id(self.layout_indices),
            unseen_writes=frozenset() if self._expected is None else frozenset(self._expected.unseen_writes),
            _make_layout=partial(self.layouts.layout, self.layout_indices),
        )
        self.abandon()
        return trace

    def abandon(self) -> None:
        """Drop the step under way and every weak reference it holds; may be called more than once."""
        self.late.discard()
        self.ledger.close()
        self.backward.clear()
        self.compiled.end()
        self.passing.end()
        self._expected = None

    @property
    def num_sites(self) -> int:
        """Sites recorded so far in this step."""
        return len(self.digests)

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and record it."""
        plan = self._plans.get(id(func)) or self.plan_of(func)
        if plan.kind is not _DIGEST:
            if plan.whole is not None:
                if comes_apart(plan, args, kwargs):
                    return TAKE_APART
                plan = plan.whole
            if plan.kind is not _DIGEST:
                return self.passing.pass_through(plan, func, args, kwargs)
        if _graph_task_id() == -1:
            phase = self._phase
            context: Context = self.modules.current
        else:
            phase = "backward"
            context = self.backward.context()
            if context is ENGINE and func is _ADD_IN_PLACE:
                func, plan = _ADD, self._plan_of_accumulation(args)
        if plan.is_reducing and self.passing.is_in_reducer(context):
            return self.passing.reducing(plan, args, kwargs)
        if not self._selects_all and not self.selects(phase, context) and not _may_be_passed_on(func, phase):
            return self.passing.unselected(plan, func, phase, context, args, kwargs)

        digests = self.digests
        mark = len(digests)
        consts: list[Any] = []
        reads: list[int] = []
        names: list[str | None] = []
        ledger = self.ledger
        writers = ledger.writers
        is_functional = plan.is_functional
        expected = self._expected
        before = None
        kept = None
        try:
            if plan.is_overwrite or (plan.may_be_in_flight and ledger.in_flight):
                self.reads.gather_unwritten(plan, args, kwargs, consts, reads, names)
            else:
                for value in (*args, *kwargs.values()) if kwargs else args:
                    kind = value.__class__
                    # only ordinary tensors are known by their storage; `writer` is then the one site that wrote it
                    if kind in _PLAIN and value.layout is _STRIDED:
                        storage = value.untyped_storage()
                        writer = writers.get(storage._cdata)
                        if writer.__class__ is int:
                            reads.append(writer)
                        elif writer is None:
                            self.reads.read_first(value, storage, reads, names)
                        else:
                            self.reads.read(value, reads, names)
                    elif kind in _SCALARS:
                        consts.append(value)
                    else:
                        self.reads.gather(value, consts, reads, names)
            if plan.draws_random:
                self.reads.read_generator(args, kwargs, reads, names)
            if self.reads.unwritten:
                self.reads.read_unwritten(plan, args, kwargs, reads, names)
            if not is_functional and (expected is not None or self.late.is_used):
                written = written_arguments(plan, args, kwargs)
                if expected is not None and not plan.is_overwrite:
                    before = self.witness.look_before(written, mark, is_update=phase == "optimizer")
                if self.late.is_used:
                    self.late.before_write(written)
            if self.keeper is not None:
                kept = begin_kept_call(self.keeper, self.names, plan, phase, context, args, kwargs, self.late)
            out = plan.call(*args, **kwargs)
        except RuntimeError as error:
            out = call_if_allowed(self, error, mark, func, phase, context, args, kwargs)
        except BaseException:  # Ctrl-C too: a user may catch it and go on with the step
            self.reads.roll_back(mark)
            raise
        if is_functional and out.__class__ is Tensor and plan.is_plain:
            outputs: Sequence[Any] = (out,)
        elif plan.sole_write >= 0:
            outputs = (args[plan.sole_write],)
        else:
            if plan.may_be_in_flight and all(flying := in_flight(plan, out, args, kwargs)):
                self.passing.fly(*flying)
                outputs = ()
            else:
                outputs = written_by_call(plan, out, args, kwargs)
                for index in plan.opaque_outputs:
                    if index < len(out) and isinstance(out[index], Tensor):
                        self.ledger.born(out[index])

        if self.exchange is not None:
            out, outputs = exchange_outputs(self.exchange, plan, phase, context, out, outputs, self.late)
        if self.keeper is not None and kept is not None:
            self.keeper.end_call(kept, outputs, len(digests))
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
            or (event.exact is not None and not event.is_exactly(consts))
            or (kwargs and event.keywords != tuple(kwargs))
        ):
            if outputs and not any(holds_data(output) for output in outputs):
                self.reads.roll_back(mark)
                self.passing.skipped["no_data"] += 1
                return out
            event = self._other_event(func, phase, context, consts, reads, names, outputs, plan, args, kwargs)
        self.at = event
        if names:
            self.reads.row_edges.clear()
        self._num_digested += 1
        # in phase "backward" the context is an attribution
        if phase != "optimizer" and (phase != "backward" or _is_grad_enabled() or context.recomputed):  # type: ignore[union-attr]  # attribution
            self.backward.register(event)
        indices = self.layout_indices
        if event.varying:
            bits, tag = argument_bits([consts[index] for index in event.varying])
            digests.append(bits)
            indices.append(self.layouts.tags[tag].index)
        first = len(digests)
        slots = self.layouts.slots
        for output in outputs:
            if output.__class__ in _PLAIN and output.layout is _STRIDED and not output.is_nested:
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
                    ledger.write(output, len(digests))
                if slot.is_raw and output.is_cpu and (address := address_of(output)):
                    digests.append(digest_memory(address, slot.num_bytes))
                else:
                    digests.append(self.late.digest(len(digests), output, slot))
                indices.append(slot.index)
            else:
                append_special(self, output, is_fresh=is_functional)
        if not is_functional:
            self.late.end_read()
        if plan.draws_random:
            self.generators.note_draw(first)
        if expected is not None:
            self.witness.compare(expected, mark, first, plan, args, kwargs, before)
        return out

    def append(self, tensor: Tensor) -> LayoutSlot:
        """Digest a tensor, in memory order where it is dense, as the next site; return its layout."""
        slot = self.layouts.of(tensor)
        self.digests.append(self.late.digest(len(self.digests), tensor, slot))
        self.layout_indices.append(slot.index)
        self.late.end_read()
        return slot

    def append_bits(self, bits: int, slot: LayoutSlot) -> None:
        """Append a site whose 64 bits are known."""
        self.digests.append(bits)
        self.layout_indices.append(slot.index)

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
            if child.fits(func, phase, context, consts, reads, names, len(outputs), tuple(kwargs)):
                parent.likely = child
                return child
        event = Event(parent, func, phase, context, consts, reads, names, len(outputs), tuple(kwargs))
        self.backward.note_functions(event)
        is_named = not plan.is_functional
        # which memory becomes a gradient, autograd and DDP choose by what was before the step: a name is known after it
        name_of = self.names.of if phase == "backward" else self.names.of_written
        output_names = [
            name_of(output) if is_named and isinstance(output, Tensor) and not has_parts(output) else None
            for output in outputs
        ]
        build_op_event(
            event,
            plan,
            args,
            kwargs,
            tree=self.tree,
            position=len(self.digests),
            row_edges=self.reads.row_edges,
            inputs=self.reads.by_output(plan, args, kwargs, len(outputs)),
            outputs=outputs,
            output_names=output_names,
        )
        self.tree.add(event)
        parent.likely = event
        return event

    def selects(self, phase: str, context: Context) -> bool:
        """Return whether ops at this place are digested."""
        if self._selects_all:
            return True
        module = context if isinstance(context, str) else context.module  # once per op: no call
        selected = self._selected.get(key := (phase, module))
        if selected is None:
            selected = self.selection.selects_phase(phase) and self.selection.selects_module(module)
            self._selected[key] = selected
        return selected

    def _plan_of_accumulation(self, args: tuple[Any, ...]) -> OpPlan:
        """Return how the engine's sum of two gradients in place is recorded: like the sum that it makes otherwise.

        It adds in place when nobody else holds the memory (torch 2.13, ``InputBuffer::accumulate``). Whether a digest
        that waits does, is no matter of the training's.
        """
        if self.late.is_used:
            self.late.before_write(args[:1])
        self._accumulation = self._accumulation or replace(self.plan_of(_ADD), call=self.plan_of(_ADD_IN_PLACE).call)
        return self._accumulation

    def plan_of(self, func: Any) -> OpPlan:
        """Return how calls of an op are recorded."""
        if (known := self._plans.get(id(func))) is not None:
            return known
        plan = make_plan(func)
        if self.alerts is not None and self.alerts.may_warn(plan.base):
            plan = replace(plan, call=self.alerts.trap(plan.call))
        if plan.whole is not None:
            plan = replace(plan, whole=replace(plan.whole, call=plan.call))
        self._plans[id(func)] = plan
        return plan
