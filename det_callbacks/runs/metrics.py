"""The metrics that a run logs on rank 0: after validations, epochs and tests,
or between two steps.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from det_callbacks.runs.files import MAX_BYTES, READ_ERRORS, damaged, opened, seal, unseal
from det_callbacks.runs.store import Run

CALLS = ("trainer.validate", "trainer.test")  # sources of metrics without a fit

# A reading without metrics: a process resumed from a checkpoint, and may lack readings of this
# step. Lightning leaves out what ended before a checkpoint was saved, and restarts the mean of an
# epoch in its middle.
RESUMED = "resumed"

# Readings of a TrainingRun, whose loop may log after any step.
LOG = "log"

# Where readings are made, in their order in a step.
WHERE = (RESUMED, "validation", "epoch", LOG, *CALLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One value: dtype, shape, digest of its bits, and text."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    value: str

    @property
    def bits(self) -> tuple[str, tuple[int, ...], str]:
        """The part that must be equal in two runs."""
        return self.dtype, self.shape, self.digest


class ReadRow(NamedTuple):
    """Something that the metrics of a reading depend on, with its value as text.

    The length of the data of a loader, the state of a generator after the metrics were computed, a
    tensor of the first batch of a loader, or that another hook than usual began the epoch, so that
    other metrics may be logged.
    """

    kind: Literal["length", "generator", "batch", "hook"]
    of: str
    value: str

    @property
    def shown(self) -> str:
        """What it is, in words."""
        words = {"length": "samples of ", "batch": "first batch of ", "hook": ""}
        return words.get(self.kind, f"{self.kind} ") + self.of


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The metrics that were computed at one place, in the order of the log."""

    where: str
    number: int  # the step, or the number of calls of this kind since the last fit began
    step: int  # the last training step before it, or -1
    epoch: int
    metrics: Mapping[str, Metric]
    reads: tuple[ReadRow, ...] = ()  # explain a difference

    @property
    def key(self) -> tuple[str, int, bool]:
        """Equal for readings of two runs that are compared."""
        return self.where, self.number, self.is_after_fit

    @property
    def is_after_fit(self) -> bool:
        """Whether it is of a call after the fit; calls before the first fit are
        in the same file.
        """
        return self.where in CALLS and self.step >= 0

    @property
    def order(self) -> tuple[int, int, int]:
        """The key by which readings of one fit are sorted."""
        return self.step, WHERE.index(self.where), self.number

    @property
    def place(self) -> str:
        """Where the reading was made, in words."""
        if self.where in CALLS:
            call = f" (call {self.number + 1})" if self.number else ""
            return f"in {self.where}{call}" + (
                f" after step {self.step}" if self.is_after_fit else ""
            )
        if self.where in ("validation", LOG):
            return (
                f"{'logged' if self.where == LOG else 'in the validation'} after step {self.step}"
            )
        return f"of epoch {self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """The readings of one fit and of calls after it, in order; ``resumed``: steps after RESUMED."""

    by_key: dict[tuple[str, int, bool], Reading] = field(default_factory=dict)
    resumed: set[int] = field(default_factory=set)


def metrics_path(stream: Path) -> Path:
    return stream.with_name(f"{stream.name.removesuffix('.arrows')}.metrics.jsonl")


def line_of(reading: Reading, *, run_id: str) -> bytes:
    return seal(reading, run_id=run_id) + b"\n"


def read_metrics(run: Run, segment: int) -> Readings:
    """Return the readings of a fit: the first attempt's, and of calls after it the last attempt's.

    An epoch that began in one attempt and ended in another has no reading.
    """
    run_id = run.manifest.run_id
    attempts = [
        [*_read(metrics_path(stream), run_id, num_listed=num_readings)]
        for stream, num_readings in run.streams(segment)
    ]
    ends = [
        {reading.step for reading in attempt if reading.where in (RESUMED, "epoch")}
        for attempt in attempts
    ]
    by_key: dict[tuple[str, int, bool], Reading] = {}
    for attempt in attempts:
        by_key = {key: reading for key, reading in by_key.items() if not reading.is_after_fit}
        for reading in attempt:
            is_cut = reading.where == "epoch" and any(
                _passes_through(reading.step, steps) for steps in ends
            )
            if reading.where != RESUMED and not is_cut:
                by_key.setdefault(reading.key, reading)
    resumed = {
        reading.step for attempt in attempts for reading in attempt if reading.where == RESUMED
    }
    in_order = sorted(by_key.items(), key=lambda item: item[1].order)
    return Readings(by_key=dict(in_order), resumed=resumed)


def _passes_through(step: int, ends: set[int]) -> bool:
    return min(ends, default=step) < step < max(ends, default=step) and step not in ends


def _read(path: Path, run_id: str, *, num_listed: int) -> Iterator[Reading]:
    number = 0
    if os.path.lexists(path):
        with opened(path) as file:
            # the last line may be incomplete
            while (line := file.readline(MAX_BYTES)).endswith(b"\n"):
                number += 1
                try:
                    reading = unseal(line[:-1], Reading, run_id=run_id)
                    if reading.where not in WHERE:
                        raise ValueError(f"it was made at an unknown place, {reading.where!r}")
                    yield reading
                except READ_ERRORS as error:
                    raise damaged(
                        path, f"line {number} is not a reading of metrics ({error})"
                    ) from error
            if len(line) == MAX_BYTES:
                raise damaged(path, f"line {number + 1} has no end")
    if number < num_listed:
        raise damaged(path, f"run.json has {num_listed} readings, but the file has {number}")
