"""Runs ops twice: what the private dispatch mode hands its calls to."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from det_callbacks.trace.calls import in_flight, written_arguments, written_by_call
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.overloads import HIDDEN_STATES, OPAQUE_WRITES, OpKind, OpPlan, make_plan
from det_callbacks.trace.places import Places
from det_callbacks.trace.tree import Context, module_of

_graph_task_id = torch._C._current_graph_task_id  # torch 2.13: -1 outside a backward pass
_PLAIN = frozenset({Tensor, nn.Parameter})
_OWN_NAMESPACES = frozenset({"aten", "quantized", "mkldnn", "onednn", "mkl"})
"""Ops of torch's own kernels: they draw from torch's generators only, and say so by a tag."""


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
    left_out = "" if plan.kind is OpKind.DIGEST else plan.kind.value
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
        self.num_ops += 1
        plan = check.plan
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
        again: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        if plan.writes:
            again = self._copied(check, args, kwargs)
        if again is None:
            return plan.call(*args, **kwargs)
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
            second = self._second(check, states, *again)
            if second is not None:
                with _DisableTorchFunction():
                    self._compare(plan, first, second, phase, context, source, occurrence)
        return out

    def _copied(
        self, check: CheckPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of the second run; None, counted, when they cannot be copied."""
        written = written_arguments(check.plan, args, kwargs)
        for name in check.scratch:
            value = _argument(check.plan, name, args, kwargs)
            if isinstance(value, Tensor):
                written.append(value)
        if not all(map(holds_data, written)):
            self.skipped["no_data"] += 1
            return None
        try:
            with _no_modes_below(), _DisableTorchFunction():
                copies = Copies(args, kwargs, written)
        except AliasedError:
            self.skipped["aliased"] += 1
            return None
        except Exception:  # whatever a tensor class cannot do; the op runs once, and is counted as not compared
            self.skipped["not_copied"] += 1
            return None
        return copies.args, copies.kwargs

    def _second(
        self, check: CheckPlan, states: GeneratorStates | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what the second run wrote; None, counted, when it raised."""
        plan = check.plan
        if states is not None:
            states.rewind()
        try:
            out = plan.call(*args, **kwargs)
        except Exception:  # whatever an op raises; the first run stands, and it is counted as not compared
            self.skipped["second_run_raised"] += 1
            return None
        finally:
            if states is not None:
                states.forward()
        return written_by_call(plan, out, args, kwargs)

    def _compare(
        self,
        plan: OpPlan,
        first: Any,
        second: Any,
        phase: str,
        context: Context,
        source: tuple[str, ...] | None,
        occurrence: int,
    ) -> None:
        if len(first) != len(second):
            second = [*second, *(None for _ in first)]
        try:
            differing = [
                index
                for index, (one, other) in enumerate(zip(first, second, strict=False))
                if not has_same_bits(one, other)
            ]
        except (TypeError, DetCallbacksError):
            self.skipped["unreadable"] += 1
            return
        self.num_compared += 1
        for index in differing:
            difference = difference_of(first[index], second[index])
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
            )
            self.mismatches.add(mismatch)
            if self._raises:
                raise error_of(mismatch)


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
