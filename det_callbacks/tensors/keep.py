"""Keeping what chosen ops wrote, so that a verdict can say by how much they differ."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from det_callbacks.digest.host import format_digest
from det_callbacks.errors import DetCallbacksError
from det_callbacks.runs.steps import StepTrace
from det_callbacks.tensors.copies import TensorBudget
from det_callbacks.tensors.files import LEFT_OUT, KeptCounts, SavedTensor, StepWriter
from det_callbacks.tensors.replay import OpSelection
from det_callbacks.trace.op.components import holds_data
from det_callbacks.trace.op.deferred_sites import DeferredSites


class Keeper(OpSelection):
    """Copies what chosen ops write, and writes the steps that are to be kept.

    A call is kept whole or not at all. Tensors that exceed the budget or the disk, or that are not plain, are counted
    with the reason, and the run goes on: no digest depends on them. ``counts`` are those of all fits.
    """

    needs_rows = True

    def __init__(self, patterns: Sequence[str], writer: StepWriter, budget: TensorBudget | None = None) -> None:
        super().__init__(patterns)
        self.counts = KeptCounts()
        self.writer, self._budget = writer, budget or TensorBudget()
        self.begin()

    def begin(self, *, is_wanted: bool = True) -> None:
        """Start a step, and forget the one under way; without ``is_wanted`` nothing of it is copied."""
        self._is_wanted = is_wanted
        self._calls: list[tuple[str, int, dict[int, SavedTensor]]] = []  # op, position of its first site, outputs
        self._left_out: list[str] = []
        self._budget.num_bytes = 0

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], position: int, deferred: DeferredSites
    ) -> Sequence[Any]:
        """Copy what a call wrote, and return it; see ``OutputHook``."""
        if not self._is_wanted:
            return outputs
        held = [index for index, out in enumerate(outputs) if isinstance(out, Tensor) and holds_data(out)]
        try:
            copies = self._budget.copy([outputs[index] for index in held], op, deferred)
        except (DetCallbacksError, torch.OutOfMemoryError) as error:  # the training goes on
            self._left_out.append(str(error))
            return outputs
        if copies:
            self._calls.append((op, position, dict(zip(held, copies, strict=True))))
        return outputs

    def write(self, trace: StepTrace, step: int) -> None:
        """Write what was kept of a step that ended, before the step itself is appended to its stream."""
        tensors = {key: saved for call in self._calls for key, saved in _entries(trace, *call).items()}
        try:
            self.writer.write(step, tensors, {LEFT_OUT: self._left_out[0]} if self._left_out else {})
        except DetCallbacksError as error:  # the run does not depend on it
            self._left_out += [str(error)] * len(self._calls)
            tensors = {}
        reason = f"from step {step} on: {self._left_out[0]}" if self._left_out else ""
        size, num_missing = sum(saved.bits.nbytes for saved in tensors.values()), len(self._left_out)
        self.counts += KeptCounts(num_tensors=len(tensors), num_bytes=size, num_missing=num_missing, reason=reason)
        self.begin()


def _entries(trace: StepTrace, op: str, first: int, outputs: dict[int, SavedTensor]) -> dict[str, SavedTensor]:
    """Return the copies of a call by key, with the site that each belongs to; none where it made no sites."""
    sites, first = trace.program.sites, trace.place_of(first)
    if first < len(sites) and sites[first].role == "argument":
        first += 1
    entries = {}
    for index, copy in outputs.items():
        site = sites[first + index] if first + index < len(sites) else None
        if site is None or (site.op, site.output, site.role) != (op, index, "output"):
            return {}
        place = {name: getattr(site, name) for name in ("phase", "module", "op", "occurrence", "output")}
        digest = format_digest(int(trace.digests[first + index]))
        key = f"{site.phase}/{site.module}:{site.op}#{site.occurrence}.{site.output}"
        entries[key] = replace(copy, options={"site_digest": digest, **place})
    return entries
