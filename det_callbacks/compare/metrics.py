"""Compares the metrics that modules log, bit for bit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from det_callbacks.runs.environment import VALIDATION, earlier_choice
from det_callbacks.runs.metrics import CALLS, Metric, Reading, Readings
from det_callbacks.verdict import Cause, Divergence, EnvironmentDifference, Kind

GENERATOR_STATE, LENGTH, FIRST_BATCH = "generator ", "samples of ", "first batch of "
OTHER_HOOKS = "on_train_epoch_start"
"""Prefixes of the names in ``Reading.evidence``; the last if a resumed process ran different hooks at its start."""

_CAUSES: tuple[tuple[str, Cause], ...] = (
    (LENGTH, "data_content"),
    (GENERATOR_STATE, "rng"),
    (FIRST_BATCH, "data_content"),
)
_CHOICES: Mapping[str, Sequence[str]] = {
    # where a metric is read -> settings that determine how often and from which data it is computed
    "validation": VALIDATION,
    "trainer.validate": ("trainer.limit_val_batches",),
}
_AFTER_SITES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """A metric that differs; a run that lacks it has the value None."""

    order: tuple[int, int, int, int]  # among the differences of the run: after all sites of its step
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

    def follows_from(self, segment: int, step: int | None = None) -> bool:
        """Return whether steps in only one run, or an epoch that ended in only one run, explain it."""
        if self.segment != segment or not self.is_read_in_one:
            return False
        at = self.readings[1].step
        return at >= 0 if step is None else step <= 1 + at and self.explaining_choice is None

    @property
    def evidence(self) -> list[tuple[str, str, str]]:
        """The evidence that differs with it: name, value in the reference, value in the current run."""
        reference, current = (reading.evidence for reading in self.readings)
        rows = ((name, reference.get(name, "none"), current.get(name, "none")) for name in {**current, **reference})
        return [row for row in rows if row[1] != row[2]] if self.kind == "content" else []

    @property
    def known_reason(self) -> tuple[Cause, str]:
        """The cause, and the name of its evidence or ""."""
        names = [name for name, *_ in self.evidence]
        found = ((cause, name) for kind, cause in _CAUSES for name in names if name.startswith(kind))
        return next(found, ("unknown" if self.kind == "content" else "structure", ""))

    @property
    def explaining_choice(self) -> EnvironmentDifference | None:
        """The setting that explains it, unless different data do."""
        names = () if self.known_reason[0] == "data_content" else _CHOICES.get(self.readings[1].where, ())
        return next((one for one in self.choices if one.name in names), None)

    @property
    def cause(self) -> Cause:
        known = self.known_reason[0]
        is_explained = known == "unknown" and self.is_after_gap and earlier_choice(self.choices) is not None
        return "settings" if is_explained or self.explaining_choice is not None else known

    def divergence(self) -> Divergence:
        reference, current = self.values
        known = current if current is not None else reference
        assert known is not None, "one run has it"
        return Divergence(
            rank=0,
            step=max(0, self.order[1]),
            phase="metric",
            name=self.name,
            kind=self.kind,
            shape=known.shape,
            dtype=known.dtype,
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
        """Ignore readings that may be missing after a resume; with ``is_first`` also all before it."""
        self._resumed.add(step)
        if is_first:
            self._pending = {key: reading for key, reading in self._pending.items() if reading.step >= step}

    def add(self, reading: Reading) -> bool:
        """Compare a reading, and count the reference's earlier ones as missing; return whether it differs.

        A reading that only this run has is counted and returns False, because missing steps may explain it.
        """
        before = self.num_differing
        of_fits = [known for known in self._pending.values() if known.where not in CALLS]
        self._miss([known for known in of_fits if known.order < reading.order])
        reference = self._pending.pop(reading.key, None)
        if reference is not None:
            self.num_compared += len(reading.metrics.keys() & reference.metrics)
            self._count(reference, reading)
        differs = self.num_differing > before
        if reference is None and not self._is_common and reading.step not in self._resumed:
            self._count(replace(reading, metrics={}), reading)
        return differs

    def end(self, *, with_calls: bool = True) -> None:
        """Count the remaining readings as missing; without ``with_calls``, not those after the fit."""
        self._miss([one for one in self._pending.values() if with_calls or not one.is_after_fit])

    def _miss(self, readings: list[Reading]) -> None:
        for reading in readings:
            del self._pending[reading.key]
            if not self._is_common and reading.step not in self._resumed:
                self._count(reading, replace(reading, metrics={}))

    def _count(self, reference: Reading, current: Reading) -> None:
        step, where, call = current.order
        for number, name in enumerate({**current.metrics, **reference.metrics}):
            reference_metric, current_metric = reference.metrics.get(name), current.metrics.get(name)
            if (
                reference_metric is not None
                and current_metric is not None
                and reference_metric.bits == current_metric.bits
            ):
                continue
            if None in (reference_metric, current_metric) and OTHER_HOOKS in {**reference.evidence, **current.evidence}:
                continue  # only one run may have run the hook that logs it
            self.num_differing += 1
            found = MetricDifference(
                order=(self._segment, step, _AFTER_SITES + (where << 20) + call, number),
                segment=self._segment,
                name=name,
                values=(reference_metric, current_metric),
                readings=(reference, current),
            )
            self.first = min(self.first or found, found, key=lambda one: one.order)
