"""BitwiseEquivalenceMode: runs each op twice on the same inputs,
and reports the ops whose bits differ.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle, zip_longest
from typing import Any, Self

import torch
from torch import Generator, Tensor, UntypedStorage, nn

from det_callbacks.audit.result import EquivalenceError, OpMismatch
from det_callbacks.errors import CoverageWarning, DetCallbacksError, TraceError
from det_callbacks.internals.torch import (
    TORCH,
    FakeTensor,
    FunctionalTensor,
    OpOverload,
    memory_address,
    num_dispatch_modes,
    schema_of,
    storage_address,
    without_function_modes,
    without_modes,
)
from det_callbacks.runs.selection import Selection
from det_callbacks.settings.generators import RewindPoint, is_capturing
from det_callbacks.trace.call_graph import OpScope
from det_callbacks.trace.components import (
    PLAIN,
    difference_of,
    has_same_bits,
    holds_data,
    is_special,
)
from det_callbacks.trace.dispatch import TAKE_APART, DispatchMode
from det_callbacks.trace.modules import source_of
from det_callbacks.trace.optimizers import OptimizerPhases
from det_callbacks.trace.overloads import (
    HIDDEN_STATES,
    OPAQUE_WRITES,
    OpKind,
    OpPlan,
    comes_apart,
    in_flight,
    make_plan,
    tensors_in,
    written_arguments,
    written_by_call,
)
from det_callbacks.trace.places import Places

_ALIGNMENT = 64
"""Bytes that torch aligns host memory to."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

_OWN_NAMESPACES = frozenset({"aten", "quantized", "mkldnn", "onednn", "mkl"})
"""Ops in these namespaces draw from torch's generators only, and have a tag if they draw."""
MAX_KEPT = 1000
_Difference = tuple[int, Any, Any]
"""Index of an output, and what each of the two runs wrote there."""
_FILLS = cycle((0x3F, 0xC0))
"""Bytes that fill memory before an op may allocate it:
small numbers in all floating-point types.
"""


def copied_call(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the arguments of a call, those that it writes replaced by copies.

    Copies the storage of every written argument, and rebuilds each tensor argument on the copy, so
    arguments that share bytes still do.

    Raises:
        TypeError: a tensor is sparse, quantised, nested or a negative view, has no data, or is in
            memory that torch did not align, where kernels may sum in a different order.
    """
    scratch = (plan.argument(name, args, kwargs) for name in OPAQUE_WRITES.get(plan.base, ()))
    written = [
        *written_arguments(plan, args, kwargs),
        *(value for value in scratch if isinstance(value, Tensor)),
    ]
    tensors = {id(tensor): tensor for tensor in tensors_in((*args, *kwargs.values()))}
    if not all(map(holds_data, written)) or any(
        one.is_neg() or is_special(one) for one in (*tensors.values(), *written)
    ):
        raise TypeError("its tensors are not strided, or have no data")
    addresses = {storage_address(tensor.untyped_storage()) for tensor in written}
    on_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors.values():
        if (address := storage_address(tensor.untyped_storage())) in addresses:
            on_storage.setdefault(address, []).append(tensor)
    copies: dict[int, Tensor] = {}
    for group in on_storage.values():
        if memory_address(group[0]) % _ALIGNMENT:
            raise TypeError("its memory is not aligned as torch aligns it")
        storage = group[0].untyped_storage().clone()
        copies.update((id(tensor), _rebuilt(tensor, storage)) for tensor in group)

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copies.get(id(value), value)
        return type(value)(map(replaced, value)) if type(value) in (list, tuple) else value

    return replaced(args), {name: replaced(value) for name, value in kwargs.items()}


def _rebuilt(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return (copy.conj() if tensor.is_conj() else copy).requires_grad_(tensor.requires_grad)


def why_left_out(func: Any, plan: OpPlan) -> str:
    """Return why an op is never run twice; "" if it is."""
    kind = (plan.whole or plan).kind
    if kind is not OpKind.DIGEST:
        return str(kind.value)
    if isinstance(func, OpOverload):
        if not schema_of(func).returns and not plan.writes:
            return "side_effect"
        if _is_foreign(plan) and any(
            "__torch__" in str(item.type) for item in schema_of(func).arguments
        ):
            return "hidden_state"
    return ""


def _is_foreign(plan: OpPlan) -> bool:
    """Return whether an op runs code outside torch, which may draw from any
    generator of the process.
    """
    return plan.base.partition(".")[0] not in _OWN_NAMESPACES


class BitwiseEquivalenceMode:
    """Run every op of the ``with`` block twice on the same inputs,
    and report the ops whose bits differ.

    After a mismatch the mode runs the op a third time; if two of the three runs agree, the mismatch
    is transient (perhaps a flipped bit in hardware). NaN payloads and signed zeros count. The
    program gets the results of the first run, with generators and in-place writes as after one run.
    docs/how-to/replay.md lists what the mode leaves out, and the cost.

    You can enter a mode again; it then adds to its results.

    Args:
        raise_on_mismatch: raise at the first op that differs, instead of collecting mismatches.
        model: module that names are relative to; None names outermost modules by their class.
        base_phase: phase of ops outside a backward pass and an optimizer's step.

    Attributes:
        is_open: whether a block is open.
        places: phases and modules of ops; ``places.phase`` is the phase of ops outside a backward
            pass.
        num_ops: ops seen, compared or skipped.
        num_compared: ops whose two runs were compared.
        num_mismatches: outputs that differed, including those beyond the first 1000.
        skipped: reason -> ops that were not compared.

    Raises:
        EquivalenceError: the op differs and ``raise_on_mismatch`` is set.
        TraceError: the mode is entered twice.

    Examples:
        >>> with BitwiseEquivalenceMode() as mode:
        ...     _ = torch.ones(2, 2) @ torch.rand(2, 2)
        >>> mode.get_mismatches(), mode.num_compared
        ([], 3)
    """

    def __init__(
        self,
        raise_on_mismatch: bool = False,
        *,
        model: nn.Module | None = None,
        base_phase: str = "forward",
    ) -> None:
        TORCH.require()
        self.is_open = False
        self.num_ops = self.num_compared = self.num_mismatches = 0
        self.skipped: Counter[str] = Counter()
        self._raises = raise_on_mismatch
        self._base_phase = base_phase
        self._model = model
        self.places = Places(Selection(), model)
        self._phases = OptimizerPhases(self.places, base_phase, on_end=lambda: self.on_updated())
        self.on_updated: Callable[[], None] = lambda: None  # called after an optimizer's update
        self._mode: DispatchMode | None = None
        self._mismatches: list[OpMismatch] = []
        # by id: hashing an OpOverload runs Python code; a plan keeps it alive
        self._plans: dict[int, tuple[OpPlan, str]] = {}
        self._calls: Counter[tuple[str, str, int]] = Counter()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def begin(self) -> None:
        """Start a block, such as one step; occurrences are counted from here."""
        if self.is_open:
            raise TraceError(
                "BitwiseEquivalenceMode is already open, and runs one block at a time. Leave it "
                "before you enter it."
            )
        self._calls.clear()
        self.places.phase = self._base_phase
        self.is_open = True
        try:
            self._phases.open()
            named = (
                []
                if self._model is None
                else [*self._model.named_parameters(remove_duplicate=False)]
            )
            self.places.name_parameters(reversed(named))
            self.places.backward.clear()
            self.places.modules.open()
            self._mode = DispatchMode(self._op)
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        except BaseException:  # Ctrl-C too: __exit__ is not called
            self.abandon()
            raise

    def finish(self) -> list[OpMismatch]:
        """End the block, and return the mismatches since the last call, at most 1000."""
        self.abandon()
        found, self._mismatches = self._mismatches, []
        return found

    def abandon(self) -> None:
        """End the block in any state; may be called more than once."""
        if not self.is_open:
            return
        self.is_open = False
        self._phases.close()
        self.places.modules.close()
        self.places.backward.clear()
        mode, self._mode = self._mode, None
        if mode is not None and (above := mode.leave()) is not None:
            warnings.warn(
                f"Another dispatch mode ({above}) was opened inside BitwiseEquivalenceMode and "
                "left open. All ops up to here were compared; the mode is off now. Close the other "
                "mode first.",
                CoverageWarning,
                stacklevel=3,
            )

    def get_mismatches(self) -> list[OpMismatch]:
        """Return the first 1000 mismatches of all blocks so far, in order."""
        return list(self._mismatches)

    def _op(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if id(func) not in self._plans:
            plan = make_plan(func)
            self._plans[id(func)] = plan, why_left_out(func, plan)
        plan, reason = self._plans[id(func)]
        if comes_apart(plan, args, kwargs):
            return TAKE_APART
        self.num_ops += 1
        if plan.kind is OpKind.OPAQUE:
            self.skipped[reason] += 1
            self.places.backward.note_unseen()
            return func(*args, **kwargs)
        phase, scope = self.places.now()
        self.places.backward.register_op(func, plan, phase, scope)
        special: list[Any] = [kind for kind in types if kind not in PLAIN]
        if any(issubclass(kind, FakeTensor | FunctionalTensor) for kind in special):
            reason = reason or "no_data"
        elif any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in special):
            # the ops on the inner tensors of the class come here again, one by one
            self.skipped["subclass"] += 1
            return NotImplemented
        if (name := HIDDEN_STATES.get(plan.base)) and plan.argument(name, args, kwargs) is not None:
            reason = "hidden_state"
        if not reason and is_capturing():
            reason = "capturing"
        if reason:
            self.skipped[reason] += 1
            return func(*args, **kwargs)
        return self._run_again(func, plan, phase, scope, (args, kwargs))

    def _run_again(self, func: Any, plan: OpPlan, phase: str, scope: OpScope, call: Call) -> Any:
        occurrence = self._calls[phase, scope.module, id(func)]
        self._calls[phase, scope.module, id(func)] += 1
        rerun = _Rerun(plan, call)
        try:
            rerun.run()
        except BaseException:  # Ctrl-C too
            self.skipped["raised"] += 1
            raise
        if rerun.reason:
            self.skipped[rerun.reason] += 1
        else:
            self.num_compared += 1
        for index, one, other in rerun.differing:
            with _unseen():
                difference = difference_of(one, other)
            mismatch = OpMismatch(
                phase=phase,
                module=scope.module,
                op=plan.name,
                occurrence=occurrence,
                output=index,
                source=source_of(scope),
                is_transient=rerun.is_transient,
                **difference,
            )
            self.num_mismatches += 1
            if len(self._mismatches) < MAX_KEPT:
                self._mismatches.append(mismatch)
            if self._raises:
                raise EquivalenceError(
                    f"{mismatch}. It ran twice on the same inputs with the same generator states; "
                    "all compared ops before it repeated their bits. Use a deterministic op there "
                    "(det-callbacks ops lists them), or collect all mismatches with "
                    "raise_on_mismatch=False.",
                    mismatch,
                )
        return rerun.out


class _Rerun:
    """One call that runs twice, and a third time if the two differ."""

    def __init__(self, plan: OpPlan, call: Call) -> None:
        self._plan, self._call = plan, call
        self._before: RewindPoint | None = None
        self._after: RewindPoint | None = None
        self.out: Any = None  # output of the first run
        self.reason = ""  # why it was not compared
        self.differing: list[_Difference] = []
        self.is_transient = False

    def run(self) -> None:
        plan, (args, kwargs) = self._plan, self._call
        try:
            copies = self._copies()
        except Exception:  # noqa: BLE001  # whatever a tensor class raises
            self.out, self.reason = plan.call(*args, **kwargs), "not_copied"
            return
        self._before = self._generators()
        self.out = plan.call(*args, **kwargs)
        self._after = self._generators()
        first = written_by_call(plan, self.out, args, kwargs)
        if not first:
            self.reason = "no_output"
        elif plan.may_be_in_flight and in_flight(plan, self.out, args, kwargs) is not None:
            self.reason = "in_flight"
        elif not all(map(holds_data, first)):
            self.reason = "no_data"
        else:
            with _no_modes_below():
                self._compare(first, copies)

    def _compare(self, first: Sequence[Any], copies: Sequence[Call]) -> None:
        self._refill_allocator(first)
        second = self._again(copies[0])
        if second is None:
            self.reason = "second_run_raised"
            return
        try:
            self.differing = _differing(first, second)
            if self.differing:
                third = self._again(copies[1])
                self.is_transient = third is not None and not (
                    _differing(first, third) and _differing(second, third)
                )
        except (TypeError, DetCallbacksError):
            self.reason, self.differing = "unreadable", []

    def _copies(self) -> list[Call]:
        """Return two more calls, on copies of what they write."""
        if not self._plan.writes:
            return [self._call] * 2
        with _unseen():
            return [copied_call(self._plan, *self._call) for _ in range(2)]

    def _generators(self) -> RewindPoint | None:
        is_foreign = _is_foreign(self._plan)
        if not (self._plan.draws_random or is_foreign):
            return None
        args, kwargs = self._call
        passed = [value for value in (*args, *kwargs.values()) if isinstance(value, Generator)]
        with _no_modes_below():
            return RewindPoint(passed, with_python=is_foreign)

    def _refill_allocator(self, first: Sequence[Any]) -> None:
        """Have the next run allocate its outputs over different bytes:
        memory freed last is reused first.
        """
        written = {id(tensor) for tensor in written_arguments(self._plan, *self._call)}
        with without_function_modes():
            for tensor in first:
                if (
                    isinstance(tensor, Tensor)
                    and id(tensor) not in written
                    and not is_special(tensor)
                ):
                    size = tensor.untyped_storage().nbytes()
                    torch.empty(size, dtype=torch.uint8, device=tensor.device).fill_(next(_FILLS))

    def _again(self, call: Call) -> Sequence[Any] | None:
        """Run the op again from the same generator states; return what it wrote,
        or None if it raised.
        """
        args, kwargs = call
        if self._before is not None:
            self._before.put_back()
        try:
            out = self._plan.call(*args, **kwargs)
        except Exception:  # noqa: BLE001  # whatever an op raises; the first run counts
            return None
        finally:
            if self._after is not None:
                self._after.put_back()
        return written_by_call(self._plan, out, args, kwargs)


def _differing(first: Sequence[Any], second: Sequence[Any]) -> list[_Difference]:
    with without_function_modes():
        return [
            (index, one, other)
            for index, (one, other) in enumerate(zip_longest(first, second))
            if not has_same_bits(one, other)
        ]


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide the ops of the checks, from torch-function modes too."""
    with _no_modes_below(), without_function_modes():
        yield


def _no_modes_below() -> AbstractContextManager[Any]:
    return without_modes() if num_dispatch_modes() else nullcontext()
