"""Saved outputs of ops: replay restores their bits, and kept ones show the size of a difference."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from det_callbacks.digest.components import digest_tensor
from det_callbacks.digest.host import format_digest
from det_callbacks.digest.numbers import can_measure
from det_callbacks.errors import DetCallbacksError, ReferenceFormatError, SelectionError
from det_callbacks.internals.torch import without_modes
from det_callbacks.runs.selection import OpPattern, as_patterns
from det_callbacks.runs.steps import StepTrace
from det_callbacks.tensors.copies import (
    STATISTICS,
    TENSOR_BUDGET_MIB,
    TensorBudget,
    copy_bits,
    misfit,
    plain,
    require_apart,
    statistics_of,
    write_bits,
)
from det_callbacks.tensors.files import (
    LEFT_OUT,
    MIB,
    KeptCounts,
    SavedStep,
    SavedTensor,
    StepWriter,
    key_of,
    sample_start,
)
from det_callbacks.trace.components import holds_data, unwrapped
from det_callbacks.trace.deferred_sites import DeferredSites

MIN_ELEMENTS = 16
"""The smallest sample of a tensor, however small the budget is."""


def replay_patterns(replay: object) -> tuple[str, ...]:
    """Return the patterns of an argument ``replay``: a list,
    or the path of a YAML file that holds one.
    """
    if not isinstance(replay, str | Path):
        return as_patterns("replay", replay)
    if Path(replay).suffix not in (".yaml", ".yml"):
        raise SelectionError(
            "replay must be a list of patterns, or the path of a YAML file that holds one; got "
            f"{str(replay)!r}: write [{str(replay)!r}] if that is a pattern."
        )
    try:
        content = yaml.safe_load(Path(replay).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SelectionError(f"replay: {replay} cannot be read ({error}).") from error
    return as_patterns(f"replay (in {replay})", content)


class Replay:
    """Saves tensors and plain values of a step under keys, or restores the saved ones.

    A key names a value within its step: ``phase/module:op#occurrence.output``,
    ``observation:name#occurrence.leaf``. Replay copies a tensor immediately,
    since it may change later in the step.

    If the recorded step has nothing that fits a live value, the live value stays, and ``end_step``
    raises unless the comparison has found that the steps differ.
    """

    def __init__(
        self, writer: StepWriter | None = None, budget: TensorBudget | None = None
    ) -> None:
        self._writer, self._budget = writer, budget or TensorBudget()
        # by op or observation: count, differing, bytes
        self._counts: dict[str, tuple[int, int, int]] = {}
        self._num_steps = 0
        self.begin(None)

    @property
    def num_bytes(self) -> int:
        """Bytes saved; without a writer, bytes restored."""
        return sum(total for _, _, total in self._counts.values())

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return ``replayed`` of the coverage: how many tensors, how many of
        them differed, MiB per step.
        """
        steps = max(1, self._num_steps)
        return {
            op: {
                "count": count,
                "differing": differing,
                "mib_per_step": round(total / MIB / steps, 6),
            }
            for op, (count, differing, total) in sorted(self._counts.items())
        }

    def begin(self, saved: SavedStep | None) -> None:
        """Start a step, and drop an unfinished one; ``saved`` is None for a step
        that was not recorded before.
        """
        self.saved = saved
        self._copies: dict[str, SavedTensor] = {}
        self._values: dict[str, Any] = {}
        self._unsaved: ReferenceFormatError | None = None
        self._ops: list[tuple[str, int]] = []
        self.calls: Counter[str] = Counter()  # by place of the op
        self._budget.num_bytes = 0

    def write(self, step: int) -> None:
        """Write the saved values of a settled step, and count them."""
        assert self._writer is not None, "it saves tensors"
        self._writer.write(step, self._copies, self._values)
        for op, num_bytes in self._ops:
            self._count(op, is_saved=True, num_bytes=num_bytes)
        self._num_steps += 1
        self.begin(None)

    def end_step(self, *, differs: bool) -> None:
        """End a compared step; raise ReferenceFormatError if it matches although
        a saved value was missing.
        """
        if self._unsaved is not None and not differs:
            raise self._unsaved
        self._num_steps += self._writer is None

    def exchange(self, key: str, live: Any, *, op: str, deferred: DeferredSites | None) -> Any:
        """Save a value, or restore the saved one: in the memory of the tensor,
        or by returning the saved number.
        """
        if isinstance(live, Tensor):
            if self.saved is not None or self._writer is not None:
                require_apart(live)
            saved = self._exchange(key, live, op, deferred)
            if saved is not None:
                write_bits(saved, live, deferred)
            return live
        if self.saved is None:
            self._values[key] = [live.real, live.imag] if isinstance(live, complex) else live
            self._ops.append((op, 0))
            return live
        if key not in self.saved.values:
            self.note_unsaved(f"it has no plain value {key!r}")
            return live
        value = self.saved.values[key]
        value = complex(*value) if isinstance(value, list) else value
        self._count(op, differs=repr(value) != repr(live))
        return value

    def exchange_apart(
        self, key: str, live: Tensor, *, op: str, deferred: DeferredSites | None
    ) -> Tensor | None:
        """Save a tensor, or return a clone with the saved bits, which keeps the history,
        or None if nothing changes.
        """
        saved = self._exchange(key, live, op, deferred)
        if saved is None:
            return None
        with without_modes():  # the reference has no clone
            copy = live.clone()
        write_bits(saved, copy, deferred)
        return copy

    def note_unsaved(self, what: str) -> None:
        """Report in ``end_step`` that a live value has no saved one; if the
        file is missing, raise now.
        """
        saved = self.saved
        assert saved is not None
        is_there = "" if saved.exists else "there is no such file, so "
        error = ReferenceFormatError(
            f"{saved.path}: {is_there}{what}. Without the saved bits of step {saved.place.step} "
            "nothing after it could be compared, so this is an error and not a difference. Record "
            "the reference again with the same code.",
            str(saved.path),
        )
        if not saved.exists:
            raise error
        self._unsaved = self._unsaved or error

    def _count(
        self, op: str, *, is_saved: bool = False, differs: bool = False, num_bytes: int = 0
    ) -> None:
        if is_saved == (self._writer is not None):  # do not count what a resumed recording restores
            count, differing, total = self._counts.get(op, (0, 0, 0))
            self._counts[op] = count + 1, differing + differs, total + num_bytes

    def _exchange(
        self, key: str, live: Tensor, op: str, deferred: DeferredSites | None
    ) -> SavedTensor | None:
        """Save a tensor; or count it, and return the saved bits if they have to be restored."""
        if self.saved is None:
            if self._writer is not None:
                if key in self._copies:
                    raise ValueError(f"the step has saved {key!r} already")
                self._copies[key] = self._budget.copy(live, op, deferred)
                self._ops.append((op, self._copies[key].bits.nbytes))
            return None
        if key not in self.saved.entries:
            known = ", ".join(map(repr, list(self.saved.entries)[:4])) or "none"
            self.note_unsaved(f"it has no tensor {key!r}; it has {known}")
            return None
        saved = self.saved.read(key)
        if problem := misfit(saved, live):
            self.note_unsaved(f"{key!r} does not fit: {problem}")
            return None
        inner, digest, num_bytes = unwrapped(live), saved.digest, saved.bits.nbytes
        if deferred is not None and deferred.is_deferred(inner):
            bits = deferred.tensor_bits(inner)
            deferred.when_known(
                (bits,),
                lambda found: self._count(op, differs=found[0] != digest, num_bytes=num_bytes),
            )
            return saved
        differs = digest_tensor(inner) != digest
        self._count(op, differs=differs, num_bytes=num_bytes)
        return saved if differs else None


class OpSelection:
    """The ops that patterns match; a pattern is ``[phase/][module:]op``."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = {pattern: OpPattern.parse(pattern) for pattern in patterns}
        self._known: dict[tuple[str, str, str], bool] = {}
        self._used: set[str] = set()

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether a pattern matches an op at this place."""
        place = (phase, module, op)
        if place not in self._known:
            matching = [
                text
                for text, pattern in self._patterns.items()
                if pattern.matches(phase, module, op)
            ]
            self._used.update(matching)
            self._known[place] = bool(matching)
        return self._known[place]

    @property
    def unused(self) -> tuple[str, ...]:
        """The patterns that have matched no op so far."""
        return tuple(pattern for pattern in self._patterns if pattern not in self._used)


class OpReplay(OpSelection):
    """Saves the outputs of selected ops, or restores the saved bits."""

    needs_rows = False

    def __init__(self, patterns: Sequence[str], replay: Replay) -> None:
        super().__init__(patterns)
        self._replay = replay

    def exchange(
        self,
        phase: str,
        module: str,
        op: str,
        outputs: Sequence[Any],
        position: int,
        deferred: DeferredSites,
    ) -> Sequence[Any]:
        """Save or restore the outputs of a call; return them, with saved numbers."""
        place = f"{phase}/{module}:{op}"
        call = self._replay.calls[place]
        self._replay.calls[place] += 1
        values = []
        for index, output in enumerate(outputs):
            key = f"{place}#{call}.{index}"
            values.append(self._replay.exchange(key, output, op=op, deferred=deferred))
            if type(values[-1]) is not type(output):
                self._replay.note_unsaved(
                    f"{key!r} is {values[-1]!r} there, and the live value is {output!r}"
                )
                values[-1] = output
        return values


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
                # frees the memory of the rest
                self.saved = replace(self.saved, bits=np.array(self.saved.bits))


def _every(num_elements: int, limit: int) -> int:
    """Return the least power of 2, n, for which every n-th element makes a
    sample within the limit.
    """
    return 1 << (-(-num_elements // limit) - 1).bit_length() if num_elements > limit else 1


class Keeper(OpSelection):
    """Copies outputs of selected ops, and writes them for the steps to keep.

    If a step would exceed the budget, the keeper limits each tensor to an even sample, with the
    same elements in every run. It counts tensors that are not plain or cannot be written, with the
    reason, and the run goes on, since no digest depends on them. ``counts`` covers all fits.
    """

    needs_rows = True

    def __init__(
        self, patterns: Sequence[str], writer: StepWriter, budget_mib: float = TENSOR_BUDGET_MIB
    ) -> None:
        super().__init__(patterns)
        self.counts = KeptCounts()
        self.writer, self._budget = writer, budget_mib * MIB
        self._limit = 1 << 62  # elements of a tensor
        self.begin()

    def begin(self, *, is_wanted: bool = True) -> None:
        """Start a step, and drop an unfinished one; without ``is_wanted``,
        copy nothing of the step.
        """
        self._is_wanted = is_wanted
        # op, position of the call's first site, outputs
        self._calls: list[tuple[str, int, dict[int, _Copy]]] = []
        self._left_out: list[str] = []
        self._num_bytes = 0

    def exchange(
        self,
        phase: str,
        module: str,
        op: str,
        outputs: Sequence[Any],
        position: int,
        deferred: DeferredSites,
    ) -> Sequence[Any]:
        """Copy the outputs of a call, and return them unchanged; see ``OutputHook``."""
        if not self._is_wanted:
            return outputs
        held = [
            index
            for index, out in enumerate(outputs)
            if isinstance(out, Tensor) and holds_data(out)
        ]
        try:
            copies = {
                index: self._copy(f"{op}.{index}", outputs[index], deferred) for index in held
            }
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
        return _Copy(
            saved=saved, start=start, statistics=known, is_deferred=deferred.is_deferred(inner)
        )

    def write(self, trace: StepTrace, step: int) -> None:
        """Write the copies of a finished step, before the step is appended to its stream."""
        tensors = {
            key: saved for call in self._calls for key, saved in _entries(trace, *call).items()
        }
        try:
            self.writer.write(
                step, tensors, {LEFT_OUT: self._left_out[0]} if self._left_out else {}
            )
        except DetCallbacksError as error:  # the run does not need these tensors
            self._left_out += [str(error)] * len(self._calls)
            tensors = {}
        reason = f"from step {step} on: {self._left_out[0]}" if self._left_out else ""
        size, num_missing = (
            sum(saved.bits.nbytes for saved in tensors.values()),
            len(self._left_out),
        )
        num_sampled = sum(saved.every > 1 for saved in tensors.values())
        numbers = {"num_tensors": len(tensors), "num_bytes": size, "num_sampled": num_sampled}
        self.counts += KeptCounts(**numbers, num_missing=num_missing, reason=reason)
        self.begin()


def _entries(
    trace: StepTrace, op: str, first: int, outputs: dict[int, _Copy]
) -> dict[str, SavedTensor]:
    """Return the copies of a call by key, each with its site; none if the call made no sites."""
    sites = trace.program.sites
    if first < len(sites) and sites[first].role == "argument":
        first += 1
    entries = {}
    for index, copy in outputs.items():
        site = sites[first + index] if first + index < len(sites) else None
        if site is None or (site.op, site.output, site.role) != (op, index, "output"):
            return {}
        place = {
            name: getattr(site, name) for name in ("phase", "module", "op", "occurrence", "output")
        }
        digest = format_digest(int(trace.digests[first + index]))
        options = {"site_digest": digest, **place}
        if copy.statistics is not None:
            options["statistics"] = dict(zip(STATISTICS, copy.statistics.tolist(), strict=True))
        bits = np.ascontiguousarray(copy.saved.bits).reshape(-1)
        entries[key_of(site)] = replace(copy.saved, bits=bits, options=options)
    return entries
