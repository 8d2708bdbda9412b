"""Observations as sites of a recorder's step."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from det_callbacks.errors import CoverageWarning, SelectionError
from det_callbacks.observers.registry import Leaves
from det_callbacks.tensors.replay import Replay
from det_callbacks.trace.components import holds_data, unwrapped
from det_callbacks.trace.named import record_group
from det_callbacks.trace.recorder import Recorder
from det_callbacks.trace.region import OpRegion
from det_callbacks.trace.tree import module_of

_graph_task_id = torch._C._current_graph_task_id  # torch 2.13: -1 outside a backward pass


@dataclass(slots=True, eq=False)
class _Gradient:
    """A gradient that was asked for in this step: where, and how often it came."""

    name: str
    module: str
    occurrence: int
    is_repeated: bool
    """Asked for in one of the two runs of a checkpointed region, of which only one gets the gradient."""
    num_received: int = 0


class Observations:
    """Puts observations into the step that a recorder has under way; the sink of whoever owns that recorder.

    ``begin`` and ``end`` enclose a step, inside the recorder's own. An observation is a site with the phase and module
    it was made in, no op, and its name; that of a gradient is "grad of <name>", with the module that asked for it.

    Args:
        recorder: whose step it is.
        owner: what messages call the run.
        is_every_step: every step is recorded; otherwise nothing can be replayed.
        level: of the HashMode that is open around each step: at "op" it sees every op anyway, and regions change
            nothing; at "state" they cannot be told to which module ops belong, and record nothing. None without one.

    Attributes:
        num_observed: values observed so far, in all steps.
        on_observed: called after each observation, when it has become a site.
    """

    def __init__(self, recorder: Recorder, *, owner: str, level: str | None = None, is_every_step: bool = True) -> None:
        self._recorder = recorder
        self._owner = owner
        self._is_every_step = is_every_step
        self._level = level
        self._occurrences: Counter[str] = Counter()
        self._current: dict[str, int] = {}
        self._gradients: list[_Gradient] = []
        self._handles: list[RemovableHandle] = []
        self._replay = Replay()
        self._said: set[str] = set()
        self._is_open = False
        self._process = os.getpid()
        self._nested = 0
        self.region = OpRegion(recorder, is_followed=level is not None)
        self.num_observed = 0
        self.on_observed: Callable[[], None] | None = None

    def begin(self, replay: Replay | None = None) -> None:
        """Start a step; ``replay`` saves what is not deterministic, or puts it back, and has begun the step too."""
        self._clear()
        self._replay = replay or Replay()
        self._process = os.getpid()
        self._is_open = True
        self.region.resume()

    def end(self) -> None:
        """End a step, while the recorder's is still open: report what is outstanding, and remove the hooks."""
        if not self._is_open:
            return
        received = {gradient.name for gradient in self._gradients if gradient.num_received}
        for gradient in self._gradients:
            if not gradient.num_received and not (gradient.is_repeated and gradient.name in received):
                name = f"grad of {gradient.name}"
                absent: Any = None  # recorded like a plain value: a gradient that is not there
                record_group(self._recorder, "observation", "backward", [(name, absent)], owner=gradient.module)
                self._say(
                    f"{name} was observed, and no backward pass of the step computed it. It is recorded as a gradient "
                    "that is not there. Observe the gradient of a tensor that requires one and is used for the loss."
                )
        if untaken := () if self._replay.saved is None else self._replay.saved.untaken:
            shown = ", ".join(repr(key) for key in untaken[:4]) + (", ..." if len(untaken) > 4 else "")
            self._say(
                f"Saved tensors of the reference were not asked for in their step ({len(untaken)}: {shown}): what "
                "they were saved for did not happen in this run."
            )
        self._clear()

    def drop(self) -> None:
        """Drop the step under way, if there is one; regions go on with the next."""
        self._clear()

    def abandon(self) -> None:
        """Drop the step under way and close every region; may be called at any time and more than once."""
        self._clear()
        self._nested = 0
        self.region.leave_all()

    def __str__(self) -> str:
        return self._owner

    # what the registry's functions call

    def observe(self, name: str, leaves: Leaves, *, first: int = 0) -> None:
        """Record values at this point of the step."""
        if not self._takes(name):
            return
        self._occurrence(name, first)
        self._record(leaves)
        self._tell()

    def replay(self, name: str, leaves: Leaves, *, first: int = 0) -> Mapping[str, Any]:
        """Save or put back values and record them; return the plain values that were others, by path."""
        self._require_every_step(name)
        if not self._takes(name):
            return {}
        occurrence = self._occurrence(name, first)
        changed: dict[str, Any] = {}
        values: list[tuple[str, Any]] = []
        for index, (path, leaf) in enumerate(leaves, start=first):
            key = f"observation:{name}#{occurrence}.{index}"
            value = self._replay.exchange(key, leaf, op=name, late=self._recorder.late)
            if not isinstance(leaf, Tensor) and repr(value) != repr(leaf):
                changed[path] = value
            values.append((path, value))
        self._record(values, is_source=True)
        self._tell()
        return changed

    def observe_gradient(self, name: str, tensor: Tensor, *, is_replayed: bool, is_compiled: bool) -> None:
        """Record the gradient of a tensor when it is there."""
        if is_replayed:
            self._require_every_step(name)
        if not self._takes(name):
            return
        if is_compiled:
            self._say(
                "A gradient is observed inside a compiled function: torch.compile breaks its graph there, and the run "
                "is recorded all the same, but for what the graph before the break computes with the tensor. Observe "
                "it before its use, or outside the compiled function to keep one graph."
            )
        _, module = self._place()
        is_repeated = not torch.is_grad_enabled() or _graph_task_id() != -1
        gradient = _Gradient(name, module, self._occurrence(f"grad of {name}", 0), is_repeated)
        self._gradients.append(gradient)
        if tensor.requires_grad:
            self._handles.append(tensor.register_hook(_Hook(self, gradient, is_replayed)))

    def enable_ops(self) -> None:
        """Record ops from here on."""
        if self._level in ("op", "state"):
            self._nested += 1
            if self._level == "state":
                self._say(
                    'enable_hash_mode records nothing at level "state", which does not follow the modules. Record at '
                    'level "module" to have regions of ops, or at level "op" to have all of them.'
                )
        else:
            self.region.enter()
            if not self._is_open:
                self.region.suspend()  # it begins with the next step

    def disable_ops(self) -> None:
        """End the region that began last; raise TraceError when there is none."""
        if self._nested:
            self._nested -= 1
        else:
            self.region.leave()

    def receive(self, gradient: _Gradient, value: Tensor, *, is_replayed: bool) -> Tensor | None:
        """Record a gradient that a backward pass computed; return what replaces it, if anything does."""
        if not self._is_open or not any(gradient is known for known in self._gradients):
            return None
        if not self._takes(gradient.name):
            return None
        with self._recorder.passing.lock:
            return self._receive(gradient, value, is_replayed=is_replayed)

    def _receive(self, gradient: _Gradient, value: Tensor, *, is_replayed: bool) -> Tensor | None:
        name = f"grad of {gradient.name}"
        key = f"observation:{name}#{gradient.occurrence}.{gradient.num_received}"
        gradient.num_received += 1
        replaced = None
        if is_replayed:
            # Another branch of the graph may hold this very tensor as its gradient, so it is not changed in place.
            has_history = torch.is_grad_enabled() and value.requires_grad  # create_graph
            late = self._recorder.late
            replaced = self._replay.exchange_apart(key, value, op=name, late=late, has_history=has_history)
        entries = [(name, unwrapped(value if replaced is None else replaced))]
        self.num_observed += 1
        record_group(self._recorder, "observation", "backward", entries, owner=gradient.module, is_source=is_replayed)
        self._tell()
        return replaced

    # details

    def _clear(self) -> None:
        self._is_open = False
        self.region.suspend()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._gradients = []
        self._occurrences.clear()
        self._current.clear()
        self._replay = Replay()

    def _takes(self, name: str) -> bool:
        """Return whether a step is under way in this process: a forked worker has a copy of it that nobody reads."""
        if self._is_open and os.getpid() != self._process:
            self._say(
                f"{name} was observed in another process than the run's, such as a DataLoader's worker; nothing of it "
                "is recorded or put back. Observe what the worker returns."
            )
            return False
        if not self._is_open:
            self._say(
                f"{name!r} was observed outside the steps of {self._owner} (in a validation, between two batches, or "
                "in a step that every_n_steps or only_steps leaves out): nothing was recorded, compared, saved or put "
                "back there. This is said once."
            )
            return False
        if self._recorder.passing.is_captured():
            self._say(
                f"{name!r} was observed while a CUDA graph was being captured, or inside code that torch.compile runs "
                "as one: nothing is computed then, and a replay calls no Python, so nothing was recorded, saved or put "
                "back. Observe what the graph leaves, after its replay. This is said once."
            )
            return False
        return True

    def _require_every_step(self, name: str) -> None:
        if not self._is_every_step:
            raise SelectionError(
                f"{name!r} is to be saved and put back, and every_n_steps or only_steps leaves steps out, which would "
                "go on with other bits. Record with every_n_steps=1 and without only_steps, or observe it without "
                "replaying it."
            )

    def _occurrence(self, name: str, first: int) -> int:
        """Return which observation of this name in the step it is; its leaves may come one by one."""
        if not first:
            self._current[name] = self._occurrences[name]
            self._occurrences[name] += 1
        return self._current[name]

    def _place(self) -> tuple[str, str]:
        if _graph_task_id() == -1:
            return self._recorder.phase, module_of(self._recorder.modules.current)
        return "backward", self._recorder.backward.context().module

    def _record(self, leaves: Leaves, *, is_source: bool = False) -> None:
        phase, module = self._place()
        entries = [(path, _recorded(leaf)) for path, leaf in leaves]
        self.num_observed += len(entries)
        record_group(self._recorder, "observation", phase, entries, owner=module, is_source=is_source)

    def _tell(self) -> None:
        # not within an op of a compiled graph: an observer that ends there could not take its mode from the stack
        if self.on_observed is not None and not self.region.is_dispatching:
            self.on_observed()

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, CoverageWarning, stacklevel=4)


def _recorded(leaf: Any) -> Any:
    """Return what is recorded of a leaf: of a tensor without data (meta, fake) at least what it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return unwrapped(leaf) if holds_data(leaf) else f"no data: {leaf.dtype} {list(leaf.shape)} {leaf.device}"


class _Hook:
    __slots__ = ("_gradient", "_is_replayed", "_observations")

    def __init__(self, observations: Observations, gradient: _Gradient, is_replayed: bool) -> None:
        self._observations = observations
        self._gradient = gradient
        self._is_replayed = is_replayed

    def __call__(self, value: Tensor | None) -> Tensor | None:
        if value is None:  # undefined: it stays a gradient that never came
            return None
        return self._observations.receive(self._gradient, value, is_replayed=self._is_replayed)
