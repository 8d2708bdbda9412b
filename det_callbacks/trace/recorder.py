"""The recorder: what one step did, op by op, with as little work per op as can be.

On the hot path (``Recorder.op``) there is no logging, no string formatting and no schema parsing; a call that fits the
one predicted at this position costs look-ups and comparisons, its reads, and the digests of what it wrote.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import RLock, get_ident
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from det_callbacks.host_digest import digest_memory
from det_callbacks.internals.names import RECORDING
from det_callbacks.internals.torch import TORCH, graph_task_id, pin_storage, storage_address
from det_callbacks.runs.program import Program, scalar_bits
from det_callbacks.runs.selection import PHASES, Selection
from det_callbacks.runs.steps import Expectation, StepTrace, require_whole
from det_callbacks.trace.backward import ENGINE, BackwardMap
from det_callbacks.trace.compiled_regions import CompiledRegions
from det_callbacks.trace.components import PLAIN, STRIDED, address_of, holds_data, parts_with_memory
from det_callbacks.trace.deferred_sites import DeferredSites
from det_callbacks.trace.dispatch import TAKE_APART
from det_callbacks.trace.generators import GeneratorTrail
from det_callbacks.trace.layouts import LayoutSlot, LayoutTable, Parts, describe_parts, parts_of_arguments
from det_callbacks.trace.modules import ModuleCalls, ModuleStack
from det_callbacks.trace.named_tensors import NameTable
from det_callbacks.trace.nondeterministic_ops import NondeterministicOps
from det_callbacks.trace.overloads import (
    OpKind,
    OpPlan,
    comes_apart,
    in_flight,
    make_plan,
    written_arguments,
    written_by_call,
)
from det_callbacks.trace.program_trie import OpScope, ProgramTrie, StepCounts, with_occurrences
from det_callbacks.trace.reads import Reads
from det_callbacks.trace.replaced import REPLACED
from det_callbacks.trace.sites import InputName, build_op
from det_callbacks.trace.storages import StorageLedger
from det_callbacks.trace.strands import Strands
from det_callbacks.trace.thread_order import canonical_order
from det_callbacks.trace.undigested_ops import UndigestedOps
from det_callbacks.trace.unseen_writes import UnseenWriteCheck

_is_grad_enabled = torch.is_grad_enabled
_SCALARS = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format})
_DIGEST = OpKind.DIGEST
_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_READ_BACK = torch.ops.aten._local_scalar_dense.default


class OutputHook(Protocol):
    """Called with the outputs of the ops it selects: replay restores saved tensors there, keeping copies them."""

    needs_rows: bool  # it is called for ops that are digested only

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether it wants the outputs of an op at this place."""

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], position: int, deferred: DeferredSites
    ) -> Sequence[Any]:
        """Return what to go on with: the same tensors, perhaps written to, and perhaps other numbers.

        The first site of the call is the first output from ``position`` on.
        """


class Recorder:
    """Records one step at a time; ``begin`` and ``finish`` enclose a step."""

    def __init__(self, selection: Selection, root: nn.Module | None = None) -> None:
        TORCH.require(RECORDING)
        self.selection = selection
        self.nondeterministic_ops: NondeterministicOps | None = None  # set before the first step
        self.output_hooks: tuple[OutputHook, ...] = ()
        # held while an op, or a gradient, is recorded: autograd runs each device's part of a backward pass in a thread
        # of its own, and an op lets the others go on while it runs
        self.lock = RLock()
        self.names = NameTable()
        self.parameter_names: dict[int, str] = {}  # by the ``id`` of the parameter
        self.trie = ProgramTrie()
        self.layouts = LayoutTable()
        self.ledger = StorageLedger()
        self.generators = GeneratorTrail()
        self.modules = ModuleStack(root)
        self.calls: ModuleCalls = self.modules  # of the thread that is recorded now, while the lock is held
        self.backward = BackwardMap(self.parameter_names, self.modules)
        self.strands = self.modules.others = Strands(self)
        self.reads = Reads(self)
        self.undigested = UndigestedOps(self)
        self.compiled = CompiledRegions(self)
        self.unseen_writes = UnseenWriteCheck(self)
        self.deferred = DeferredSites()
        self.digests = array("Q")
        self.layout_indices: list[int] = []
        self._phase = "other"
        self._plans: dict[int, OpPlan] = {}  # by id: hashing an OpOverload runs Python code; a plan keeps it alive
        self._accumulation: OpPlan | None = None
        self._selected: dict[tuple[str, str], bool] = {}
        self.selects_all = selection.modules == ("*",) and len(selection.phases) == len(PHASES)
        self._expected: Expectation | None = None
        self.counts = StepCounts()

    @property
    def phase(self) -> str:
        """Phase of what runs outside a backward pass; set by whoever knows (the callback, the optimizer hooks)."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.deferred.flush()
        self._phase = phase
        self.unseen_writes.begin_update()

    def begin(self, expected: Expectation | None = None) -> None:
        """Start a step; where an output is not as ``expected``, the op's inputs are looked at while they live."""
        self.deferred.begin()
        self.layouts.trim()
        self.ledger.close()
        self.backward.clear()
        self.generators.clear()
        self.digests = array("Q")
        self.layout_indices = []
        self._expected = expected
        self.trie.begin()
        self.undigested.begin()
        self.compiled.begin()
        self.unseen_writes.begin()
        self.strands.begin()
        REPLACED.unfollow(self)
        REPLACED.watch(self)
        self.counts = StepCounts()

    def finish(self) -> StepTrace:
        """End the step and return what it did."""
        with self.lock:
            program = self.trie.program(self.counts)
            require_whole(program, self.digests)
            settled = self.deferred.settle(self.digests)
            unseen: frozenset[int] = frozenset()
            if (expected := self._expected) is not None:
                self.unseen_writes.look_back(expected, program, settled)
                unseen = frozenset(expected.unseen_writes)
            digests = np.frombuffer(self.digests, dtype=np.uint64) if self.digests else np.empty(0, np.uint64)
            if self.strands.all:
                trace = self._ordered(program, digests)
            else:
                trace = self._trace(program, digests, self.layout_indices, unseen)
            self.abandon()
        return trace

    def expect_any_order(self) -> None:
        """Note that other threads record from here on, too: no site is known by its position before the step ends."""
        if self._expected is not None:
            self._expected.forget_order()

    def abandon(self) -> None:
        """Drop the step under way and every weak reference it holds; may be called more than once."""
        self.deferred.discard()
        self.ledger.close()
        self.backward.clear()
        self.compiled.end()
        self.undigested.end()
        self.strands.end()
        REPLACED.unfollow(self)
        self._expected = None

    @property
    def num_sites(self) -> int:
        """Sites recorded so far in this step."""
        return len(self.digests)

    def place(self) -> tuple[str, OpScope]:
        """Return phase and scope of what runs now."""
        if self.compiled.inside and (region := self.compiled.inside.get(get_ident())) is not None:
            return region.phase, region.scope
        if graph_task_id() == -1:
            return self._phase, self.calls.current
        return "backward", self.backward.scope()

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and record it."""
        plan = self._plans.get(id(func)) or self.plan_of(func)
        if plan.kind is not _DIGEST:
            if plan.whole is not None:
                if comes_apart(plan, args, kwargs):
                    return TAKE_APART
                plan = plan.whole
            if plan.kind is not _DIGEST:
                return self.undigested.run(plan, func, args, kwargs)
        if graph_task_id() == -1:
            phase = self._phase
            scope = self.calls.current
        else:
            phase = "backward"
            scope = self.backward.scope()
            if scope is ENGINE and func is _ADD_IN_PLACE:
                func, plan = _ADD, self._plan_of_accumulation(args)
        if (
            plan.is_reducing
            and (reduced := self.undigested.in_reducer(plan, scope, args, kwargs)) is not NotImplemented
        ):
            return reduced
        # a number that Python gets may become an argument of an op in any module
        may_be_passed_on = func is _READ_BACK and phase != "optimizer"
        if not self.selects_all and not may_be_passed_on and not self.selects(phase, scope):
            return self.undigested.unselected(plan, func, phase, scope, args, kwargs)

        digests = self.digests
        mark = len(digests)
        consts: list[Any] = []
        reads: list[int] = []
        names: list[InputName] = []
        ledger = self.ledger
        writers = ledger.writers
        is_functional = plan.is_functional
        expected = self._expected
        was_changed = False
        try:
            if plan.is_overwrite:
                self.undigested.collectives.note_copy(plan, args)
                for _, value in plan.inputs(args, kwargs):
                    self.reads.gather(value, consts, reads, names)
            else:
                for value in (*args, *kwargs.values()) if kwargs else args:
                    kind = value.__class__
                    # only ordinary tensors are known by their storage; `writer` is then the one site that wrote it
                    if kind in PLAIN and value.layout is STRIDED:
                        storage = value.untyped_storage()
                        writer = writers.get(storage_address(storage))
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
            if not is_functional and (expected is not None or self.deferred.is_used):
                written = written_arguments(plan, args, kwargs)
                if expected is not None:
                    was_changed = self.unseen_writes.look_before(plan, written, args, kwargs, mark, phase)
                if self.deferred.is_used:
                    self.deferred.before_writes(written)
            out = plan.call(*args, **kwargs)
        except BaseException:  # Ctrl-C too: a user may catch it and go on with the step
            self.reads.roll_back(mark)
            raise
        if is_functional and out.__class__ is Tensor and plan.is_plain:
            outputs: Sequence[Any] = (out,)
        elif plan.sole_write >= 0:
            outputs = (args[plan.sole_write],)
        elif plan.may_be_in_flight and all(flying := in_flight(plan, out, args, kwargs)):
            self.undigested.mark_in_flight(*flying)
            outputs = ()
        else:
            outputs = written_by_call(plan, out, args, kwargs)
            for index in plan.opaque_outputs:
                if index < len(out) and isinstance(out[index], Tensor):
                    ledger.mark_uninitialised(out[index])

        if self.output_hooks:
            out, outputs = self.call_hooks(plan, phase, scope, out, outputs, args, kwargs)
        node = self.trie.at.likely
        if (
            node is None
            or node.func is not func
            or node.reads != reads
            or node.scope is not scope
            or node.phase is not phase
            or node.names != names
            or node.num_outputs != len(outputs)
            or (kwargs and node.keywords != tuple(kwargs))
            or (
                (node.consts != consts or (node.exact is not None and node.exact != repr(consts)))
                and not self.trie.takes(node, consts)
            )
        ):
            if outputs and not any(holds_data(output) for output in outputs):
                self.reads.roll_back(mark)
                self.counts.skipped["no_data"] += 1
                return out
            call = (func, phase, scope, consts, reads, names, len(outputs), tuple(kwargs))
            node = self.trie.step_to(call, partial(build_op, self, plan, args, kwargs, outputs))
        else:
            self.trie.at = node
        if names:
            self.reads.row_edges.clear()
        self.counts.num_digested += 1
        if phase != "optimizer" and (phase != "backward" or _is_grad_enabled() or scope.recomputed):
            self.backward.register(node)
        indices = self.layout_indices
        if node.numbers:
            digests.append(node.bits)
            indices.append(self.layouts.tags[node.tag].index)
        first = len(digests)
        slots = self.layouts.slots
        # not in the backward pass and the optimizer, whose parts follow from those of the forward pass
        parts = parts_of_arguments(args, kwargs, self.names.offset_in) if phase == "forward" else ()
        for output in outputs:
            if output.__class__ in PLAIN and output.layout is STRIDED and not output.is_nested:
                key: tuple[Any, ...] = (output.dtype, output.shape, output.stride())
                if parts:
                    key = (*key, parts)
                slot = slots.get(key)
                if slot is None:
                    slot = self.layouts.add_strided(key)
                storage = output.untyped_storage()
                if is_functional:
                    address = pin_storage(storage)
                    ledger.pins.append(address)
                    writers[address] = len(digests)
                elif (
                    slot.is_dense
                    and storage.nbytes() == slot.num_bytes
                    and (address := storage_address(storage)) in writers
                ):
                    writers[address] = len(digests)
                else:
                    ledger.write(output, len(digests))
                if slot.is_raw and output.is_cpu and (address := address_of(output)):
                    digests.append(digest_memory(address, slot.num_bytes))
                else:
                    digests.append(self.deferred.digest(len(digests), output, slot))
                indices.append(slot.index)
            else:
                self._append_special(output, parts, is_fresh=is_functional)
        if not is_functional:
            self.deferred.end_read()
        if plan.draws_random:
            self.generators.note_draw(first)
        if expected is not None:
            self.unseen_writes.compare(expected, mark, first, plan, args, kwargs, was_changed=was_changed)
        return out

    def call_hooks(
        self,
        plan: OpPlan,
        phase: str,
        scope: OpScope,
        out: Any,
        outputs: Sequence[Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Sequence[Any]]:
        """Call the output hooks, without outputs for an op that makes no sites; return what it returned and wrote."""
        written = outputs
        for hook in self.output_hooks:
            if (outputs is None and hook.needs_rows) or not hook.selects(phase, scope.module, plan.name):
                continue
            written = written_by_call(plan, out, args, kwargs) if written is None else written
            if not written:
                break
            is_number = len(written) == 1 and written[0] is out and not isinstance(out, Tensor)
            written = hook.exchange(phase, scope.module, plan.name, written, self.num_sites, self.deferred)
            out = written[0] if is_number else out
        return out, written or ()

    def append(self, tensor: Tensor, slot: LayoutSlot | None = None) -> LayoutSlot:
        """Digest a tensor, in memory order where it is dense, as the next site; return its layout."""
        slot = slot or self.layouts.of(tensor)
        self.digests.append(self.deferred.digest(len(self.digests), tensor, slot))
        self.layout_indices.append(slot.index)
        self.deferred.end_read()
        return slot

    def append_bits(self, bits: int, slot: LayoutSlot) -> None:
        """Append a site whose 64 bits are known."""
        self.digests.append(bits)
        self.layout_indices.append(slot.index)

    def append_value(self, value: Any) -> None:
        """Append the bits of a tensor or a number."""
        if isinstance(value, Tensor):
            self.append(value)
        else:
            bits, tag = scalar_bits(value)
            self.append_bits(bits, self.layouts.special(tag))

    def append_output(self, tensor: Tensor, writers: Sequence[int]) -> None:
        """Append a tensor; the digest of the one site that wrote the same bytes is taken over."""
        slot = self.layouts.of(tensor)
        if len(writers) == 1 and slot.is_raw:
            (writer,) = writers
            written = self.layouts.order[self.layout_indices[writer]]
            is_same = written is slot or (written.is_raw and written.num_bytes == slot.num_bytes)
            if is_same and tensor.untyped_storage().nbytes() == slot.num_bytes:
                bits = self.deferred.bits.get(writer, self.digests[writer])
                self.append_bits(self.deferred.defer(len(self.digests), bits), slot)
                return
        self.append(tensor)

    def writers_of(self, tensor: Tensor) -> list[int]:
        """Return the sites of this step that wrote a tensor's bytes."""
        return sorted({writer for part in parts_with_memory(tensor) for writer in self.ledger.writers_of(part)})

    def run_unseen(self, label: str) -> None:
        """Note that something without rows ran, and may have written any memory: another program than without it."""
        self.counts.opaque.add(label)
        self.ledger.invalidate()
        self.trie.step_to((label, *self.place(), [], [], [], 0), lambda node: None)

    def selects(self, phase: str, scope: OpScope) -> bool:
        """Return whether ops at this place are digested."""
        if self.selects_all:
            return True
        selected = self._selected.get(key := (phase, scope.module))
        if selected is None:
            selected = self.selection.selects_phase(phase) and self.selection.selects_module(scope.module)
            self._selected[key] = selected
        return selected

    def plan_of(self, func: Any) -> OpPlan:
        """Return how calls of an op are recorded."""
        if (known := self._plans.get(id(func))) is not None:
            return known
        plan = make_plan(func)
        if self.nondeterministic_ops is not None:
            plan = replace(plan, call=self.nondeterministic_ops.guard(plan, self.place))
        if plan.whole is not None:
            plan = replace(plan, whole=replace(plan.whole, call=plan.call))
        self._plans[id(func)] = plan
        return plan

    def _ordered(self, program: Program, digests: np.ndarray) -> StepTrace:
        """Return the trace of a step that ran modules in several threads: its sites came in the order of the clock."""
        order, sites = canonical_order(self.trie.calls(), self.strands.all, self.modules.names, digests.tolist())
        program = replace(program, sites=with_occurrences(sites))
        digests = digests[order]
        unseen = frozenset() if self._expected is None else frozenset(self._expected.unproven(order, digests))
        places = {number: position for position, number in enumerate(order)}
        return self._trace(program, digests, [self.layout_indices[number] for number in order], unseen, places)

    def _trace(
        self,
        program: Program,
        digests: np.ndarray,
        indices: list[int],
        unseen_writes: frozenset[int],
        places: Mapping[int, int] | None = None,
    ) -> StepTrace:
        return StepTrace(
            program=program,
            digests=digests,
            layout_id=self.layouts.layout_id(indices),
            unseen_writes=unseen_writes,
            values=self.trie.values,
            _make_layout=partial(self.layouts.layout, indices),
            _places=places,
        )

    def _append_special(self, output: Any, parts: Parts, *, is_fresh: bool) -> None:
        """Append a number, or a tensor that is not an ordinary strided one.

        A fresh one (sparse, a wrapper) may be made around tensors that exist; their bytes keep their writers.
        """
        position = self.num_sites
        if not isinstance(output, Tensor):
            bits, tag = scalar_bits(output)
            self.append_bits(bits, self.layouts.special(tag, detail=describe_parts(parts)))
        elif not holds_data(output):
            self.append_bits(0, self.layouts.special("no data"))
        else:
            self.append(output)
            for part in parts_with_memory(output):
                if not (is_fresh and storage_address(part.untyped_storage()) in self.ledger.writers):
                    self.ledger.write(part, position)

    def _plan_of_accumulation(self, args: tuple[Any, ...]) -> OpPlan:
        """Return how the engine's sum of two gradients in place is recorded: like the sum that it makes otherwise.

        It adds in place when nobody else holds the memory (torch 2.13, ``InputBuffer::accumulate``). A digest
        that waits may hold it, too, and the program must not depend on that.
        """
        if self.deferred.is_used:
            self.deferred.before_writes(args[:1])
        self._accumulation = self._accumulation or replace(self.plan_of(_ADD), call=self.plan_of(_ADD_IN_PLACE).call)
        return self._accumulation
