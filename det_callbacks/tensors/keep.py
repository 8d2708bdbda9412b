"""Keeping what chosen ops read and wrote, so that a verdict can say by how much they differ."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from det_callbacks.errors import DetCallbacksError
from det_callbacks.host_digest import format_digest
from det_callbacks.runs.program import Site
from det_callbacks.runs.steps import StepTrace
from det_callbacks.tensors.copies import TensorBudget
from det_callbacks.tensors.files import SavedTensor, StepWriter
from det_callbacks.tensors.kept import LEFT_OUT, KeptCounts
from det_callbacks.tensors.replay import OpSelection
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.deferred_sites import DeferredSites


@dataclass(slots=True, kw_only=True)
class _Call:
    """One call of an op: copies of what it read, with argument and name, and of what it wrote, by index.

    ``position`` is that of its first site: the one of its arguments, where it has one, else that of its first output.
    """

    op: str
    deferred: DeferredSites | None
    reads: list[tuple[dict[str, Any], SavedTensor]] = field(default_factory=list)
    outputs: list[tuple[int, SavedTensor]] = field(default_factory=list)
    position: int = 0


class Keeper(OpSelection):
    """Copies what chosen ops read and write, and writes the steps that are to be kept.

    A copy is made at once, since a tensor may change later in its step; a copy from a GPU is complete when the step is
    settled. A call is kept whole or not at all. Tensors that exceed the budget or the disk, or that are not plain, are
    counted with the reason, and the run goes on: no digest depends on them.

    Args:
        patterns: which ops, ``[phase/][module:]op`` each.
        writer: of the steps.
        budget: of a step.

    Attributes:
        counts: what was kept so far, and what was not, in all fits.
        writer: of the steps.
    """

    def __init__(self, patterns: Sequence[str], writer: StepWriter, budget: TensorBudget | None = None) -> None:
        super().__init__(patterns)
        self.counts = KeptCounts()
        self.writer, self._budget = writer, budget or TensorBudget()
        self.begin()

    def begin(self, *, is_wanted: bool = True) -> None:
        """Start a step, and forget the one under way.

        Args:
            is_wanted: whether this step may be kept; without it nothing is copied.
        """
        self._is_wanted = is_wanted
        self._calls: list[_Call] = []
        self._left_out: list[str] = []
        self._budget.begin()

    def begin_call(
        self, op: str, reads: Sequence[tuple[str, str | None, Tensor]], deferred: DeferredSites | None = None
    ) -> _Call | None:
        """Copy what a call is about to read; see ``TensorKeeper``."""
        if not self._is_wanted:
            return None
        call = _Call(op=op, deferred=deferred)
        held = [read for read in reads if holds_data(read[2])]
        copies = self._copy(call, [tensor for _, _, tensor in held])
        if copies is None:
            return None
        options = [{"argument": argument, "name": name} for argument, name, _ in held]
        call.reads = list(zip(options, copies, strict=True))
        return call

    def end_call(self, call: _Call, outputs: Sequence[Any], position: int) -> None:
        """Copy what a call wrote; see ``TensorKeeper``."""
        held = [index for index, out in enumerate(outputs) if isinstance(out, Tensor) and holds_data(out)]
        copies = self._copy(call, [outputs[index] for index in held])
        if not copies:
            return
        call.outputs = list(zip(held, copies, strict=True))
        call.position = position
        self._calls.append(call)

    def _copy(self, call: _Call, tensors: Sequence[Tensor]) -> list[SavedTensor] | None:
        """Return copies, None where they do not fit or cannot be made."""
        try:
            return self._budget.copy(tensors, call.op, call.deferred)
        except (DetCallbacksError, torch.OutOfMemoryError) as error:  # the training goes on
            self._budget.num_bytes -= sum(copy.bits.nbytes for _, copy in call.reads)  # what it read is dropped too
            self._left_out.append(str(error))
            return None

    def write(self, trace: StepTrace, step: int) -> None:
        """Write what was kept of a step that ended, before the step itself is appended to its stream.

        Args:
            trace: of the step.
            step: training batch.
        """
        tensors: dict[str, SavedTensor] = {}
        for call in self._calls:
            tensors.update(_entries(call, trace))
        try:
            size = self.writer.write(step, tensors, self._missing())
        except (DetCallbacksError, OSError) as error:  # the run does not depend on it
            self._left_out += [str(error)] * len(self._calls)
            tensors, size = {}, 0
            with suppress(OSError):  # where even this fails, only the closing line says it
                self.writer.write(step, {}, self._missing())
        if tensors:
            self.counts = replace(
                self.counts,
                num_tensors=self.counts.num_tensors + len(tensors),
                num_steps=self.counts.num_steps + 1,
                num_bytes=self.counts.num_bytes + size,
            )
        if self._left_out:
            self.counts = self.counts.with_missing(step, len(self._left_out), self._left_out[0])
        self.begin()

    def _missing(self) -> dict[str, Any]:
        return {LEFT_OUT: [len(self._left_out), self._left_out[0]]} if self._left_out else {}


def _entries(call: _Call, trace: StepTrace) -> dict[str, SavedTensor]:
    """Return the copies of a call by key, with the site that each belongs to; none where it made no sites."""
    sites, first = trace.program.sites, call.position
    if first < len(sites) and sites[first].role == "argument":
        first += 1
    entries = {}
    for index, copy in call.outputs:
        site = sites[first + index] if first + index < len(sites) else None
        if site is None or (site.op, site.output, site.role) != (call.op, index, "output"):
            return {}
        place = {name: getattr(site, name) for name in ("phase", "module", "op", "occurrence", "output")}
        digest = format_digest(int(trace.digests[first + index]))
        entries[_key(site)] = replace(copy, options={"call": first, "site_digest": digest, **place})
    for options, copy in call.reads:
        entries[f"{_key(sites[first])} {options['argument']}"] = replace(copy, options={"call": first, **options})
    return entries


def _key(site: Site) -> str:
    return f"{site.phase}/{site.module}:{site.op}#{site.occurrence}.{site.output}"
