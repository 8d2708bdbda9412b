"""``rank-00000/record.json``: what one rank of a verification compared, including matches.

A rank writes it when a fit begins, with each step that it stores, every 1,000 steps, and when the
fit ends: only then it does not say ``UNFINISHED``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.files import (
    READ_ERRORS,
    damaged,
    rank_folder,
    read_file,
    replace_atomically,
    seal,
    unseal,
)
from det_callbacks.runs.program import Program
from det_callbacks.runs.store import Run
from det_callbacks.verdict import EnvironmentDifference

RECORD_FILE = "record.json"
VERDICT_FILE = "verdict.json"
REPORT_FILE = "report.html"

TOGETHER = "divergence"
"""Why a verification was stopped on all ranks after the same step: it differed on one of them."""

UNFINISHED = "unfinished"
"""Why the comparison ends at a step without having been stopped: a kill,
unless the verification is still running.
"""


@dataclass(slots=True, kw_only=True)
class Tally:
    """How much was compared, of one rank or of several; see ``Coverage``."""

    num_steps: int = 0  # that both runs have
    num_sites: int = 0
    num_differing: int = 0  # sites and metrics, and steps in only one run
    steps: tuple[int, int] | None = None
    ops_seen: int = 0
    ops_digested: int = 0
    ops_skipped: dict[str, int] = field(default_factory=dict)
    opaque_regions: set[str] = field(default_factory=set)
    replayed: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_metrics: int = 0
    reordered: set[str] = field(default_factory=set)  # phases, see ``Alignment``

    def count(self, steps: Sequence[int], program: Program, num_sites: int) -> None:
        """Count steps of one program, in order, and the sites of all of them."""
        number = len(steps)
        self.num_steps += number
        self.num_sites += num_sites
        self._include(steps[0], steps[-1])
        self.ops_seen += program.ops_seen * number
        self.ops_digested += program.ops_digested * number
        self._skip(program.ops_skipped, number)
        self.opaque_regions.update(program.opaque_regions)

    def add(self, other: "Tally") -> None:
        for name in (
            "num_steps",
            "num_sites",
            "num_differing",
            "ops_seen",
            "ops_digested",
            "num_metrics",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._include(*(other.steps or ()))
        self._skip(other.ops_skipped)
        self.opaque_regions |= other.opaque_regions
        self.reordered |= other.reordered
        for name, entry in other.replayed.items():
            counts = self.replayed.setdefault(name, {})
            for key, value in entry.items():
                counts[key] = counts.get(key, 0) + value

    def _skip(self, ops: Mapping[str, int], number: int = 1) -> None:
        for reason, skipped in ops.items():
            self.ops_skipped[reason] = self.ops_skipped.get(reason, 0) + skipped * number

    def _include(self, *steps: int) -> None:
        ends = (*(self.steps or ()), *steps)
        self.steps = (min(ends), max(ends)) if ends else None


@dataclass(slots=True, kw_only=True)
class FitRecord:
    """The steps of one fit that a verification compared; filled while it runs."""

    segment: int
    compared: set[int] = field(default_factory=set)  # steps that the reference also has
    differing: set[int] = field(default_factory=set)
    extra: set[int] = field(default_factory=set)
    num_stored: int = 0  # that differ or are extra
    is_resumed: bool = False  # from a checkpoint: the reference's earlier steps are not missing
    metrics_since: int | None = None  # before which a resumed fit logged nothing
    was_found: bool = False  # by its state, which step it was resumed at
    # state that a checkpoint restored with different bits, or not at all
    unrestored: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()  # the latter
    exchanged: tuple[str, ...] = ()  # of the former, those that hold each other's bits

    def missing(self, reference_steps: Iterable[int]) -> set[int]:
        """Return the reference's steps that the fit lacks."""
        begins = min(self.compared | self.extra, default=0) if self.is_resumed else 0
        return {step for step in reference_steps if step >= begins} - self.compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where a verification was stopped; later steps are not missing."""

    segment: int
    step: int  # the last one that was compared; -1 before the first
    reason: str  # TOGETHER, UNFINISHED, or the name of an exception


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank of a verification compared, except metrics, which are all stored."""

    run_id: str
    reference_id: str
    rank: int
    steps: Literal["all", "common"]
    fits: tuple[FitRecord, ...]
    tally: Tally
    # how this rank's machine differs from the reference's first rank
    machine: tuple[EnvironmentDifference, ...] = ()
    stopped: Stop | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether the verification was killed, or is still running."""
        return self.stopped is not None and self.stopped.reason == UNFINISHED

    def fit(self, segment: int) -> FitRecord | None:
        """Return the record of a fit, or None if that did not begin."""
        return next((fit for fit in self.fits if fit.segment == segment), None)


def record_path(folder: Path, rank: int) -> Path:
    return folder / rank_folder(rank) / RECORD_FILE


def write_record(folder: Path, record: RankRecord) -> None:
    """Write a record atomically."""
    replace_atomically(record_path(folder, record.rank), seal(record, run_id=record.run_id))


def read_record(current: Run, rank: int) -> RankRecord:
    """Return the record of a rank; ReferenceFormatError if it is missing,
    damaged or of another verification.
    """
    path = record_path(current.path, rank)
    try:
        record = unseal(read_file(path), RankRecord, run_id=current.manifest.run_id)
    except FileNotFoundError as error:
        raise ReferenceFormatError(
            f"{path} is missing, so it is unknown what the verification compared. Verify again.",
            str(path),
        ) from error
    except READ_ERRORS as error:
        raise damaged(path, f"it is not a record of this verification ({error})") from error
    if record.rank != rank:
        raise damaged(path, f"it is from rank {record.rank}")
    return record


def read_records(reference: Run, current: Run) -> dict[int, RankRecord]:
    """Return the record of each rank; ReferenceFormatError if the reference has changed."""
    records = {rank: read_record(current, rank) for rank in current.ranks}
    others = {record.reference_id for record in records.values()} - {reference.manifest.run_id}
    if others:
        raise ReferenceFormatError(
            f"{current.path} was verified against a different reference "
            f"({', '.join(sorted(others))}) from the run in {reference.path} "
            f"({reference.manifest.run_id}), which was recorded later or elsewhere. Nothing was "
            "compared. Verify again, or pass the reference of that verification.",
            str(reference.path),
        )
    return records
