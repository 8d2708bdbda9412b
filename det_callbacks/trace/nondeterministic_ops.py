"""How each op is recorded, and the ops without a deterministic implementation.

Under "error" such an op raises before it computes anything. Under "warn" torch warns only after the
outermost call from Python returns, so suspects are first called under "error".
"""

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from det_callbacks.environment.nondeterminism import read_op_facts
from det_callbacks.errors import NondeterministicOpError, NondeterministicOpWarning
from det_callbacks.internals.torch import (
    OpOverload,
    current_node,
    graph_task_id,
    kernel_of,
    next_sequence_number,
    sequence_number,
    set_deterministic,
)
from det_callbacks.runs.evidence import NondeterministicOp
from det_callbacks.runs.selection import OpPattern
from det_callbacks.settings.catalogue import algorithms_in_force
from det_callbacks.trace.call_graph import OpScope
from det_callbacks.trace.dispatch import TAKE_APART, DispatchMode, ProgramCode
from det_callbacks.trace.modules import UNKNOWN_MODULE, ModuleStack, source_of
from det_callbacks.trace.overloads import OpPlan, comes_apart, make_plan

# aten/src/ATen/Context.cpp, Context::alertNotDeterministic
_MARK = (
    "does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True"
)

# raises on CUDA (ATen/native/cuda/Sorting.cpp), undocumented in torch 2.11 to 2.15
_UNDOCUMENTED = frozenset({"aten.kthvalue"})


class NondeterministicOps:
    """Catches torch's errors for ops without a deterministic implementation: runs an allowed op
    again, and lists all of them.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        # called when ``found`` grows
        self.on_new: Callable[[tuple[NondeterministicOp, ...]], None] | None = None
        self._allow = [OpPattern.parse(pattern) for pattern in allow]
        self._found: dict[tuple[Any, ...], NondeterministicOp] = {}
        self._silenced: dict[str, Any] = {}  # message of torch -> our filter for its warning

    def close(self) -> None:
        """Remove our filters of torch's warnings."""
        silenced = self._silenced.values()
        kept = [each for each in warnings.filters if each not in silenced]
        warnings.filters[:] = kept  # type: ignore[index]  # a list, declared as a sequence
        with warnings.catch_warnings():
            pass  # exiting clears Python's cache of filters

    @property
    def found(self) -> tuple[NondeterministicOp, ...]:
        return tuple(self._found.values())

    def guard(self, plan: OpPlan, place: Callable[[], tuple[str, OpScope]]) -> Callable[..., Any]:
        """Return a function that calls an op, and calls it again if it raised as
        nondeterministic but is allowed.
        """
        call, may_warn = plan.call, self.may_alert(plan)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            mode = algorithms_in_force() if may_warn else None
            if mode == "warn":
                set_deterministic(True, warn_only=False)
            try:
                return call(*args, **kwargs)
            except RuntimeError as error:
                if type(error) is not RuntimeError or _MARK not in str(error):
                    raise
                mode = mode or algorithms_in_force()
                self._require_allowed(error, plan.name, mode, *place())
                set_deterministic(True, warn_only=True)
                return call(*args, **kwargs)
            finally:
                if mode in ("warn", "error"):
                    set_deterministic(True, warn_only=mode == "warn")

        return guarded

    def may_alert(self, plan: OpPlan) -> bool:
        """Return whether torch may report that an op has no deterministic implementation."""
        return plan.base in self._suspects

    @cached_property
    def _suspects(self) -> frozenset[str]:
        return _UNDOCUMENTED.union(
            op for fact in read_op_facts() if fact.behaviour == "error" for op in fact.ops
        )

    def _require_allowed(
        self, error: RuntimeError, op: str, mode: str, phase: str, scope: OpScope
    ) -> None:
        """List the op that raised ``error``, and warn at its first call; raise if ``mode`` is
        "error" and it is not allowed.
        """
        module, source = scope.module, source_of(scope)
        is_allowed = any(pattern.matches(phase, module, op) for pattern in self._allow)
        message = str(error).split(", but you set")[0]
        listed = NondeterministicOp(
            op=op, phase=phase, module=module, source=source, message=message, is_allowed=is_allowed
        )
        earlier = self._found.get(key := (op, phase, module, source))
        self._found[key] = (
            listed if earlier is None else replace(earlier, num_calls=earlier.num_calls + 1)
        )
        words = f"{listed.place} has no deterministic implementation ({message})."
        if earlier is None and mode == "warn" and not is_allowed:
            warnings.warn(words, NondeterministicOpWarning, stacklevel=2)
        if earlier is None and self.on_new is not None:
            self.on_new(self.found)
        self._silence(message)
        if mode == "error" and not is_allowed:
            where = f"{module}:{op}" if module not in ("", "?") else op
            raise NondeterministicOpError(
                f"{words} Use a different op there, or allow this one in the settings of "
                f"DeterminismCallback or TrainingRun: DeterminismSettings(allow=({where!r},)), in "
                f"Hydra 'determinism.settings.allow=[\"{where}\"]'.",
                op,
                module,
            ) from error

    def _silence(self, message: str) -> None:
        """Ignore torch's warning, which names no module: ours replaces it."""
        # a catch_warnings in user code may have dropped the filter
        if self._silenced.get(message) not in warnings.filters:
            warnings.filterwarnings("ignore", message=re.escape(message), category=UserWarning)
            self._silenced[message] = warnings.filters[0]


class NondeterministicOpWatch:
    """Finds these ops outside traced steps (validation, test, levels below op).

    A backward op belongs to the module that ran the first op after its autograd node was created.
    """

    def __init__(self, ops: NondeterministicOps, model: nn.Module) -> None:
        self._ops = ops
        self._modules = ModuleStack(model)
        self._calls: dict[int, tuple[OpPlan, Callable[..., Any]]] = {}
        self._module_of_node: dict[int | None, str] = {}
        self._mode: DispatchMode | None = None

    def open(self) -> None:
        if self._mode is None:
            self._modules.open()
            self._mode = DispatchMode(self._op)
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own

    def close(self) -> None:
        if self._mode is not None:
            mode, self._mode = self._mode, None
            self._modules.close()
            self._module_of_node.clear()
            mode.leave()

    def _op(
        self, func: Any, _types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        plan, call = self._calls.get(id(func)) or self._guarded(func)
        if comes_apart(plan, args, kwargs):
            return TAKE_APART
        # the forward of a custom Function runs without gradients, after its node is made
        if torch.is_grad_enabled() or graph_task_id() == -1:
            self._module_of_node.setdefault(
                next_sequence_number() - 1, self._modules.current.module
            )
        return call(*args, **kwargs)

    def _guarded(self, func: Any) -> tuple[OpPlan, Callable[..., Any]]:
        plan = make_plan(func)
        guarded = self._calls[id(func)] = (plan, self._ops.guard(plan, self._place))
        return guarded

    def _place(self) -> tuple[str, OpScope]:
        if graph_task_id() == -1:
            return "forward", OpScope(module=self._modules.current.module)
        number = None if (node := current_node()) is None else sequence_number(node)
        return "backward", OpScope(module=self._module_of_node.get(number, UNKNOWN_MODULE))


class Plans:
    """The plans of ops, each with a call that guards it.

    ``known`` is one of two tables, which the mode chooses before each op: ``of_python`` if the call
    may run Python code of the program, else ``of_native``.
    """

    def __init__(self, place: Callable[[], tuple[str, OpScope]]) -> None:
        self.nondeterministic_ops: NondeterministicOps | None = None  # set before the first step
        # likewise: what runs an op instead
        self.around: Callable[[OpPlan], Callable[..., Any]] | None = None
        self.program = ProgramCode()
        # by id: hashing an OpOverload runs Python code; a plan keeps it alive
        self.of_native: dict[int, OpPlan] = {}
        self.of_python: dict[int, OpPlan] = {}
        self.known = self.of_native
        self._place = place

    def runs_kernel(self, func: Any) -> bool:
        """Return whether a call of an op does nothing but run torch's own kernel."""
        plan = make_plan(func)
        return (
            self.known is self.of_native
            and isinstance(func, OpOverload)
            and func.namespace in ("aten", "profiler")
            and plan.call is kernel_of(func)
            and self.around is None
            and (self.nondeterministic_ops is None or not self.nondeterministic_ops.may_alert(plan))
        )

    def of(self, func: Any) -> OpPlan:
        if (plan_in_use := self.known.get(id(func))) is not None:
            return plan_in_use
        plan = make_plan(func)
        if self.known is self.of_python or type(func) is not OpOverload or func.namespace != "aten":
            # not its kernel, with which a dispatch mode below would be skipped as well
            call = func if plan.call is kernel_of(func) else plan.call
            plan = replace(plan, call=partial(self.program.run, call))
        if self.nondeterministic_ops is not None:
            plan = replace(plan, call=self.nondeterministic_ops.guard(plan, self._place))
        if self.around is not None:
            plan = replace(plan, call=self.around(plan))
        if plan.whole is not None:
            plan = replace(plan, whole=replace(plan.whole, call=plan.call))
        self.known[id(func)] = plan
        return plan
