"""The dispatch mode that passes the ops of a step to a recorder."""

from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from det_callbacks.internals.torch import num_dispatch_modes, pass_on, without_function_modes
from det_callbacks.trace.dispatch import TAKE_APART, DispatchMode
from det_callbacks.trace.recorder import Recorder


class Interceptor(DispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder: Recorder | None = None
        self._native = None if num_dispatch_modes() else recorder.native  # a mode below sees no native kernel
        self._is_entered = False
        self.recorder = recorder
        self._captures = recorder.captures.begun
        self._running_regions = recorder.places.running_regions
        self._lock = recorder.step.lock
        self._plans, self._program = recorder.plans, recorder.plans.program
        self._has_modes_below = num_dispatch_modes() > 0

    @property
    def recorder(self) -> Recorder | None:
        """The recorder that gets the ops, or None while they pass."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        for one in (self._recorder, recorder):
            if one is not None:
                one.step.deferred.see_writes(one is recorder)
        self._recorder = recorder
        self._share()

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
        if self._is_entered and self._recorder is not None and not self._recorder.is_verifying:
            self._native.open(self)

    @property
    @override
    def is_on(self) -> bool:
        return self._recorder is not None

    @override
    def turn_off(self) -> None:
        self.recorder = None

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder = self._recorder
        if recorder is None:
            return pass_on(func, args, kwargs or {})
        plans = self._plans
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
