"""Ops without a deterministic implementation: who called them, and which of them are let through.

Under ``torch.use_deterministic_algorithms(True)`` such an op raises before it computes anything, so under "error" the
call that raised is known, and one that is allowed is simply made again. Under "warn" torch's warning comes only when
the outermost call from Python returns, for a backward pass at its end; so the ops that may warn are called under
"error" first, and again under "warn" where they raise.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from det_callbacks.errors import NondeterministicOpError, NondeterministicOpWarning
from det_callbacks.nondeterminism import read_op_facts
from det_callbacks.patterns import OpPattern
from det_callbacks.runs.evidence import NondeterministicOp
from det_callbacks.settings.catalogue import algorithms_in_force
from det_callbacks.trace.source import Entry, capture_source, engine_entry

# aten/src/ATen/Context.cpp, Context::alertNotDeterministic, torch 2.13
_MARK = "does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True"

_UNDOCUMENTED = frozenset({"aten.kthvalue"})
"""Raises on CUDA (aten/src/ATen/native/cuda/Sorting.cpp), which the docstring of torch 2.13 does not say."""

_set_flags = torch._C._set_deterministic_algorithms


class Alerts:
    """Catches torch's alerts, lets allowed ops through, and keeps a list of all.

    Args:
        allow: patterns ``[phase/][module:]op``.

    Attributes:
        on_new: called when an op is found at a new place, or at a known one under other circumstances.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        self.on_new: Callable[[], None] | None = None
        self._allow = [OpPattern.parse(pattern) for pattern in allow]
        self._found: dict[tuple[str, str, str, tuple[str, ...]], NondeterministicOp] = {}
        self._suspects: frozenset[str] | None = None
        self._silenced: dict[str, Any] = {}

    def close(self) -> None:
        """Let torch's own warnings be heard again."""
        for added in self._silenced.values():
            if added in warnings.filters:
                warnings.filters.remove(added)  # type: ignore[attr-defined]  # a list, declared as a sequence
        if self._silenced:
            warnings._filters_mutated()  # type: ignore[attr-defined]  # undeclared; what catch_warnings does
        self._silenced.clear()

    @property
    def found(self) -> tuple[NondeterministicOp, ...]:
        """The ops found so far, in the order of their first calls."""
        return tuple(self._found.values())

    def is_alert(self, error: BaseException) -> bool:
        """Return whether torch raised an error because an op has no deterministic implementation."""
        return type(error) is RuntimeError and _MARK in str(error)

    def may_warn(self, base: str) -> bool:
        """Return whether it is known that an op ("aten.put_") may have no deterministic implementation."""
        if self._suspects is None:
            documented = (op for fact in read_op_facts() if fact.behaviour == "error" for op in fact.ops)
            self._suspects = _UNDOCUMENTED.union(documented)
        return base in self._suspects

    def trap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that raises under "warn" as well, where ``call`` would only warn."""

        def trapped(*args: Any, **kwargs: Any) -> Any:
            if algorithms_in_force() != "warn":
                return call(*args, **kwargs)
            _set_flags(True, warn_only=False)
            try:
                return call(*args, **kwargs)
            finally:
                _set_flags(True, warn_only=True)

        return trapped

    def handle(
        self,
        error: BaseException,
        call: Callable[[], Any],
        *,
        op: str,
        phase: str,
        module: str,
        source: tuple[str, ...],
    ) -> Any:
        """Make a call again that raised an alert, when it may be made.

        Args:
            error: what it raised.
            call: makes it again.
            op: ``namespace.op.overload``.
            phase: of the call.
            module: qualified name.
            source: the user's lines; replaced by those of a backward or a hook that the user wrote.

        Raises:
            NondeterministicOpError: it may not be made.
        """
        if phase == "backward" and engine_entry() is not Entry.ENGINE:
            source = capture_source()  # a backward written in Python: its own line, not that of its forward
        is_allowed = any(pattern.matches(phase, module, op) for pattern in self._allow)
        message = str(error).split(", but you set")[0]
        found = NondeterministicOp(
            op=op, phase=phase, module=module, source=source, message=message, is_allowed=is_allowed
        )
        self._note(found)
        self._silence(message)
        mode = algorithms_in_force()
        if mode == "error" and not is_allowed:
            where = f"{module}:{op}" if module not in ("", "?") else op
            raise NondeterministicOpError(
                f"{found.place} has no deterministic implementation ({message}). Nothing else is wrong. Use another op "
                f"there, or let this one through: DeterminismSettings(allow=({where!r},)), in Hydra "
                f"'determinism.settings.allow=[\"{where}\"]'.",
                op,
                module,
            ) from error
        _set_flags(True, warn_only=True)
        try:
            return call()
        finally:
            _set_flags(True, warn_only=mode == "warn")

    def _silence(self, message: str) -> None:
        """Keep torch's own warning about a known op quiet: it names no module and no line, and comes at any time.

        Not those about ops that were not caught: nothing goes unsaid.
        """
        # What is added within a catch_warnings of the user's goes with its end.
        if self._silenced.get(message) not in warnings.filters:
            # it is told as a warning of ours instead
            warnings.filterwarnings("ignore", message=re.escape(message), category=UserWarning)
            self._silenced[message] = warnings.filters[0]

    def _note(self, found: NondeterministicOp) -> None:
        key = (found.op, found.phase, found.module, found.source)
        known = self._found.get(key)
        if known is not None:
            self._found[key] = replace(known, num_calls=known.num_calls + 1)
            return
        self._found[key] = found
        if not found.is_allowed and algorithms_in_force() == "warn":
            warnings.warn(
                f"{found.place} has no deterministic implementation ({found.message}).",
                NondeterministicOpWarning,
                stacklevel=2,
            )
        if self.on_new is not None:
            self.on_new()
