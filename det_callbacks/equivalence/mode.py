"""BitwiseEquivalenceMode: which ops give other bits when they are run again on the same inputs."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Self

from torch import nn

from det_callbacks.equivalence.checker import Checker
from det_callbacks.equivalence.mismatch import OpMismatch
from det_callbacks.errors import CoverageWarning, TraceError
from det_callbacks.trace.dispatch import TAKE_APART, DispatchMode
from det_callbacks.trace.optimizers import OptimizerPhases, in_phase
from det_callbacks.trace.places import Places


class _Interceptor(DispatchMode):
    """Hands every op to the checker; passes them through once it was turned off."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self.checker: Checker | None = checker

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.checker is None:
            return func(*args, **(kwargs or {}))
        out = self.checker.op(func, types, args, kwargs or {})
        return out if out is not TAKE_APART else self.take_apart(func, args, kwargs or {})


class BitwiseEquivalenceMode:
    """Run every op of the ``with`` block twice on the same inputs, and tell those that gave other bits.

    An op that did is run a third time: where two of the three runs agree, the mismatch is transient (a flipped bit of
    the hardware, perhaps), unless it comes again.

    The program gets the results of the first run, and goes on as it would without the mode: generators (torch's on the
    CPU and on CUDA, those passed as arguments; for custom ops also Python's and NumPy's) are put back before the
    second run and stand as after one run when it is over; what an op writes in place is copied before. NaN payloads
    and signed zeros count. The results survive the block; a mode can be entered again, and adds to them.

    Left out, and counted in ``skipped`` by reason: ``view``, ``uninitialised``, ``relayout`` (``set_``, ``resize_``),
    ``collective``, ``opaque`` (higher-order ops), ``no_tensors``, ``no_data`` (fake and meta tensors), ``side_effect``
    (ops that return and write nothing), ``hidden_state`` (random states kept in a tensor or a script object),
    ``capturing`` (CUDA graphs), ``in_flight`` (copies to the host nobody waited for), ``aliased`` and ``not_copied``
    (arguments that cannot be copied as they are), ``unreadable``, ``raised``, ``second_run_raised``, ``no_output``.
    ``subclass`` counts calls on tensor subclasses: the ops they come down to are compared instead.

    It cannot know of what an op does beside its schema: a custom op that writes an argument it does not declare, or
    keeps a state of its own, does so twice. Ops inside compiled regions are not seen, but for extern kernels and
    custom ops. A warning that an op gives at every call may be given twice; filters are left alone. Nondeterminism
    that two runs in a row do not show (threads, memory that is reused) may need several steps.

    Time: each op twice, its outputs read twice (on a GPU one synchronisation an op), and some 30 microseconds an op,
    for a custom op 70 more. A step of a small MLP (114 ops in 0.6 ms) takes 8 times as long, of a transformer of
    6 x 384 2.4 times (two cores of a CPU, torch 2.13).
    Memory: one op's outputs, and two copies of the storages that it writes.

    Args:
        raise_on_mismatch: raise at the first op that differs, instead of collecting.
        model: module that names are relative to; None names outermost modules by their class.

    Attributes:
        is_open: whether a block is under way.

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

    def __init__(self, raise_on_mismatch: bool = False, *, model: nn.Module | None = None) -> None:
        self._setup(model, raise_on_mismatch=raise_on_mismatch, base_phase="forward")

    @classmethod
    def for_training(cls, model: nn.Module, *, raise_on_mismatch: bool = False) -> "BitwiseEquivalenceMode":
        """Return a mode whose blocks are opened and closed by a training loop that also sets the phases."""
        mode = cls.__new__(cls)
        mode._setup(model, raise_on_mismatch=raise_on_mismatch, base_phase="other")
        return mode

    def _setup(self, model: nn.Module | None, *, raise_on_mismatch: bool, base_phase: str) -> None:
        self._base_phase = base_phase
        self._places = Places(model)
        self._phases = OptimizerPhases(self._places, base_phase)
        self._checker = Checker(self._places, raise_on_mismatch=raise_on_mismatch)
        self._interceptor: _Interceptor | None = None
        self.is_open = False

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
        self._checker.begin_block()
        self._places.phase = self._base_phase
        self.is_open = True
        try:
            self._phases.open()
            self._places.open()
            interceptor = _Interceptor(self._checker)
            interceptor.__enter__()  # type: ignore[no-untyped-call]  # torch's own
            self._interceptor = interceptor
        except BaseException:  # Ctrl-C between two of them: nobody will call __exit__
            self.abandon()
            raise

    def finish(self) -> list[OpMismatch]:
        """End the block and return its mismatches, at most 1000 and each with count 1."""
        self.abandon()
        return self._checker.mismatches.block

    def abandon(self) -> None:
        """End the block, whatever state it is in; may be called more than once."""
        if not self.is_open:
            return
        self.is_open = False
        self._phases.close()
        self._places.close()
        interceptor, self._interceptor = self._interceptor, None
        if interceptor is None:
            return
        if interceptor.is_on_top:
            interceptor.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
            return
        interceptor.checker = None  # leaving would pop whatever is on top, and that is not ours
        warnings.warn(
            f"Another dispatch mode ({interceptor.describe_top()}) was opened inside BitwiseEquivalenceMode and left "
            "open; what ran up to here was compared, and the mode is off from here on. Close that mode first.",
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
        """Return the mismatches of all blocks so far: one for each place with its count, at most 1000."""
        return list(self._checker.mismatches)

    @property
    def num_mismatches(self) -> int:
        """Outputs found to differ, those that were not kept included."""
        return self._checker.mismatches.num_found

    @property
    def num_ops(self) -> int:
        """Ops seen: those compared and those in ``skipped``."""
        return self._checker.num_ops

    @property
    def num_compared(self) -> int:
        """Ops whose two runs were compared."""
        return self._checker.num_compared

    @property
    def skipped(self) -> Mapping[str, int]:
        """Reason -> ops that were not compared."""
        return MappingProxyType(self._checker.skipped)
