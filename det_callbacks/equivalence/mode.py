"""BitwiseEquivalenceMode: which ops give other bits when they are run again on the same inputs."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from types import TracebackType
from typing import Any, Self

from torch import Generator, Tensor, nn
from torch._C import DisableTorchFunction as _DisableTorchFunction
from torch._C import _len_torch_dispatch_stack  # looked at in torch 2.13
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes  # looked at in torch 2.13

from det_callbacks.audit import OpMismatch
from det_callbacks.equivalence.second_run import Call, copied_call, difference_of, has_same_bits
from det_callbacks.errors import CoverageWarning, DetCallbacksError, EquivalenceError, TraceError
from det_callbacks.rng import RewindPoint, is_capturing
from det_callbacks.trace.backward import OpPlaces
from det_callbacks.trace.components import PLAIN, holds_data
from det_callbacks.trace.dispatch import TAKE_APART, DispatchMode
from det_callbacks.trace.engine import graph_task_id
from det_callbacks.trace.optimizers import OptimizerPhases, in_phase
from det_callbacks.trace.overloads import (
    HIDDEN_STATES,
    OPAQUE_WRITES,
    OpKind,
    OpPlan,
    comes_apart,
    in_flight,
    make_plan,
    written_arguments,
    written_by_call,
)
from det_callbacks.trace.program_trie import OpScope
from det_callbacks.trace.sites import source_of

_OWN_NAMESPACES = frozenset({"aten", "quantized", "mkldnn", "onednn", "mkl"})
"""Ops of torch's own kernels: they draw from torch's generators only, and say so by a tag."""
MAX_KEPT = 1000
"""Mismatches that are kept; more are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """How calls of one overload are checked.

    Attributes:
        plan: what tracing knows of it.
        left_out: why it is never run twice; "" when it is.
        scratch: arguments that it uses as scratch memory.
        hidden_state: argument that holds the state of a random generator, advanced without saying so; "" if none.
        is_foreign: not torch's own code: it may draw from any generator of the process.
    """

    plan: OpPlan
    left_out: str
    scratch: frozenset[str]
    hidden_state: str
    is_foreign: bool

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the arguments that a call writes, scratch memory included."""
        values = (self.plan.argument(name, args, kwargs) for name in self.scratch)
        return written_arguments(self.plan, args, kwargs) + [value for value in values if isinstance(value, Tensor)]


def make_check_plan(func: Any) -> CheckPlan:
    """Return how calls of an op are checked."""
    plan = make_plan(func)
    namespace = plan.base.partition(".")[0]
    kind = (plan.whole or plan).kind
    left_out = "" if kind is OpKind.DIGEST else kind.value
    if not left_out and isinstance(func, OpOverload):
        schema = func._schema
        if not schema.returns and not plan.writes:
            left_out = "side_effect"
        elif namespace not in _OWN_NAMESPACES and any("__torch__" in str(item.type) for item in schema.arguments):
            left_out = "hidden_state"
    return CheckPlan(
        plan=plan,
        left_out=left_out,
        scratch=OPAQUE_WRITES.get(plan.base, frozenset()),
        hidden_state=HIDDEN_STATES.get(plan.base, ""),
        is_foreign=namespace not in _OWN_NAMESPACES,
    )


class BitwiseEquivalenceMode:
    """Run every op of the ``with`` block twice on the same inputs, and report those that gave other bits.

    An op that did is run a third time: where two of the three runs agree, the mismatch is transient (a flipped bit of
    the hardware, perhaps), unless it comes again.

    The program gets the results of the first run, and goes on as it would without the mode: generators (torch's on the
    CPU and on CUDA, those passed as arguments; for custom ops also Python's and NumPy's) are put back before the
    second run and stand as after one run when it is over; what an op writes in place is copied before. NaN payloads
    and signed zeros count. The results survive the block; a mode can be entered again, and adds to them.

    Left out, and counted in ``skipped`` by reason: ``view``, ``uninitialised``, ``relayout`` (``set_``, ``resize_``),
    ``collective``, ``opaque`` (higher-order ops), ``no_tensors``, ``no_data`` (fake and meta tensors), ``side_effect``
    (ops that return and write nothing), ``hidden_state`` (random states kept in a tensor or a script object),
    ``capturing`` (CUDA graphs), ``in_flight`` (copies to the host nobody waited for), ``not_copied`` (ops that write,
    and take a sparse, quantised or nested tensor, or write memory that NumPy made), ``unreadable``, ``raised``,
    ``second_run_raised``, ``no_output``.
    ``subclass`` counts calls on tensor subclasses: the ops they come down to are compared instead.

    It cannot know of what an op does beside its schema: a custom op that writes an argument it does not declare, or
    keeps a state of its own, does so twice. Ops inside compiled regions are not seen, but for extern kernels and
    custom ops. A warning that an op gives at every call may be given twice. Nondeterminism that two runs in a row do
    not show (threads, memory that is reused) may need several steps.

    Time: each op twice, its outputs read twice (on a GPU one synchronisation an op), and some 30 microseconds an op,
    for a custom op 150 more: a step of a small MLP takes 8 times as long, a transformer of 6 x 384 2.4 times (two cores
    of a CPU, torch 2.13). Memory: one op's outputs, and two copies of the storages that it writes.

    Args:
        raise_on_mismatch: raise at the first op that differs, instead of collecting.
        model: module that names are relative to; None names outermost modules by their class.
        base_phase: phase of what runs outside a backward pass and an optimizer's step.

    Attributes:
        is_open: whether a block is under way.
        num_ops: ops seen: those compared and those in ``skipped``.
        num_compared: ops whose two runs were compared.
        num_mismatches: outputs found to differ, those that were not kept included.
        skipped: reason -> ops that were not compared.

    Raises:
        EquivalenceError: from the op, an op differs and ``raise_on_mismatch`` is set.
        TraceError: the mode is entered twice.

    Example:
        >>> import torch
        >>> from det_callbacks import BitwiseEquivalenceMode
        >>> with BitwiseEquivalenceMode() as mode:
        ...     _ = torch.ones(2, 2) @ torch.rand(2, 2)
        >>> mode.get_mismatches(), mode.num_compared
        ([], 3)
    """

    def __init__(
        self, raise_on_mismatch: bool = False, *, model: nn.Module | None = None, base_phase: str = "forward"
    ) -> None:
        self.is_open = False
        self.num_ops = self.num_compared = self.num_mismatches = 0
        self.skipped: Counter[str] = Counter()
        self._raises = raise_on_mismatch
        self._base_phase = base_phase
        self._places = OpPlaces(model)
        self._phases = OptimizerPhases(self._places, base_phase)
        self._mode: DispatchMode | None = None
        self._mismatches: list[OpMismatch] = []
        self._plans: dict[int, CheckPlan] = {}  # by id: hashing an OpOverload runs Python code; a plan keeps it alive
        self._calls: Counter[tuple[str, str, int]] = Counter()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abandon()

    def begin(self) -> None:
        """Start a block, such as one step: occurrences are counted from its start."""
        if self.is_open:
            raise TraceError(
                "BitwiseEquivalenceMode is already open: it runs one block at a time. Leave it before entering again."
            )
        self._calls.clear()
        self._places.phase = self._base_phase
        self.is_open = True
        try:
            self._phases.open()
            self._places.open()
            self._mode = DispatchMode(self._op)
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        except BaseException:  # Ctrl-C between two of them: nobody will call __exit__
            self.abandon()
            raise

    def finish(self) -> list[OpMismatch]:
        """End the block; return the mismatches since the last call, at most 1000, and forget them."""
        self.abandon()
        found, self._mismatches = self._mismatches, []
        return found

    def abandon(self) -> None:
        """End the block, whatever state it is in; may be called more than once."""
        if not self.is_open:
            return
        self.is_open = False
        self._phases.close()
        self._places.close()
        mode, self._mode = self._mode, None
        if mode is not None and (above := mode.leave()) is not None:
            warnings.warn(
                f"Another dispatch mode ({above}) was opened inside BitwiseEquivalenceMode and left open; what ran up "
                "to here was compared, and the mode is off from here on. Close that mode first.",
                CoverageWarning,
                stacklevel=3,
            )

    @property
    def phase(self) -> str:
        """Phase of what runs outside a backward pass; set by whoever knows."""
        return self._places.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._places.phase = phase

    def marks_forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with phase forward while it runs."""
        return in_phase(self._places, "forward", function)

    def get_mismatches(self) -> list[OpMismatch]:
        """Return the mismatches of all blocks so far, in order; the first 1000."""
        return list(self._mismatches)

    def _op(self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and return what it returned, the first time."""
        check = self._plans.get(id(func))
        if check is None:
            check = self._plans[id(func)] = make_check_plan(func)
        plan = check.plan
        if comes_apart(plan, args, kwargs):
            return TAKE_APART
        self.num_ops += 1
        if plan.kind is OpKind.OPAQUE:
            self.skipped[check.left_out] += 1
            self._places.backward.note_unseen()
            return func(*args, **kwargs)
        if graph_task_id() == -1:
            phase = self._places.phase
            context: OpScope = self._places.modules.current
        else:
            phase = "backward"
            context = self._places.backward.scope()
        source = self._places.note(func, plan, phase, context)
        reason = check.left_out
        if types:
            standin = [kind for kind in types if kind not in PLAIN]
            if any(issubclass(kind, FakeTensor | FunctionalTensor) for kind in standin):
                reason = reason or "no_data"
            # they are subclasses of Tensor, declared as any class
            elif any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in standin):  # type: ignore[attr-defined]  # classes
                # the class runs ops on the tensors that it is made of, and those come here again, one by one
                self.skipped["subclass"] += 1
                return NotImplemented
        if check.hidden_state and plan.argument(check.hidden_state, args, kwargs) is not None:
            reason = "hidden_state"
        if not reason and is_capturing():
            reason = "capturing"
        if reason:
            self.skipped[reason] += 1
            return func(*args, **kwargs)
        module = context.module
        occurrence = self._calls[phase, module, id(func)]
        self._calls[phase, module, id(func)] += 1
        out, differing, is_transient = self._run_twice(check, args, kwargs)
        for index, one, other in differing:
            with _no_modes_below(), _DisableTorchFunction():
                difference = difference_of(one, other)
            mismatch = OpMismatch(
                phase=phase,
                module=module,
                op=plan.name,
                occurrence=occurrence,
                output=index,
                source=source_of(context) if source is None else source,
                is_transient=is_transient,
                **difference,
            )
            self._add(mismatch)
        return out

    def _add(self, mismatch: OpMismatch) -> None:
        self.num_mismatches += 1
        if len(self._mismatches) < MAX_KEPT:
            self._mismatches.append(mismatch)
        if self._raises:
            raise EquivalenceError(
                f"{mismatch}. It was run twice on the same inputs with the same generator states; every op before it "
                "gave the same bits twice, as far as they were compared. Use a deterministic op there (det-callbacks "
                "ops lists what torch says of its own), or collect all of them with raise_on_mismatch=False.",
                mismatch,
            )

    def _run_twice(
        self, check: CheckPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[tuple[int, Any, Any]], bool]:
        """Return what the first run returned, what the second wrote otherwise, and whether a third agreed with one."""
        plan = check.plan
        calls: list[Call] = [(args, kwargs)] * 2
        if plan.writes:
            calls, reason = _copied_twice(check, args, kwargs)
            if reason:
                self.skipped[reason] += 1
                return plan.call(*args, **kwargs), [], False
        passed = [value for value in (*args, *kwargs.values()) if isinstance(value, Generator)]
        draws = plan.draws_random or check.is_foreign
        before = _generators(passed, check) if draws else None
        try:
            out = plan.call(*args, **kwargs)
        except BaseException:  # Ctrl-C too: raised again
            self.skipped["raised"] += 1
            raise
        after = _generators(passed, check) if draws else None
        first = written_by_call(plan, out, args, kwargs)
        reason = "" if first and all(map(holds_data, first)) else "no_data" if first else "no_output"
        if plan.may_be_in_flight and all(in_flight(plan, out, args, kwargs)):
            reason = "in_flight"
        differing: list[tuple[int, Any, Any]] = []
        is_transient = False
        if not reason:
            with _no_modes_below():
                second = _run_again(plan, before, after, calls[0])
                try:
                    if second is None:
                        reason = "second_run_raised"
                    elif differing := _differing(first, second):
                        third = _run_again(plan, before, after, calls[1])
                        is_transient = third is not None and not (
                            _differing(first, third) and _differing(second, third)
                        )
                except (TypeError, DetCallbacksError):
                    reason, differing = "unreadable", []
        if reason:
            self.skipped[reason] += 1
        else:
            self.num_compared += 1
        return out, differing, is_transient


def _copied_twice(check: CheckPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Call], str]:
    """Return the second and the third call, with copies of what they write; or why that cannot be done."""
    written = check.written(args, kwargs)
    if not all(map(holds_data, written)):
        return [], "no_data"
    try:
        with _no_modes_below(), _DisableTorchFunction():
            copies = [copied_call((args, kwargs), written) for _ in range(2)]
    except Exception:  # whatever a tensor class cannot do; the op runs once, and is counted as not compared
        return [], "not_copied"
    calls = [copied for copied in copies if copied is not None]
    return calls, "" if len(calls) == 2 else "not_copied"


def _generators(passed: Sequence[Generator], check: CheckPlan) -> RewindPoint:
    with _no_modes_below():
        return RewindPoint(passed, with_python=check.is_foreign)


def _run_again(plan: OpPlan, before: RewindPoint | None, after: RewindPoint | None, call: Call) -> Sequence[Any] | None:
    """Return what another run of an op wrote, from the generator states of the first; None when it raised."""
    args, kwargs = call
    if before is not None:
        before.put_back()
    try:
        out = plan.call(*args, **kwargs)
    except Exception:  # whatever an op raises; the first run stands
        return None
    finally:
        if after is not None:
            after.put_back()
    return written_by_call(plan, out, args, kwargs)


def _differing(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[int, Any, Any]]:
    """Return what two runs wrote with other bits; one that wrote less differs in what it lacks."""
    with _DisableTorchFunction():
        return [
            (index, one, other)
            for index, (one, other) in enumerate(zip_longest(first, second))
            if not has_same_bits(one, other)
        ]


@contextmanager
def _no_modes_below() -> Iterator[None]:
    """Keep the dispatch modes below this one from seeing what is done to check.

    Torch-function modes stay: where one is on in the first run of an op, it is on in the second.
    """
    if _len_torch_dispatch_stack():
        with _disable_current_modes():
            yield
    else:
        yield
