"""Keeping the tensors of chosen ops while a run is recorded or verified, within a budget."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from det_callbacks.digest import format_digest
from det_callbacks.errors import DetCallbacksError
from det_callbacks.kept.counts import KeptCounts, Shortage
from det_callbacks.kept.files import kept_folder, kept_path, write_shortage
from det_callbacks.replay.files import StepPlace, write_step
from det_callbacks.replay.late import Copy, copy_in_order, settled
from det_callbacks.replay.ops import OpSelection
from det_callbacks.replay.parts import SavedTensor, num_bytes
from det_callbacks.replay.saving import MIB, RESERVED_BYTES
from det_callbacks.runs.program import Site
from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.components import holds_data, unwrapped
from det_callbacks.trace.late_sites import LateSites


@dataclass(slots=True, kw_only=True)
class _Call:
    """One call of an op.

    Attributes:
        op: ``namespace.op.overload``.
        late: of the step.
        reads: argument, name and copy of each tensor that it read.
        outputs: index and copy of each tensor that it wrote.
        position: sites that the step had before those of the call.
        num_bytes: of all copies.
    """

    op: str
    late: LateSites | None
    reads: list[tuple[str, str | None, Copy]] = field(default_factory=list)
    outputs: list[tuple[int, Copy]] = field(default_factory=list)
    position: int = 0
    num_bytes: int = 0


class Keeper(OpSelection):
    """Copies what chosen ops read and write, and writes the steps that are to be kept.

    A copy is made at once, since a tensor may change later in its step; from a device that computes digests it is
    fetched in the order of the device's work, into pinned memory, and has arrived when the step is settled. A call is
    kept whole or not at all. What the budget, or the disk, does not suffice for is counted and said, and the run goes
    on: no digest depends on it. One step is held in memory, at most the budget.

    Args:
        patterns: which ops, ``[phase/][module:]op`` each.
        stream: the stream that the steps are appended to; their tensors go beside it.
        budget_mib: what one step may keep, in MiB.
        run_id: of the run.
        rank: of this process.
        segment: fit of the run.
    """

    def __init__(
        self, patterns: Sequence[str], stream: Path, *, budget_mib: float, run_id: str, rank: int, segment: int
    ) -> None:
        super().__init__(patterns)
        self._budget_mib = budget_mib
        self._stream = stream
        self._place = StepPlace(run_id=run_id, rank=rank, segment=segment, step=-1)
        self._kept: list[_Call] = []
        self._is_wanted = True
        self._left_out: list[str] = []
        self._in_step = 0
        self._written = KeptCounts()
        self._shortages: dict[int, Shortage] = {}

    @property
    def counts(self) -> KeptCounts:
        """What was kept so far, and what was not, in all fits."""
        counts = self._written
        for shortage in self._shortages.values():
            counts = counts.with_rank(KeptCounts(shortage=shortage))
        return counts

    def start_segment(self, stream: Path, segment: int) -> None:
        """Go on with the steps of another fit."""
        self.close()
        self.clear()
        self._stream = stream
        self._place = replace(self._place, segment=segment)

    def begin(self, *, is_wanted: bool = True) -> None:
        """Start a step.

        Args:
            is_wanted: whether its tensors may be asked for; without it nothing is copied.
        """
        self.clear()
        self._is_wanted = is_wanted

    def clear(self) -> None:
        """Forget the step under way."""
        self._kept = []
        self._left_out = []
        self._in_step = 0

    def begin_call(
        self, op: str, reads: Sequence[tuple[str, str | None, Tensor]], late: LateSites | None = None
    ) -> _Call | None:
        """Copy what a call is about to read; see ``TensorKeeper``."""
        if not self._is_wanted:
            return None
        call = _Call(op=op, late=late)
        unwrapping = ((argument, name, unwrapped(tensor)) for argument, name, tensor in reads)
        held = [read for read in unwrapping if holds_data(read[2])]
        copies = self._copy(call, [tensor for _, _, tensor in held])
        if copies is None:
            return None
        call.reads = [(argument, name, copy) for (argument, name, _), copy in zip(held, copies, strict=True)]
        return call

    def end_call(self, call: _Call, outputs: Sequence[Any], position: int) -> None:
        """Copy what a call wrote; see ``TensorKeeper``."""
        unwrapping = ((index, unwrapped(out)) for index, out in enumerate(outputs) if isinstance(out, Tensor))
        held = [(index, output) for index, output in unwrapping if holds_data(output)]
        copies = self._copy(call, [output for _, output in held]) if held else []
        if not copies:
            return
        self._in_step += call.num_bytes
        call.outputs = [(index, copy) for (index, _), copy in zip(held, copies, strict=True)]
        call.position = position
        self._kept.append(call)

    def _copy(self, call: _Call, tensors: Sequence[Tensor]) -> list[Copy] | None:
        """Return copies, None where they do not fit or cannot be made."""
        try:
            needed = sum(map(num_bytes, tensors))
            if self._in_step + call.num_bytes + needed > self._budget_mib * MIB:
                self._left_out.append(f"a step may keep {self._budget_mib:g} MiB (tensor_budget_mib)")
                return None
            copies = [copy_in_order(tensor, call.late) for tensor in tensors]
        # memory that cannot be reached, or is not there; the training goes on
        except (DetCallbacksError, torch.OutOfMemoryError) as error:
            self._left_out.append(str(error))
            return None
        call.num_bytes += needed
        return copies

    def write(self, trace: StepTrace, step: int) -> None:
        """Write what was kept of a step that ended, before the step itself is appended to its stream.

        Args:
            trace: of the step.
            step: training batch.
        """
        calls, self._kept = self._kept, []
        path = kept_path(self._stream, step)
        path.unlink(missing_ok=True)  # of a step that was recorded before
        tensors = dict(entry for call in calls for entry in _entries(call, trace))
        if tensors:
            self._write(path, step, tensors, num_calls=len(calls))
        if self._left_out:
            self._note_shortage(step)
        self.clear()

    def _write(self, path: Path, step: int, tensors: dict[str, SavedTensor], *, num_calls: int) -> None:
        free = shutil.disk_usage(self._stream.parent).free
        if free < self._in_step + RESERVED_BYTES:
            self._left_out += [f"the disk had {free / MIB:.3g} MiB left"] * num_calls
            return
        try:
            written = write_step(path, replace(self._place, step=step), tensors)
        except (OSError, SafetensorError) as error:  # the run does not depend on it; it is said with the others
            self._left_out += [f"{path} could not be written ({error})"] * num_calls
            return
        self._written = replace(
            self._written,
            num_tensors=self._written.num_tensors + len(tensors),
            num_steps=self._written.num_steps + 1,
            num_bytes=self._written.num_bytes + written,
        )

    def _note_shortage(self, step: int) -> None:
        is_first = self._place.segment not in self._shortages
        none = Shortage(first_step=step, num_calls=0, reason=self._left_out[0])
        known = none if is_first else self._shortages[self._place.segment]
        self._shortages[self._place.segment] = replace(known, num_calls=known.num_calls + len(self._left_out))
        if is_first:  # a kill loses the number only
            self.close()

    def close(self) -> None:
        """Write what was not kept in this fit; where the disk is full, only the closing line says it."""
        shortage = self._shortages.get(self._place.segment)
        if shortage is None:
            return
        try:
            write_shortage(self._stream, shortage)
        except OSError as error:
            reason = f"{shortage.reason}, which could not be noted ({error})"
            self._shortages[self._place.segment] = replace(shortage, reason=reason)

    def delete(self) -> None:
        """Delete everything that was kept beside the stream: its attempt is taken back."""
        self.clear()
        folder = kept_folder(self._stream)
        if folder.is_dir():
            shutil.rmtree(folder)


def _entries(call: _Call, trace: StepTrace) -> list[tuple[str, SavedTensor]]:
    """Return the copies of a call by key, with the site that each belongs to; none where it made no sites."""
    sites, first = trace.program.sites, call.position
    if first < len(sites) and sites[first].role == "argument":
        first += 1
    entries = []
    for index, late_copy in call.outputs:
        position = first + index
        if position >= len(sites) or not _is_output(sites[position], call.op, index):
            return []
        options = {"kept": "output", **_place(sites[position]), "site": position}
        copy = settled(late_copy)
        options["site_digest"] = format_digest(int(trace.digests[position]))
        entries.append((_key(sites[position]), replace(copy, options={**copy.options, **options})))
    for argument, name, late_copy in call.reads:
        copy = settled(late_copy)
        options = {"kept": "input", "argument": argument, "name": name, "site": first}
        key = f"{_key(sites[first])} {argument}"
        entries.append((key, replace(copy, options={**copy.options, **options})))
    return entries


def _is_output(site: Site, op: str, index: int) -> bool:
    return site.op == op and site.output == index and site.role == "output"


def _place(site: Site) -> dict[str, Any]:
    return {
        "phase": site.phase,
        "module": site.module,
        "op": site.op,
        "occurrence": site.occurrence,
        "output": site.output,
    }


def _key(site: Site) -> str:
    return f"{site.phase}/{site.module}:{site.op}#{site.occurrence}.{site.output}"
