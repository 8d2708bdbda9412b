"""Comparing what modules log: its metrics, bit for bit, in a verification and in two recorded runs alike."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from det_callbacks.compare.first_difference import Words
from det_callbacks.runs.metrics import CALLS, Metric, Reading, Readings
from det_callbacks.verdict import Cause, Divergence, Kind

GENERATOR, LENGTH, FIRST_BATCH = "generator ", "samples of ", "first batch of "
"""Begin the names of evidence."""

_AFTER_SITES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """The first metric that differs, and how many do.

    Attributes:
        order: among the differences of the run: after all sites of its step.
        divergence: of the metric.
        words: what is said of it.
        count: of metrics that differ.
    """

    order: tuple[int, int, int, int]
    divergence: Divergence
    words: Words
    count: int = 1

    @property
    def has_other_bits(self) -> bool:
        """Whether both runs have it, with other bits."""
        return self.divergence.kind == "content"

    def and_more(self, other: "MetricDifference") -> "MetricDifference":
        """Return the first of two, which counts both."""
        first = min(self, other, key=lambda one: one.order)
        return replace(first, count=self.count + other.count)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "order": list(self.order),
            "divergence": self.divergence.to_dict(),
            "words": asdict(self.words),
            "count": self.count,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "MetricDifference":
        """Return what ``to_dict`` gave, also after it went through JSON; KeyError or TypeError where it is not that."""
        segment, step, position, number = content["order"]
        return cls(
            order=(segment, step, position, number),
            divergence=Divergence.from_dict(content["divergence"]),
            words=Words(**{**content["words"], "evidence": tuple(content["words"]["evidence"])}),
            count=content["count"],
        )


class MetricSink(Protocol):
    """What differences are counted in: a ``VerdictBuilder``."""

    def add_metrics(self, differences: Iterable[MetricDifference], *, num_compared: int = 0) -> None:
        """Count metrics that differ, and how many both runs have."""


class MetricComparison:
    """Compares the readings of one fit, and of the calls after it, with the reference's as they come.

    Args:
        reference: its readings.
        segment: fit.
        counts_missing: whether readings that only the reference has are differences.
        counts_extra: likewise, that only the current run has.
        put: keeps a reading without metrics, for each that is missing.
    """

    def __init__(
        self,
        reference: Readings,
        *,
        segment: int,
        counts_missing: bool,
        counts_extra: bool,
        put: Callable[[Reading], object] = lambda reading: None,
    ) -> None:
        self._put = put
        self._segment = segment
        self._left = dict(reference.by_key)
        self._resumed = set(reference.resumed)
        self._counts_missing = counts_missing
        self._counts_extra = counts_extra

    @property
    def pending_calls(self) -> tuple[str, ...]:
        """The calls outside of a fit that the reference has and this run had not so far."""
        return tuple(where for where, _ in self._left if where in CALLS and self._counts_missing)

    def resume(self, step: int) -> None:
        """Leave out what may lack because a process of the current run was resumed: see ``RESUMED``."""
        self._resumed.add(step)

    def leave_out(self, *, before: int) -> None:
        """Leave out what the reference has from before a step."""
        self._left = {key: reading for key, reading in self._left.items() if reading.step >= before}

    def add(self, reading: Reading, builder: MetricSink) -> bool:
        """Compare a reading, and count those of the reference before it as missing; return whether they differ."""
        before = [one for one in self._left.values() if one.where not in CALLS and one.order < reading.order]
        is_lacking = self._miss(before, builder)
        ours = self._left.pop(reading.key, None)
        found: list[MetricDifference] = []
        if ours is not None:
            found += self._differences(ours, reading)
        elif self._counts_extra and reading.step not in self._resumed:
            found += self._differences(replace(reading, metrics={}), reading)
        num_compared = 0 if ours is None else len(reading.metrics.keys() & ours.metrics)
        builder.add_metrics(found, num_compared=num_compared)
        return bool(found) or is_lacking

    def end(self, builder: MetricSink, *, with_calls: bool = True) -> None:
        """Count the readings that this run had not as missing.

        Args:
            builder: what they are counted in.
            with_calls: also of calls outside of a fit, which may come after it.
        """
        self._miss([one for one in self._left.values() if with_calls or one.where not in CALLS], builder)

    def pending(self, builder: MetricSink) -> None:
        """Do what ``end`` does, as if there came no more."""
        left, put = dict(self._left), self._put
        self._put = lambda reading: None
        self.end(builder)
        self._left, self._put = left, put

    def _miss(self, readings: list[Reading], builder: MetricSink) -> bool:
        for reading in readings:
            del self._left[reading.key]
        missing = [one for one in readings if self._counts_missing and one.step not in self._resumed]
        for reading in missing:
            empty = replace(reading, metrics={})
            self._put(empty)
            builder.add_metrics([*self._differences(reading, empty)])
        return bool(missing)

    def _differences(self, ours: Reading, theirs: Reading) -> Iterator[MetricDifference]:
        for number, name in enumerate({**theirs.metrics, **ours.metrics}):
            left, right = ours.metrics.get(name), theirs.metrics.get(name)
            if left is not None and right is not None and left.bits == right.bits:
                continue
            step, where, call = theirs.order
            yield MetricDifference(
                order=(self._segment, step, _AFTER_SITES + (where << 20) + call, number),
                divergence=_divergence(name, left, right, step=max(0, step)),
                words=_words(name, left, right, ours, theirs, segment=self._segment),
            )


def _kind(left: Metric | None, right: Metric | None) -> Kind:
    if left is None or right is None:
        return "extra" if left is None else "missing"
    return "content" if left.bits[:2] == right.bits[:2] else "structure"


def _divergence(name: str, left: Metric | None, right: Metric | None, *, step: int) -> Divergence:
    known = right if right is not None else left
    assert known is not None, "one run has it"
    return Divergence(
        rank=0,
        step=step,
        phase="metric",
        module="",
        op="",
        occurrence=0,
        output=0,
        name=name,
        kind=_kind(left, right),
        source=(),
        shape=known.shape,
        dtype=known.dtype,
        reference_digest=None if left is None else left.digest,
        current_digest=None if right is None else right.digest,
        is_origin=None,
    )


def _words(
    name: str, left: Metric | None, right: Metric | None, ours: Reading, theirs: Reading, *, segment: int
) -> Words:
    where = theirs.place + (f" of fit {segment}" if segment else "")
    if left is None or right is None:
        text = f"metric {name} {where} is only in the {'current run' if left is None else 'reference'}"
        return Words(cause="structure", text=text)
    text = f"metric {name} {where} differs: {_shown(left, right)}"
    if _kind(left, right) == "structure":
        return Words(cause="structure", text=text)
    evidence = [
        (known, ours.evidence.get(known, "none"), theirs.evidence.get(known, "none"))
        for known in {**theirs.evidence, **ours.evidence}
        if ours.evidence.get(known) != theirs.evidence.get(known)
    ]
    cause, advice = _cause(name, [known for known, *_ in evidence])
    lines = tuple(f"{known}, {where}: {before} in the reference, {now} now" for known, before, now in evidence)
    return Words(cause=cause, text=text, advice=advice, evidence=lines)


def _cause(name: str, evidence: list[str]) -> tuple[Cause, str]:
    """Return what a metric that differs alone comes from, and what to do; ``evidence`` is what differs with it."""

    def first(kind: str) -> str:
        return next((known for known in evidence if known.startswith(kind)), "")

    if found := first(LENGTH):
        return "data_content", f"The data are others: {found} are not as many"
    if found := first(GENERATOR):
        return "rng", f"Seed the evaluation alike: the {found} is in another state after it"
    if found := first(FIRST_BATCH):
        return "data_content", f"Look at the data that it is computed from: the {found} differs"
    return "unknown", (
        "Look at how it is computed, and from what: the generators agree, and what is known of the data of evaluations "
        '(their number, the first batch). What can never repeat, such as a wall clock, is left out by modules=["*", '
        f'"!metric/{name}"]'
    )


def _shown(left: Metric, right: Metric) -> str:
    is_alike = left.value == right.value
    shown = [
        f"{metric.value} ({metric.dtype} {list(metric.shape)}, {metric.digest})" if is_alike else metric.value
        for metric in (left, right)
    ]
    return f"{shown[0]} in the reference, {shown[1]} now"
