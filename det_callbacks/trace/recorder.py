"""The recorder: records what one step did, op by op, with as little work per op as possible.

The hot path (``Recorder.op``) does no logging or schema parsing. A call that matches the prediction
costs look-ups and comparisons, its reads, and the digests of its outputs. If a number among its
arguments changes, or is ambiguous (1 == 1.0), it also costs a text of its numbers.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from det_callbacks.digest.host import digest_memory
from det_callbacks.internals.torch import TORCH, graph_task_id, pin_storage, storage_address
from det_callbacks.runs.program import Program, scalar_bits
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.steps import Expectation, StepTrace, require_whole
from det_callbacks.trace.backward import ENGINE
from det_callbacks.trace.call_graph import Call, CallNode, OpScope
from det_callbacks.trace.collectives import Collectives
from det_callbacks.trace.compiled.captures import GraphCaptures
from det_callbacks.trace.compiled.regions import CompiledRegions
from det_callbacks.trace.compiled.replaced import REPLACED
from det_callbacks.trace.components import (
    PLAIN,
    STRIDED,
    ArgumentParts,
    address_of,
    describe_parts,
    parts_of_arguments,
    parts_with_memory,
)
from det_callbacks.trace.dispatch import TAKE_APART
from det_callbacks.trace.generators import GeneratorTrail
from det_callbacks.trace.modules import source_of
from det_callbacks.trace.named_sites import NamedSites
from det_callbacks.trace.native import native_calls
from det_callbacks.trace.nondeterministic_ops import Plans
from det_callbacks.trace.overloads import (
    OpKind,
    OpPlan,
    comes_apart,
    in_flight,
    tensors_read,
    written_arguments,
    written_by_call,
)
from det_callbacks.trace.places import OTHER_THREAD, Places
from det_callbacks.trace.reads import Reads
from det_callbacks.trace.sites import InputName, build_op, names_of_written
from det_callbacks.trace.step import OutputHooks, Step
from det_callbacks.trace.undigested_ops import UndigestedOps
from det_callbacks.trace.unseen_writes import UnseenWriteCheck

_is_grad_enabled = torch.is_grad_enabled
_CONST_CLASSES = frozenset(
    {
        int,
        float,
        bool,
        type(None),
        str,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
_DIGEST = OpKind.DIGEST
_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_ITEM = torch.ops.aten._local_scalar_dense.default


class Recorder:
    """Records one step at a time, between ``begin`` and ``finish``.

    ``step`` holds what the step has recorded so far, and ``places`` knows where
    the running code belongs.
    """

    def __init__(self, selection: Selection, root: nn.Module | None = None) -> None:
        TORCH.require()
        self.selection = selection
        self.step = step = Step()
        self.places = places = Places(selection, root)
        self.generators = GeneratorTrail()
        self.plans = Plans(places.now)
        self.output_hooks = OutputHooks(step)
        self.captures = GraphCaptures(step, places)
        self.elsewhere = places.elsewhere
        places.modules.on_return_elsewhere = self.elsewhere.note_call
        self._reads = Reads(step, places, self.generators)
        self.collectives = self._reads.collectives = Collectives(step, places, self._reads)
        self.named = NamedSites(step, places, self.generators, self.collectives, self.captures)
        self.undigested = UndigestedOps(
            step, places, self.plans, self.collectives, self.output_hooks
        )
        self._unseen_writes = UnseenWriteCheck(step)
        self.compiled = CompiledRegions(
            step,
            places,
            self._reads,
            plans=self.plans,
            undigested=self.undigested,
            captures=self.captures,
            output_hooks=self.output_hooks,
            unseen_writes=self._unseen_writes,
        )
        self.native = native_calls(self)
        if self.native is not None:
            self.undigested.teach = self.native.teach_op
        self._accumulation: OpPlan | None = None
        self._expected: Expectation | None = None

    @property
    def phase(self) -> str:
        """Phase of code outside a backward pass; the callback and the optimizer hooks set it.

        Setting it lets devices digest what waits, and begins a new update for ``UnseenWriteCheck``.
        """
        return self.places.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.step.deferred.flush()
        self.places.phase = phase
        self._unseen_writes.begin_update()

    def begin(self, expected: Expectation | None = None) -> None:
        """Start a step; where an output differs from ``expected``,
        check the op's inputs for unseen writes.
        """
        self.step.begin()
        self._reads.begin()
        self.places.backward.clear()
        self.generators.clear()
        self._expected = expected
        self.captures.clear()
        self.undigested.begin()
        self.collectives.begin()
        self.compiled.begin(expected)
        self._unseen_writes.begin()
        self.elsewhere.clear()
        REPLACED.unfollow(self.compiled)  # after a step that was neither finished nor abandoned
        REPLACED.watch(self.compiled)

    def finish(self) -> StepTrace:
        """End the step and return its trace."""
        step = self.step
        with step.lock:
            step.counts.skipped[OTHER_THREAD] += self.elsewhere.num_calls
            program = step.graph.program(step.counts)
            require_whole(program, step.digests)
            settled = step.deferred.settle(step.digests)
            if self._expected is not None:
                self._unseen_writes.check_deferred(self._expected, program, settled)
            digests = (
                np.frombuffer(step.digests, dtype=np.uint64)
                if step.digests
                else np.empty(0, np.uint64)
            )
            trace = self._trace(program, digests)
            self.abandon()
        return trace

    def abandon(self) -> None:
        """Drop the current step and every weak reference it holds; may be called more than once."""
        self.step.discard()
        self.places.backward.clear()
        self.compiled.end()
        self.captures.clear()
        self.collectives.end()
        self.elsewhere.clear()
        REPLACED.unfollow(self.compiled)
        self._expected = None

    def forget_writers(self) -> None:
        """Forget all writers: from now on, anything may write memory
        without the recorder seeing it.
        """
        self.step.ledger.close()
        self.generators.clear()

    @property
    def num_sites(self) -> int:
        return len(self.step.digests)

    @property
    def is_verifying(self) -> bool:
        """Whether outputs are compared with a reference while the step runs."""
        return self._expected is not None

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op, record what it read and wrote, and return its result.

        An op that is not recorded returns early. Otherwise the sites of its new inputs are appended
        before it runs, so that they have its inputs' bits, and those of its outputs after it. A
        call of a method costs 50 nanoseconds, so the checks that most ops pass are written out.
        """
        plan = self.plans.known.get(id(func)) or self.plans.of(func)
        if plan.whole is not None:
            if comes_apart(plan, args, kwargs):
                return TAKE_APART
            plan = plan.whole
        if plan.kind is not _DIGEST:
            return self.undigested.run(plan, func, args, kwargs)

        # where the call belongs, and whether it is recorded
        places = self.places
        if graph_task_id() == -1:
            phase, scope = places.phase, places.modules.current
        else:
            phase, scope = "backward", places.backward.scope()
            if scope is ENGINE and func is _ADD_IN_PLACE:
                # recorded as ``add``; ``plan.call`` still adds in place
                func, plan = _ADD, self._begin_accumulation(args)
            if self.elsewhere.nodes and self.elsewhere.is_running(func):
                return self.undigested.unrecorded(
                    OTHER_THREAD, plan, func, phase, scope, args, kwargs
                )
        if (
            plan.is_reducing
            and (reduced := self.undigested.in_reducer(plan, scope, args, kwargs))
            is not NotImplemented
        ):
            return reduced
        if not places.selects_all and not self._selects(func, phase, scope):
            return self.undigested.unrecorded("unselected", plan, func, phase, scope, args, kwargs)

        step = self.step
        first_site = len(step.digests)  # position of the call's first site; a failure drops it
        was_changed = False
        try:
            consts, reads, input_names = self._read_arguments(plan, args, kwargs)
            if not plan.is_functional and (self._expected is not None or step.deferred.is_used):
                was_changed = self._prepare_writes(plan, args, kwargs, first_site, phase)
            out = plan.call(*args, **kwargs)
        except BaseException:  # including Ctrl-C: the user may catch it and continue the step
            self._reads.roll_back(first_site)
            raise

        if plan.is_functional and out.__class__ is Tensor and plan.is_plain:
            outputs: Sequence[Any] = (out,)
        elif plan.sole_write >= 0:
            outputs = (args[plan.sole_write],)
        else:
            outputs = self._outputs_of(plan, out, args, kwargs)
        if self.output_hooks.every:
            out, outputs = self.output_hooks.call(plan, phase, scope, out, outputs, args, kwargs)

        # which call it is: the predicted one, or one that the graph looks up or builds
        graph = step.graph
        if input_names:
            read_labels = graph.labels_of(reads, first_site, self._reads.row_edges)
        else:
            read_labels = [*map(graph.label_at, reads)]
        names = input_names
        if plan.is_overwrite:  # what the op reads does not identify the tensor it writes
            names = [*input_names, *names_of_written(places, phase, plan, outputs)]
        node = graph.advance_if_likely(
            func, phase, scope, consts, read_labels, names, len(outputs), kwargs
        )
        if node is None:
            # calls without data get no node, so only an unknown call can lack data
            if outputs and not any(map(step.holds_data, outputs)):
                self._reads.roll_back(first_site)
                step.counts.skipped["no_data"] += 1
                return out
            call = Call(func, phase, scope, consts, read_labels, names, len(outputs), tuple(kwargs))
            build = partial(build_op, graph, places, self._reads, plan, args, kwargs, outputs)
            node = graph.go_to(call, reads, build, partial(source_of, scope))
        if input_names:
            self._reads.row_edges.clear()
        step.counts.num_digested += 1
        # only calls that may make autograd nodes: not an update's, and a backward pass's only with
        # create_graph or where it recomputes a forward pass
        if phase != "optimizer" and (phase != "backward" or _is_grad_enabled() or scope.recomputed):
            places.backward.register(node)

        first_output = self._append_outputs(plan, node, outputs, args, kwargs)
        if not plan.is_functional:
            step.deferred.end_read()
        if plan.draws_random:
            self.generators.note_draw(first_output)
        if self._expected is not None:
            read = partial(tensors_read, plan, args, kwargs)
            self._unseen_writes.check_after_call(
                self._expected, first_site, first_output, read, reads, was_changed=was_changed
            )
        if self.native is not None and scope is not ENGINE:
            self.native.teach(plan, func, node, outputs)
        return out

    def _selects(self, func: Any, phase: str, scope: OpScope) -> bool:
        """Return whether the selection includes a call.

        It includes .item() in every module: Python may pass the number to an op in any other.
        """
        return (func is _ITEM and phase != "optimizer") or self.places.selects(phase, scope)

    def _read_arguments(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[int], list[InputName]]:
        """Return a call's constants, the positions of the sites that it reads, and the names of
        its input sites.

        Appends an input site to the step for each input that no recorded site wrote, and for the
        generator that the op draws from. The names are in the order of these sites.
        """
        consts: list[Any] = []
        reads: list[int] = []
        input_names: list[InputName] = []
        if plan.is_overwrite:
            self.collectives.note_copy(plan, args)
            # without the argument that it overwrites
            for _, value in plan.inputs(args, kwargs):
                self._reads.gather(value, consts, reads, input_names)
        else:
            writers = self.step.ledger.writers
            for value in (*args, *kwargs.values()) if kwargs else args:
                value_class = value.__class__
                # an ordinary tensor has one storage; `writer` is an int
                # if one site wrote all of it
                if value_class in PLAIN and value.layout is STRIDED:
                    storage = value.untyped_storage()
                    writer = writers.get(storage_address(storage))
                    if writer.__class__ is int:
                        reads.append(writer)
                    elif writer is None:
                        self._reads.read_first(value, storage, reads, input_names)
                    else:
                        self._reads.read(value, reads, input_names)
                elif value_class in _CONST_CLASSES:
                    consts.append(value)
                else:
                    self._reads.gather(value, consts, reads, input_names)
        if plan.draws_random:
            self._reads.read_generator(args, kwargs, reads, input_names)
        if self._reads.unwritten:
            self._reads.read_unwritten(plan, args, kwargs, reads, input_names)
        return consts, reads, input_names

    def _prepare_writes(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        first_site: int,
        phase: str,
    ) -> bool:
        """Before a call overwrites its arguments, let devices digest their old bits; in a
        verification, return whether something unseen has written one of them.
        """
        written = written_arguments(plan, args, kwargs)
        was_changed = False
        if self._expected is not None:
            was_changed = self._unseen_writes.check_before_write(
                plan, written, args, kwargs, first_site, phase
            )
        if self.step.deferred.is_used:
            self.step.deferred.before_writes(written)
        return was_changed

    def _outputs_of(
        self, plan: OpPlan, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sequence[Any]:
        """Return what a call wrote, without outputs that are still being copied or are workspaces:
        mark their memory instead.
        """
        if plan.may_be_in_flight and (flying := in_flight(plan, out, args, kwargs)) is not None:
            self.undigested.mark_in_flight(*flying)
            return ()
        for index in plan.opaque_outputs:
            if index < len(out) and isinstance(out[index], Tensor):
                self.step.ledger.mark_uninitialised(out[index])
        return written_by_call(plan, out, args, kwargs)

    def _append_outputs(
        self,
        plan: OpPlan,
        node: CallNode,
        outputs: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> int:
        """Append a call's sites after its input sites; return the position of the first output.

        First the numbers among its arguments, if any, then each output, of which the site becomes
        the writer. A node has as many rows as its call has sites.
        """
        step = self.step
        digests, indices = step.digests, step.layout_indices
        if node.number_indices:
            digests.append(node.numbers_bits)
            indices.append(step.layouts.tags[node.numbers_tag].index)
        first_output = position = len(digests)
        slots, ledger = step.layouts.slots, step.ledger
        writers, is_fresh = ledger.writers, plan.is_functional
        parts_read: ArgumentParts = ()
        if node.phase == "forward":  # whose parts determine those of the other phases
            parts_read = parts_of_arguments(args, kwargs, self.places.names.offset_in)
        for output in outputs:
            if output.__class__ in PLAIN and output.layout is STRIDED and not output.is_nested:
                slot_key: tuple[Any, ...] = (output.dtype, output.shape, output.stride())
                if parts_read:
                    slot_key = (*slot_key, parts_read)
                slot = slots.get(slot_key)
                if slot is None:
                    slot = step.layouts.add_strided(slot_key)
                storage = output.untyped_storage()
                if is_fresh:
                    # the storage's own, which no other gets while it is pinned
                    address = pin_storage(storage)
                    ledger.pins.append(address)
                    writers[address] = position
                elif (  # it covers its whole storage, which has a writer
                    slot.is_dense
                    and storage.nbytes() == slot.num_bytes
                    and (known_storage := storage_address(storage)) in writers
                ):
                    writers[known_storage] = position
                else:
                    ledger.write(output, position)
                if slot.is_raw and output.is_cpu and (data := address_of(output)):
                    digests.append(digest_memory(data, slot.num_bytes))
                else:
                    digests.append(step.deferred.digest(position, output, slot))
                indices.append(slot.index)
            else:
                self._append_special(output, parts_read, is_fresh=is_fresh)
            position += 1
        return first_output

    def _trace(self, program: Program, digests: np.ndarray) -> StepTrace:
        step, expected = self.step, self._expected
        indices = step.layout_indices
        return StepTrace(
            program=program,
            digests=digests,
            layout_id=step.layouts.layout_id(indices),
            unseen_writes=frozenset() if expected is None else frozenset(expected.unseen_writes),
            checked=None if expected is None else expected.checked(program.id),
            values=step.graph.values,
            _make_layout=partial(step.layouts.layout, indices),
        )

    def _append_special(self, output: Any, parts: ArgumentParts, *, is_fresh: bool) -> None:
        """Append a number, or a tensor that is not an ordinary strided one.

        A fresh tensor (sparse, a wrapper) may wrap existing tensors,
        whose bytes keep their writers.
        """
        step = self.step
        position = self.num_sites
        if not isinstance(output, Tensor):
            bits, tag = scalar_bits(output)
            step.append_bits(bits, step.layouts.special(tag, detail=describe_parts(parts)))
        elif not step.holds_data(output):
            step.append_bits(0, step.layouts.special("no data"))
        else:
            step.append(output)
            for part in parts_with_memory(output):
                if not (
                    is_fresh and storage_address(part.untyped_storage()) in step.ledger.writers
                ):
                    step.ledger.write(part, position)

    def _begin_accumulation(self, args: tuple[Any, ...]) -> OpPlan:
        """Return the plan for an in-place sum of gradients by the engine, recorded like its
        out-of-place sum; what it overwrites is digested first.

        The engine adds in place if nothing else holds the memory (torch 2.13,
        ``InputBuffer::accumulate``). A deferred digest may hold it too,
        and the program must not depend on that.
        """
        if self.step.deferred.is_used:
            self.step.deferred.before_writes(args[:1])
        self._accumulation = self._accumulation or replace(
            self.plans.of(_ADD), call=self.plans.of(_ADD_IN_PLACE).call
        )
        return self._accumulation
