"""Compares the metrics that modules log, bit for bit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from det_callbacks.runs.manifest import VALIDATION, earlier_choice
from det_callbacks.runs.metrics import CALLS, Metric, Reading, Readings, ReadRow
from det_callbacks.verdict import Cause, Divergence, EnvironmentDifference, Kind

# the cause if rows of a kind differ, the first one that does; a generator may have made the batch
_CAUSES: Mapping[str, Cause] = {
    "length": "data_content",
    "generator": "rng",
    "batch": "data_content",
}
_CHOICES: Mapping[str, Sequence[str]] = {
    # where a metric is read -> settings that determine how often and from which data it is computed
    "validation": VALIDATION,
    "trainer.validate": ("trainer.limit_val_batches",),
}
_AFTER_SITES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """A metric that differs; a run that lacks it has the value None."""

    # among the differences of the run: after all sites of its step
    order: tuple[int, int, int, int]
    segment: int
    name: str
    values: tuple[Metric | None, Metric | None]
    readings: tuple[Reading, Reading]
    choices: Sequence[EnvironmentDifference] = ()  # that differ, and can change bits
    is_after_gap: bool = False  # an unrecorded step may have changed its inputs

    @property
    def kind(self) -> Kind:
        reference, current = self.values
        if reference is None or current is None:
            return "extra" if reference is None else "missing"
        has_same_layout = reference.bits[:2] == current.bits[:2]
        return "content" if has_same_layout else "structure"

    @property
    def is_read_in_one(self) -> bool:
        """Whether one run reads no metric there, as after a shorter epoch."""
        return not all(reading.metrics for reading in self.readings)

    def follows_from_unpaired(self, segment: int) -> bool:
        """Return whether steps of a fit that only one run has explain it."""
        return self._is_missing_in(segment) and self.readings[1].step >= 0

    def follows_from_step(self, segment: int, step: int) -> bool:
        """Return whether a step that differs explains it: an epoch ended there in only one run."""
        is_since = step <= 1 + self.readings[1].step
        return self._is_missing_in(segment) and is_since and self.explaining_choice is None

    def _is_missing_in(self, segment: int) -> bool:
        return self.segment == segment and self.is_read_in_one

    @property
    def differing_reads(self) -> list[tuple[ReadRow, str, str]]:
        """What it depends on and differs, with the value of each run."""
        if self.kind != "content":
            return []
        reference, current = ({row[:2]: row for row in reading.reads} for reading in self.readings)
        differing = []
        for place, row in {**current, **reference}.items():
            values = [
                side[place].value if place in side else "none" for side in (reference, current)
            ]
            if values[0] != values[1]:
                differing.append((row, values[0], values[1]))
        return differing

    @property
    def root(self) -> tuple[ReadRow, str, str] | None:
        """The row among ``differing_reads`` that it depends on, if any."""
        kinds = [*_CAUSES]
        roots = [entry for entry in self.differing_reads if entry[0].kind in kinds]
        return min(roots, key=lambda entry: kinds.index(entry[0].kind), default=None)

    @property
    def explaining_choice(self) -> EnvironmentDifference | None:
        """The setting that explains it, unless different data do."""
        if self.root is not None and _CAUSES[self.root[0].kind] == "data_content":
            return None
        names = _CHOICES.get(self.readings[1].where, ())
        return next((choice for choice in self.choices if choice.name in names), None)

    @property
    def cause(self) -> Cause:
        if self.explaining_choice is not None:
            return "settings"
        if self.root is not None:
            return _CAUSES[self.root[0].kind]
        if self.kind != "content":
            return "structure"
        return (
            "settings"
            if self.is_after_gap and earlier_choice(self.choices) is not None
            else "unknown"
        )

    def divergence(self) -> Divergence:
        reference, current = self.values
        metric = current if current is not None else reference
        assert metric is not None, "one run has it"
        return Divergence(
            rank=0,
            step=max(0, self.order[1]),
            phase="metric",
            name=self.name,
            kind=self.kind,
            shape=metric.shape,
            dtype=metric.dtype,
            reference_digest=None if reference is None else reference.digest,
            current_digest=None if current is None else current.digest,
            segment=self.segment,
        )


class MetricComparison:
    """Compares readings with those of the same ``Reading.key`` in the reference, as they come.

    With ``is_common``, a reading that only one run has is not a difference.
    """

    def __init__(self, *, is_common: bool) -> None:
        self.first: MetricDifference | None = None
        self.num_compared = self.num_differing = 0
        self._segment = 0
        self._pending: dict[tuple[str, int, bool], Reading] = {}
        self._resumed: set[int] = set()
        self._is_common = is_common

    def begin(self, segment: int, reference: Readings) -> None:
        self.end()
        self._segment = segment
        self._pending = dict(reference.by_key)
        self._resumed = set(reference.resumed)

    @property
    def pending_calls(self) -> tuple[str, ...]:
        """The reference's calls outside of a fit that have not come yet."""
        return tuple(where for where, *_ in self._pending if where in CALLS and not self._is_common)

    def resume(self, step: int, *, is_first: bool) -> None:
        """Ignore readings that may be missing after a resume;
        with ``is_first`` also all before it.
        """
        self._resumed.add(step)
        if is_first:
            self._pending = {
                key: reading for key, reading in self._pending.items() if reading.step >= step
            }

    def add(self, reading: Reading) -> bool:
        """Compare a reading, and count the reference's earlier ones as missing;
        return whether it differs.

        A reading that only this run has is counted and returns False,
        because missing steps may explain it.
        """
        before = self.num_differing
        of_fits = [pending for pending in self._pending.values() if pending.where not in CALLS]
        self._count_missing([earlier for earlier in of_fits if earlier.order < reading.order])
        reference = self._pending.pop(reading.key, None)
        if reference is not None:
            self.num_compared += len(reading.metrics.keys() & reference.metrics)
            self._count_differing(reference, reading)
        differs = self.num_differing > before
        if reference is None and not self._is_common and reading.step not in self._resumed:
            self._count_differing(replace(reading, metrics={}), reading)
        return differs

    def end(self, *, with_calls: bool = True) -> None:
        """Count the remaining readings as missing; without ``with_calls``,
        not those after the fit.
        """
        pending = self._pending.values()
        self._count_missing([one for one in pending if with_calls or not one.is_after_fit])

    def _count_missing(self, readings: list[Reading]) -> None:
        for reading in readings:
            del self._pending[reading.key]
            if not self._is_common and reading.step not in self._resumed:
                self._count_differing(reading, replace(reading, metrics={}))

    def _count_differing(self, reference: Reading, current: Reading) -> None:
        step, where, call = current.order
        for number, name in enumerate({**current.metrics, **reference.metrics}):
            reference_metric = reference.metrics.get(name)
            current_metric = current.metrics.get(name)
            if (
                reference_metric is not None
                and current_metric is not None
                and reference_metric.bits == current_metric.bits
            ):
                continue
            has_other_hook = any(row.kind == "hook" for row in (*reference.reads, *current.reads))
            if None in (reference_metric, current_metric) and has_other_hook:
                continue  # only one run may have run the hook that logs it
            self.num_differing += 1
            difference = MetricDifference(
                order=(self._segment, step, _AFTER_SITES + (where << 20) + call, number),
                segment=self._segment,
                name=name,
                values=(reference_metric, current_metric),
                readings=(reference, current),
            )
            self.first = min(self.first or difference, difference, key=lambda one: one.order)
