"""Stretches of a step in which ops are recorded: opened and closed by the user, nested, repeated, out of order."""

import warnings
from collections.abc import Iterable
from typing import Any

from det_callbacks.errors import CoverageWarning, TraceError
from det_callbacks.trace.dispatch import TAKE_APART, DispatchMode, open_modes
from det_callbacks.trace.optimizers import OptimizerPhases
from det_callbacks.trace.outputs import ModuleOutputs
from det_callbacks.trace.recorder import Recorder


class Interceptor(DispatchMode):
    """Hands every op to the recorder; passes them through once it was turned off."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder: Recorder | None = None
        self.recorder = recorder
        self._captures = recorder.passing.graphs.captures
        self._lock = recorder.passing.lock

    @property
    def recorder(self) -> Recorder | None:
        """Who gets the ops; None while they are passed through."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        for one in (self._recorder, recorder):
            if one is not None:
                one.late.sees_writes = one is recorder
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder = self._recorder
        if recorder is None:
            return func(*args, **(kwargs or {}))
        with self._lock:
            if self._captures and recorder.passing.graphs.is_capturing():
                out = recorder.passing.captured(func, args, kwargs or {})
            elif recorder.compiled.inside:
                out = recorder.compiled.dispatch(func, args, kwargs or {})
            else:
                out = recorder.op(func, args, kwargs or {})
        return out if out is not TAKE_APART else self.take_apart(func, args, kwargs or {})


class OpRegion:
    """Lets the recorder see ops while it is open; regions nest, and only the outermost counts.

    What a tensor's writers were is forgotten when a region ends: between regions anything may write it unseen. So
    what an op reads from an earlier region is an input of the later one.

    Args:
        recorder: whose step is under way; its module stack is somebody else's affair.
        is_followed: a HashMode is open around the step, which sees to phases and module outputs.
    """

    def __init__(self, recorder: Recorder, *, is_followed: bool = False) -> None:
        self._recorder = recorder
        self._is_followed = is_followed
        self._phases = OptimizerPhases(recorder, "forward")
        self._outputs = ModuleOutputs(recorder)
        self._mode: Interceptor | None = None
        self._below: list[object] = []
        self.depth = 0

    @property
    def is_dispatching(self) -> bool:
        """Whether its mode is handling an op right now, for which torch has taken it from the stack."""
        return self._mode is not None and self._mode not in open_modes()

    def enter(self) -> None:
        """Open a region; inside another one it changes nothing."""
        self.depth += 1
        if self.depth > 1:
            return
        if not self._is_followed:
            self._phases.open()
            self._outputs.open()
        self._below = open_modes()
        self._mode = Interceptor(self._recorder)
        self._recorder.compiled.open()
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own

    def leave(self) -> None:
        """Close a region.

        Raises:
            TraceError: none is open.
        """
        if not self.depth:
            raise TraceError(
                "There is no region to close: disable_hash_mode was called more often than enable_hash_mode."
            )
        self.depth -= 1
        if not self.depth:
            self._close()

    def leave_all(self) -> None:
        """Close every region; may be called more than once."""
        self.depth = 0
        self._close()

    def suspend(self) -> None:
        """Let ops pass, in a region that is open, until ``resume``: no step is under way."""
        if self._mode is not None:
            self._mode.recorder = None

    def resume(self) -> None:
        """Record ops again where a region is open."""
        if self._mode is not None:
            self._mode.recorder = self._recorder

    def _close(self) -> None:
        mode, self._mode = self._mode, None
        if mode is None:
            return
        if not self._is_followed:
            self._phases.close()
            self._outputs.close()
        self._recorder.compiled.close()
        self._recorder.ledger.close()
        self._recorder.generators.clear()
        mode.recorder = None
        modes = open_modes()
        if mode in modes:
            mode.take_out()
            return
        if modes and modes == self._below:
            # A mode opened before the region was closed inside it, and took ours from the stack instead of itself.
            mode.pop_for_below()
        warnings.warn(
            "A dispatch mode that was open before enable_hash_mode was closed before disable_hash_mode; the ops "
            "between the two were not recorded. Close the region first.",
            CoverageWarning,
            stacklevel=4,
        )
