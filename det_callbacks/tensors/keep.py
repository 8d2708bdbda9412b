"""Keeps outputs of selected ops, so that a verdict can say by how much they differ."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from det_callbacks.digest.host import format_digest
from det_callbacks.digest.numbers import can_measure
from det_callbacks.errors import DetCallbacksError
from det_callbacks.runs.steps import StepTrace
from det_callbacks.tensors.copies import STATISTICS, TENSOR_BUDGET_MIB, copy_bits, plain, statistics_of
from det_callbacks.tensors.files import LEFT_OUT, MIB, KeptCounts, SavedTensor, StepWriter, key_of, sample_start
from det_callbacks.tensors.replay import OpSelection
from det_callbacks.trace.op.components import holds_data
from det_callbacks.trace.op.deferred_sites import DeferredSites

MIN_ELEMENTS = 16
"""The smallest sample of a tensor, however small the budget is."""


@dataclass(slots=True, kw_only=True)
class _Copy:
    """A copy of a tensor; ``statistics`` is None if the numbers of its dtype are not known."""

    saved: SavedTensor
    start: int  # see ``sample_start``
    statistics: Tensor | None
    is_deferred: bool  # whether the bits arrive when the step is settled

    def limit(self, num_elements: int) -> None:
        """Reduce the copy to a sample of at most so many elements."""
        every = _every(prod(self.saved.shape), num_elements)
        if every > self.saved.every:
            self.saved = self.saved.thinned(self.start, every)
            if not self.is_deferred:
                self.saved = replace(self.saved, bits=np.array(self.saved.bits))  # frees the memory of the rest


def _every(num_elements: int, limit: int) -> int:
    """Return the least power of 2, n, for which every n-th element makes a sample within the limit."""
    return 1 << (-(-num_elements // limit) - 1).bit_length() if num_elements > limit else 1


class Keeper(OpSelection):
    """Copies outputs of selected ops, and writes them for the steps to keep.

    If a step would exceed the budget, the keeper limits each tensor to an even sample, with the same elements in every
    run. It counts tensors that are not plain or cannot be written, with the reason, and the run goes on, since no
    digest depends on them. ``counts`` covers all fits.
    """

    needs_rows = True

    def __init__(self, patterns: Sequence[str], writer: StepWriter, budget_mib: float = TENSOR_BUDGET_MIB) -> None:
        super().__init__(patterns)
        self.counts = KeptCounts()
        self.writer, self._budget = writer, budget_mib * MIB
        self._limit = 1 << 62  # elements of a tensor
        self.begin()

    def begin(self, *, is_wanted: bool = True) -> None:
        """Start a step, and drop an unfinished one; without ``is_wanted``, copy nothing of the step."""
        self._is_wanted = is_wanted
        self._calls: list[tuple[str, int, dict[int, _Copy]]] = []  # op, position of the call's first site, outputs
        self._left_out: list[str] = []
        self._num_bytes = 0

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], position: int, deferred: DeferredSites
    ) -> Sequence[Any]:
        """Copy the outputs of a call, and return them unchanged; see ``OutputHook``."""
        if not self._is_wanted:
            return outputs
        held = [index for index, out in enumerate(outputs) if isinstance(out, Tensor) and holds_data(out)]
        try:
            copies = {index: self._copy(f"{op}.{index}", outputs[index], deferred) for index in held}
        except (DetCallbacksError, torch.OutOfMemoryError) as error:  # the training goes on
            self._left_out.append(str(error))
            return outputs
        if copies:
            self._calls.append((op, position, copies))
            self._num_bytes += sum(copy.saved.bits.nbytes for copy in copies.values())
        while self._num_bytes > self._budget and self._limit > MIN_ELEMENTS:
            kept = [copy for _, _, known in self._calls for copy in known.values()]
            self._limit = max(max(copy.saved.num_saved for copy in kept) // 2, MIN_ELEMENTS)
            for copy in kept:
                copy.limit(self._limit)
            self._num_bytes = sum(copy.saved.bits.nbytes for copy in kept)
        return outputs

    def _copy(self, name: str, tensor: Tensor, deferred: DeferredSites) -> _Copy:
        inner = plain(tensor)
        start, every = sample_start(name), _every(inner.numel(), self._limit)
        saved = copy_bits(tensor, deferred, first=start % every, every=every)
        known = statistics_of(tensor, deferred) if can_measure(saved.dtype) else None
        return _Copy(saved=saved, start=start, statistics=known, is_deferred=deferred.is_deferred(inner))

    def write(self, trace: StepTrace, step: int) -> None:
        """Write the copies of a finished step, before the step is appended to its stream."""
        tensors = {key: saved for call in self._calls for key, saved in _entries(trace, *call).items()}
        try:
            self.writer.write(step, tensors, {LEFT_OUT: self._left_out[0]} if self._left_out else {})
        except DetCallbacksError as error:  # the run does not need these tensors
            self._left_out += [str(error)] * len(self._calls)
            tensors = {}
        reason = f"from step {step} on: {self._left_out[0]}" if self._left_out else ""
        size, num_missing = sum(saved.bits.nbytes for saved in tensors.values()), len(self._left_out)
        num_sampled = sum(saved.every > 1 for saved in tensors.values())
        numbers = {"num_tensors": len(tensors), "num_bytes": size, "num_sampled": num_sampled}
        self.counts += KeptCounts(**numbers, num_missing=num_missing, reason=reason)
        self.begin()


def _entries(trace: StepTrace, op: str, first: int, outputs: dict[int, _Copy]) -> dict[str, SavedTensor]:
    """Return the copies of a call by key, each with its site; none if the call made no sites."""
    sites = trace.program.sites
    if first < len(sites) and sites[first].role == "argument":
        first += 1
    entries = {}
    for index, copy in outputs.items():
        site = sites[first + index] if first + index < len(sites) else None
        if site is None or (site.op, site.output, site.role) != (op, index, "output"):
            return {}
        place = {name: getattr(site, name) for name in ("phase", "module", "op", "occurrence", "output")}
        digest = format_digest(int(trace.digests[first + index]))
        options = {"site_digest": digest, **place}
        if copy.statistics is not None:
            options["statistics"] = dict(zip(STATISTICS, copy.statistics.tolist(), strict=True))
        bits = np.ascontiguousarray(copy.saved.bits).reshape(-1)
        entries[key_of(site)] = replace(copy.saved, bits=bits, options=options)
    return entries
