"""The native recorder: C++ records the calls that a step is likely to make next,
on the ledger of ``Recorder``.

``native/attempt.h`` compares a call with the likely node of the call graph before it runs. It
records that call, and passes any other to Python, which records it and teaches its node. So rows,
names and source lines come from the code that records without it,
and both recorders write the same run.
"""

import ctypes
from collections.abc import Sequence
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from det_callbacks.digest.host import digest_memory
from det_callbacks.internals.torch import RUN_BACKWARD, is_zero_tensor, schema_of
from det_callbacks.native.build import load
from det_callbacks.trace.backward import of_accumulation
from det_callbacks.trace.call_graph import CallNode
from det_callbacks.trace.components import PLAIN, STRIDED
from det_callbacks.trace.overloads import OpKind, OpPlan, make_plan

DTYPES: dict[str, torch.dtype] = {
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Half": torch.float16,
    "Float": torch.float32,
    "Double": torch.float64,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "Bool": torch.bool,
    "BFloat16": torch.bfloat16,
}
"""By torch's name in C++, the dtypes whose tensors the native recorder digests."""

_KNOWN_DTYPES = frozenset(DTYPES.values())


class NativeCalls:
    """What the native recorder knows of the calls of one ``Recorder``.

    Attributes:
        num_native: number of ops that it recorded.
        num_python: number of ops that it passed to Python.
    """

    def __init__(self, library: ctypes.PyDLL, recorder: Any) -> None:
        self._library = library
        self._address = ctypes.c_void_p(library.det_new())
        self._plans = recorder.plans
        # ``id`` of an op that a plan keeps alive -> whether C++ may record it
        self._taught: dict[int, bool] = {}
        self._is_open = False
        self._taken = (0, 0)
        # a mode may close after that
        finalize(self, library.det_delete, self._address).atexit = False
        step, places = recorder.step, recorder.places
        # in the order of ``Bound`` in state.h, which keeps them while a mode is open
        self._objects = (
            *(step, step.graph, step.ledger, step.ledger.writers, step.deferred, step.layouts),
            *(places, places.modules, places.backward, places.backward.threads, places.names),
            *(
                places.parameter_names,
                places.elsewhere,
                recorder.captures.captured,
                places.running_regions,
            ),
            *(recorder.output_hooks, step.lock.acquire, step.lock.release, step.layouts.of_numbers),
            *(
                step.ledger.write_part,
                digest_memory,
                of_accumulation,
                DTYPES,
                RUN_BACKWARD,
                Tensor,
                nn.Parameter,
            ),
        )

    @property
    def num_native(self) -> int:
        return int(self._library.det_num_native(self._address))

    @property
    def num_python(self) -> int:
        return int(self._library.det_num_python(self._address))

    def take_counts(self) -> tuple[int, int]:
        """Return how many ops it recorded, and passed to Python, since this was last called."""
        taken, self._taken = self._taken, (self.num_native, self.num_python)
        return self._taken[0] - taken[0], self._taken[1] - taken[1]

    def open(self, mode: object) -> None:
        """Let C++ see the ops of a dispatch mode of this thread first."""
        step = self._objects[0]
        generations = step.graph.num_forgets, step.layouts.num_forgets
        self._is_open = bool(
            self._library.det_open(self._address, mode, self._objects, *generations)
        )

    def close(self) -> None:
        """Let Python record every op; may be called more than once."""
        if self._is_open:
            self._is_open = False
            self._library.det_close(self._address)

    def teach_op(self, plan: OpPlan, func: Any) -> bool:
        """Teach the op that runs; return whether C++ may record its calls."""
        if not self._is_open or self._plans.known is not self._plans.of_native:
            return False
        is_taught = self._taught.get(id(func))
        if is_taught is None:
            is_taught = self._taught[id(func)] = _is_plain(plan, func) and self._plans.runs_kernel(
                func
            )
            if is_taught:
                self._library.det_teach_op(_facts_of(plan, func))
        return is_taught

    def teach(self, plan: OpPlan, func: Any, node: CallNode, outputs: Sequence[Any]) -> None:
        """Teach the node of the call that was just recorded."""
        if (
            self.teach_op(plan, func)
            and not (plan.is_reducing and node.scope.name)
            and all(map(_is_known, outputs))
        ):
            self._library.det_teach(node)


def native_calls(recorder: Any) -> NativeCalls | None:
    """Return the native recorder for a ``Recorder``, or None where Python records everything."""
    library = load() if recorder.selection.level == "op" else None
    return None if library is None else NativeCalls(library, recorder)


def _is_plain(plan: OpPlan, func: Any) -> bool:
    """Return whether calls of an op need only their arguments and results to be recorded."""
    if plan.kind is OpKind.IGNORED:
        return True
    if plan.kind not in (OpKind.DIGEST, OpKind.VIEW) or make_plan(func).kind is OpKind.COMPOSITE:
        return False
    returns_list = any(str(one.type).startswith("List") for one in schema_of(func).returns)
    if plan.kind is OpKind.DIGEST and returns_list and not plan.base.startswith("aten._foreach_"):
        return False  # a length that no argument says, which is known only after the call
    return not (plan.draws_random or plan.is_overwrite or plan.opaque_outputs)


def _facts_of(plan: OpPlan, func: Any) -> tuple[Any, ...]:
    """Return what ``det_teach_op`` wants to know of an op."""
    conditions = [plan.written_if.get(write.name) for write in plan.writes]
    return (
        func,
        func.name(),
        plan.kind is OpKind.VIEW,
        plan.is_functional,
        plan.kind.value if plan.kind is OpKind.IGNORED else None,
        tuple(write.index for write in plan.writes),
        tuple(-1 if name is None else plan.argument_names.index(name) for name in conditions),
        plan.fresh_returns,
    )


def _is_known(output: Any) -> bool:
    """Return whether C++ digests an output as Python does."""
    if not isinstance(output, Tensor):
        return isinstance(output, bool | int | float)
    is_plain = (
        output.__class__ in PLAIN
        and output.layout is STRIDED
        and output.is_cpu
        and not output.is_nested
    )
    if not is_plain or output.dtype not in _KNOWN_DTYPES:
        return False
    return not (output.is_conj() or output.is_neg() or is_zero_tensor(output))
