"""Runs ops again: what the private dispatch mode hands its calls to."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction as _DisableTorchFunction
from torch._C import _len_torch_dispatch_stack  # looked at in torch 2.13
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes  # looked at in torch 2.13

from det_callbacks.device_generators import is_capturing
from det_callbacks.equivalence.copies import AliasedError, Copies
from det_callbacks.equivalence.difference import difference_of, has_same_bits
from det_callbacks.equivalence.generators import GeneratorStates
from det_callbacks.equivalence.mismatch import Mismatches, OpMismatch, error_of
from det_callbacks.errors import DetCallbacksError
from det_callbacks.trace.building import source_of
from det_callbacks.trace.calls import comes_apart, in_flight, written_arguments, written_by_call
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.dispatch import TAKE_APART
from det_callbacks.trace.overloads import HIDDEN_STATES, OPAQUE_WRITES, OpKind, OpPlan, make_plan
from det_callbacks.trace.places import Places
from det_callbacks.trace.tree import Context, module_of

_graph_task_id = torch._C._current_graph_task_id  # torch 2.13: -1 outside a backward pass
_PLAIN = frozenset({Tensor, nn.Parameter})
_OWN_NAMESPACES = frozenset({"aten", "quantized", "mkldnn", "onednn", "mkl"})
"""Ops of torch's own kernels: they draw from torch's generators only, and say so by a tag."""

_Call = tuple[tuple[Any, ...], dict[str, Any]]
_Differing = tuple[int, Any, Any]
_Place = tuple[str, Context, tuple[str, ...] | None, int]


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


class Checker:
    """Runs each op twice and compares; owns the counts and the mismatches.

    An op that differs is run a third time, so that a fault that came once (a flipped bit) can be told from an op that
    does not agree with itself.

    Args:
        places: where ops run.
        raise_on_mismatch: raise at the op.

    Attributes:
        num_ops: ops seen.
        num_compared: ops whose two runs were compared.
        skipped: reason -> ops that were run once, or could not be compared.
        mismatches: what was found.
    """

    def __init__(self, places: Places, *, raise_on_mismatch: bool) -> None:
        self.num_ops = 0
        self.num_compared = 0
        self.skipped: Counter[str] = Counter()
        self.mismatches = Mismatches()
        self._places = places
        self._raises = raise_on_mismatch
        self._plans: dict[int, CheckPlan] = {}  # by id: hashing an OpOverload runs Python code; a plan keeps it alive
        self._calls: Counter[tuple[str, str, int]] = Counter()

    def begin_block(self) -> None:
        """Count occurrences from the start."""
        self._calls.clear()
        self.mismatches.begin_block()

    def op(self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        if _graph_task_id() == -1:
            phase = self._places.phase
            context: Context = self._places.modules.current
        else:
            phase = "backward"
            context = self._places.backward.context()
        source = self._places.note(func, plan, phase, context)
        reason = check.left_out
        if types:
            standin = [kind for kind in types if kind not in _PLAIN]
            if any(issubclass(kind, FakeTensor | FunctionalTensor) for kind in standin):
                reason = reason or "no_data"
            # they are subclasses of Tensor, declared as any class
            elif any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in standin):  # type: ignore[attr-defined]  # classes
                # the class runs ops on the tensors that it is made of, and those come here again, one by one
                self.skipped["subclass"] += 1
                return NotImplemented
        if check.hidden_state and _argument(plan, check.hidden_state, args, kwargs) is not None:
            reason = "hidden_state"
        if not reason and is_capturing():
            reason = "capturing"
        if reason:
            self.skipped[reason] += 1
            return func(*args, **kwargs)
        place = (phase, module_of(context), id(func))
        occurrence = self._calls[place]
        self._calls[place] = occurrence + 1
        return self._run_twice(check, args, kwargs, phase, context, source, occurrence)

    def _run_twice(
        self,
        check: CheckPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        phase: str,
        context: Context,
        source: tuple[str, ...] | None,
        occurrence: int,
    ) -> Any:
        plan = check.plan
        second_call = third_call = (args, kwargs)
        if plan.writes:
            copied = self._copied_twice(check, args, kwargs)
            if copied is None:
                return plan.call(*args, **kwargs)
            second_call, third_call = copied
        states = None
        if plan.draws_random or check.is_foreign:
            states = GeneratorStates(args, kwargs, with_python=check.is_foreign)
        try:
            out = plan.call(*args, **kwargs)
        except BaseException:  # Ctrl-C too: raised again
            self.skipped["raised"] += 1
            raise
        if plan.may_be_in_flight and all(in_flight(plan, out, args, kwargs)):
            self.skipped["in_flight"] += 1
            return out
        first = written_by_call(plan, out, args, kwargs)
        if not first or not all(map(holds_data, first)):
            self.skipped["no_data" if first else "no_output"] += 1
            return out
        with _no_modes_below():
            second = _run_again(plan, states, *second_call)
            if second is None:
                self.skipped["second_run_raised"] += 1
                return out
            is_transient = False
            try:
                differing = _differing(first, second)
                if differing and (third := _run_again(plan, states, *third_call)) is not None:
                    is_transient = not (_differing(first, third) and _differing(second, third))
            except (TypeError, DetCallbacksError):
                self.skipped["unreadable"] += 1
                return out
            self.num_compared += 1
            with _DisableTorchFunction():
                self._report(plan, differing, (phase, context, source, occurrence), is_transient=is_transient)
        return out

    def _copied_twice(
        self, check: CheckPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Call, _Call] | None:
        """Return the arguments of the second and of the third run; None, counted, when they cannot be copied."""
        written = _written(check, args, kwargs)
        if not all(map(holds_data, written)):
            self.skipped["no_data"] += 1
            return None
        try:
            with _no_modes_below(), _DisableTorchFunction():
                copies = Copies(args, kwargs, written)
                others = Copies(copies.args, copies.kwargs, _written(check, copies.args, copies.kwargs))
        except AliasedError:
            self.skipped["aliased"] += 1
            return None
        except Exception:  # whatever a tensor class cannot do; the op runs once, and is counted as not compared
            self.skipped["not_copied"] += 1
            return None
        return (copies.args, copies.kwargs), (others.args, others.kwargs)

    def _report(self, plan: OpPlan, differing: list[_Differing], place: _Place, *, is_transient: bool) -> None:
        phase, context, source, occurrence = place
        for index, one, other in differing:
            difference = difference_of(one, other)
            mismatch = OpMismatch(
                phase=phase,
                module=module_of(context),
                op=plan.name,
                occurrence=occurrence,
                output=index,
                source=source_of(context) if source is None else source,
                shape=difference.shape,
                dtype=difference.dtype,
                num_elements=difference.num_elements,
                num_differing=difference.num_differing,
                max_ulps=difference.max_ulps,
                is_transient=is_transient,
            )
            self.mismatches.add(mismatch)
            if self._raises:
                raise error_of(mismatch)


def _run_again(
    plan: OpPlan, states: GeneratorStates | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Any] | None:
    """Return what another run of an op wrote, from the generator states of the first; None when it raised."""
    if states is not None:
        states.rewind()
    try:
        out = plan.call(*args, **kwargs)
    except Exception:  # whatever an op raises; the first run stands
        return None
    finally:
        if states is not None:
            states.forward()
    return written_by_call(plan, out, args, kwargs)


def _differing(first: Sequence[Any], second: Sequence[Any]) -> list[_Differing]:
    """Return what two runs wrote with other bits; one that wrote less differs in what it lacks."""
    with _DisableTorchFunction():
        return [
            (index, one, other)
            for index, (one, other) in enumerate(zip_longest(first, second))
            if not has_same_bits(one, other)
        ]


def _written(check: CheckPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an op writes, scratch memory included."""
    values = (_argument(check.plan, name, args, kwargs) for name in check.scratch)
    return written_arguments(check.plan, args, kwargs) + [value for value in values if isinstance(value, Tensor)]


def _argument(plan: OpPlan, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    index = plan.argument_names.index(name)
    return args[index] if index < len(args) else kwargs.get(name)


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
