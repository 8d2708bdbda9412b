"""Observations as sites of a recorder's step, and the active observer of the process."""

import itertools
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from det_callbacks.errors import CoverageWarning, SelectionError, TraceError
from det_callbacks.internals.torch import graph_task_id
from det_callbacks.tensors.replay import Replay
from det_callbacks.trace.components import holds_data, unwrapped
from det_callbacks.trace.listener import OpRegion
from det_callbacks.trace.recorder import Recorder

Leaves = Sequence[tuple[str, Any]]
"""Path and value of the tensors and plain values of a nested structure, in order."""


@dataclass(slots=True, eq=False)
class _Gradient:
    name: str
    module: str
    occurrence: int
    is_replayed: bool
    is_repeated: bool  # in one of two runs of a checkpointed region, of which one gets the gradient
    num_received: int = 0


class Observations:
    """Adds observations to the recorder's step; ``owner`` names the run in messages.

    ``begin`` and ``end`` enclose a step, inside the recorder's ``begin`` and ``finish``. An
    observation is a site with its phase, module and name, but no op; a gradient's name is "grad of
    <name>", and its module is the one that requested it.
    """

    def __init__(self, recorder: Recorder, *, owner: str, level: str | None = None) -> None:
        self.owner = owner
        self.region = OpRegion(recorder, level=level)
        self._recorder, self._level = recorder, level
        self._occurrences: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._gradients: list[_Gradient] = []
        self._handles: list[RemovableHandle] = []
        self._reported: set[str] = set()
        self.drop()

    def begin(self, replay: Replay | None = None) -> None:
        """Start a step; ``replay`` saves nondeterministic values, or restores them."""
        self.drop()
        self._replay = replay or Replay()
        self._process, self._thread = os.getpid(), get_ident()
        self._is_open = True
        self.region.unpause()

    def end(self) -> None:
        """End a step, before the recorder's: report missing gradients, and remove the hooks."""
        if not self._is_open:
            return
        received = {gradient.name for gradient in self._gradients if gradient.num_received}
        for gradient in self._gradients:
            if not gradient.num_received and not (
                gradient.is_repeated and gradient.name in received
            ):
                # recorded like a plain value
                absent: list[tuple[str, Any]] = [(gradient.name, None)]
                self._recorder.named.record_group(
                    "observation", "backward", absent, owner=gradient.module
                )
                self._report(
                    f"{gradient.name} is recorded as missing, because no backward pass of the step "
                    "computed it. Check that the tensor requires a gradient, and that the loss "
                    "uses it."
                )
        self.drop()

    def drop(self) -> None:
        """Drop the current step, if any; regions continue in the next."""
        self._is_open = False
        self.region.pause()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._gradients = []
        self._occurrences.clear()
        self._replay = Replay()

    def abandon(self) -> None:
        """Drop the current step and close every region."""
        self.drop()
        self.region.leave_all()

    def observe(self, name: str, leaves: Leaves, *, is_replayed: bool = False) -> Mapping[str, Any]:
        """Record values; if ``is_replayed``, save or restore them,
        and return plain values that differ by path.
        """
        if not self._takes(name, is_replayed=is_replayed):
            return {}
        occurrence = next(self._occurrences[name])
        changed: dict[str, Any] = {}
        entries: list[tuple[str, Any]] = []
        for index, (path, leaf) in enumerate(leaves):
            value = leaf
            if is_replayed:
                key = f"observation:{name}#{occurrence}.{index}"
                value = self._replay.exchange(
                    key, leaf, op=name, deferred=self._recorder.step.deferred
                )
                if not isinstance(leaf, Tensor) and repr(value) != repr(leaf):
                    changed[path] = value
            if isinstance(value, Tensor):
                is_there = holds_data(value)  # False of meta and fake tensors
                value = (
                    unwrapped(value)
                    if is_there
                    else f"no data: {value.dtype} {list(value.shape)} {value.device}"
                )
            entries.append((path, value))
        with self._recorder.step.lock:
            phase, scope = self._recorder.places.now()
            self._record(phase, scope.module, entries, is_writer=is_replayed)
        return changed

    def observe_gradient(
        self, name: str, tensor: Tensor, *, is_replayed: bool, is_compiled: bool
    ) -> None:
        """Record the gradient of a tensor when it is computed; if
        ``is_replayed``, save or restore it.
        """
        if not self._takes(name, is_replayed=is_replayed):
            return
        if is_compiled:
            self._report(
                "A gradient is observed inside a compiled function: torch.compile breaks its graph "
                "there, and the gradient misses uses of the tensor in the graph before. Observe it "
                "before its use, or outside."
            )
        gradient = _Gradient(
            name=f"grad of {name}",
            module=self._recorder.places.now()[1].module,
            occurrence=next(self._occurrences[f"grad of {name}"]),
            is_replayed=is_replayed,
            is_repeated=not torch.is_grad_enabled() or graph_task_id() != -1,
        )
        self._gradients.append(gradient)
        if tensor.requires_grad:
            self._handles.append(tensor.register_hook(partial(self._receive, gradient)))

    def enable_ops(self) -> None:
        """Record ops from here on."""
        if self._level == "state":
            self._report(
                'enable_hash_mode records nothing at level "state", which records no modules: use '
                '"module".'
            )
        self.region.enter()
        if not self._is_open:
            self.region.pause()  # until the next step

    def _receive(self, gradient: _Gradient, value: Tensor | None) -> Tensor | None:
        """Record a gradient that a backward pass computed; return its replacement, if any."""
        if (
            value is None
            or not self._is_open
            or not any(gradient is known for known in self._gradients)
        ):
            return None  # an undefined gradient counts as missing
        if not self._takes(gradient.name, is_replayed=gradient.is_replayed):
            return None
        with self._recorder.step.lock:
            name = gradient.name
            key = f"observation:{name}#{gradient.occurrence}.{gradient.num_received}"
            gradient.num_received += 1
            replaced = None
            if gradient.is_replayed:
                # not in place: another branch of the graph may hold the same tensor
                replaced = self._replay.exchange_apart(
                    key, value, op=name, deferred=self._recorder.step.deferred
                )
            entry = (name, unwrapped(value if replaced is None else replaced))
            self._record("backward", gradient.module, [entry], is_writer=gradient.is_replayed)
            return replaced

    def _takes(self, name: str, *, is_replayed: bool) -> bool:
        """Return whether a step is open in this process; otherwise report
        once why nothing is recorded.
        """
        if is_replayed and not self._recorder.selection.is_every_step:
            raise SelectionError(
                f"{name!r} cannot be replayed, because every_n_steps or only_steps skips steps, "
                "which would continue with different bits. Record with every_n_steps=1 and without "
                "only_steps, or use observe."
            )
        where = ""
        if not self._is_open:
            where = (
                f"outside the steps of {self.owner} (in a validation, between batches, or in a "
                "skipped step)"
            )
        elif os.getpid() != self._process:
            where = (
                "in a process other than the run's, such as a DataLoader worker: observe what it "
                "returns"
            )
        elif get_ident() != self._thread and graph_task_id() == -1:
            where = "in a thread other than the step's: observe what it returns"
        elif self._recorder.captures.skips():
            where = (
                "during the capture of a CUDA graph, whose replay calls no Python: observe the "
                "graph's outputs"
            )
        if where:
            self._report(
                f"{name!r} was observed {where}. Nothing was recorded, compared, saved or restored "
                "there."
            )
        return not where

    def _record(
        self, phase: str, module: str, entries: list[tuple[str, Any]], *, is_writer: bool
    ) -> None:
        self._recorder.named.record_group(
            "observation", phase, entries, owner=module, is_writer=is_writer
        )

    def _report(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            warnings.warn(text, CoverageWarning, stacklevel=4)


class Registry:
    """Holds the active observer of the process in ``sink``, which each observation reads.

    Before another observer begins, ``make_room`` removes one that goes unasked.
    """

    def __init__(self) -> None:
        self.sink: Observations | None = None
        self.make_room: Callable[[], None] = _nothing

    def activate(self, sink: Observations) -> None:
        """Make a sink the only active observer."""
        self.make_room()
        if self.sink is not None:
            raise TraceError(
                f"Another observer is already active ({self.sink.owner}). Leave the "
                "ObserverContext, or end the fit with DeterminismCallback, before you start this "
                "one."
            )
        self.sink = sink

    def deactivate(self, sink: Observations) -> None:
        """Deactivate an observer, if it is active."""
        if self.sink is sink:
            self.sink = None


def _nothing() -> None:
    """Remove no observer."""


REGISTRY = Registry()
