"""Lets a recorder see what runs: ops, by a dispatch mode; optimizer updates; module outputs."""

import warnings
from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from det_callbacks.errors import CoverageWarning, TraceError
from det_callbacks.internals.torch import num_dispatch_modes, pass_on, without_function_modes
from det_callbacks.trace.dispatch import TAKE_APART, DispatchMode
from det_callbacks.trace.module_outputs import ModuleOutputs
from det_callbacks.trace.optimizers import OptimizerPhases
from det_callbacks.trace.recorder import Recorder


class Interceptor(DispatchMode):
    """The dispatch mode that passes the ops of a thread, and of the autograd engine, to a recorder.

    Native code sees the ops first, unless a mode is below this one, or the step is verified.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._has_modes_below = num_dispatch_modes() > 0
        # a mode below does not see the ops that native code runs
        self._native = None if self._has_modes_below else recorder.native
        self._is_entered = False
        self.turn_on()
        self._captures = recorder.captures.captured
        self._running_regions = recorder.places.running_regions
        self._lock = recorder.step.lock
        self._plans, self._program = recorder.plans, recorder.plans.program

    @override
    def __enter__(self) -> "Interceptor":
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        self._is_entered = True
        self._share()
        return self

    @override
    def leave(self) -> str | None:
        self._is_entered = False
        self._share()
        return super().leave()

    def _share(self) -> None:
        """Let the native recorder see the ops first, as long as this mode records them."""
        if self._native is None:
            return
        self._native.close()
        if self._is_entered and self._is_on and not self._recorder.is_verifying:
            self._native.open(self)

    @property
    @override
    def is_on(self) -> bool:
        return self._is_on

    def turn_on(self) -> None:
        self._is_on = True
        self._recorder.step.deferred.see_writes(True)
        self._share()

    @override
    def turn_off(self) -> None:
        self._is_on = False
        self._recorder.step.deferred.see_writes(False)
        self._share()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self._is_on:
            return pass_on(func, args, kwargs or {})
        recorder, plans = self._recorder, self._plans
        hidden = without_function_modes()
        with self._lock, hidden:
            self._program.hidden = hidden
            plans.known = plans.of_python if types or self._has_modes_below else plans.of_native
            if self._captures and recorder.captures.is_capturing():
                out = recorder.undigested.captured(func, args, kwargs or {})
            elif self._running_regions and recorder.places.is_in_region():
                out = recorder.compiled.dispatch(func, args, kwargs or {})
            else:
                out = recorder.op(func, args, kwargs or {})
        return out if out is not TAKE_APART else self.take_apart(func, args, kwargs or {})


class Listener:
    """Passes ops, and with ``phases`` optimizer updates and module outputs, to a recorder."""

    def __init__(self, recorder: Recorder, phases: OptimizerPhases | None) -> None:
        self._recorder = recorder
        self._phases = phases
        self._outputs = ModuleOutputs(recorder.named, recorder.places, recorder.step.lock)
        self.mode: Interceptor | None = None  # None while closed

    def open(self, *, sees_ops: bool) -> None:
        """Start listening."""
        if self._phases is not None:
            self._phases.open()
            if self._recorder.selection.level != "state":
                self._outputs.open()
        self._recorder.compiled.open()
        if sees_ops:
            self.mode = Interceptor(self._recorder)
            self.mode.__enter__()

    def pause(self) -> None:
        """Record no ops until ``unpause``; has no effect while closed."""
        if self.mode is not None:
            self.mode.turn_off()

    def unpause(self) -> None:
        if self.mode is not None:
            self.mode.turn_on()

    def close(self) -> str | None:
        """Stop listening; return the class of a mode above ours, if any:
        ours then stays and passes on all ops.
        """
        if self._phases is not None:
            self._phases.close()
            self._outputs.close()
        self._recorder.compiled.close()
        mode, self.mode = self.mode, None
        return None if mode is None else mode.leave()


class OpRegion:
    """Lets the recorder see ops while a region is open; regions nest,
    and only the outermost counts.

    The end of a region forgets all writers: between regions, anything may write memory unrecorded.
    ``level`` is that of a surrounding HashMode, if any. At "op", the HashMode sees every op anyway,
    and at "state" it does not follow modules, so regions are only counted.
    """

    def __init__(self, recorder: Recorder, *, level: str | None = None) -> None:
        self._recorder = recorder
        self._listener = Listener(
            recorder, OptimizerPhases(recorder, "forward") if level is None else None
        )
        self._is_counted_only = level in ("op", "state")
        self.depth = 0

    def enter(self) -> None:
        """Open a region; has no effect inside another region."""
        self.depth += 1
        if self.depth == 1 and not self._is_counted_only:
            self._listener.open(sees_ops=True)

    def leave(self) -> None:
        """Close a region; raise TraceError if none is open,
        or if a dispatch mode opened inside it is still open.
        """
        if not self.depth:
            raise TraceError(
                "There is no region to close, because disable_hash_mode was called more often than "
                "enable_hash_mode."
            )
        mode = self._listener.mode
        if self.depth == 1 and mode is not None and not mode.is_on_top:
            raise TraceError(
                f"Another dispatch mode ({mode.describe_top()}) is open above that of "
                "enable_hash_mode, or replaced it, so the region is still open. Close that mode "
                "first."
            )
        self.depth -= 1
        if not self.depth:
            self._close()

    def leave_all(self) -> None:
        """Close every region; may be called more than once."""
        self.depth = 0
        self._close()

    def pause(self) -> None:
        """Record no ops in an open region until ``unpause``: no step is under way."""
        self._listener.pause()

    def unpause(self) -> None:
        self._listener.unpause()

    def _close(self) -> None:
        if self._listener.mode is None:
            return
        self.pause()
        self._recorder.forget_writers()
        if self._listener.close() is not None:
            warnings.warn(
                "A region of enable_hash_mode ended while another dispatch mode above it is still "
                "open, so its mode was turned off. Close the other mode first.",
                CoverageWarning,
                stacklevel=4,
            )
