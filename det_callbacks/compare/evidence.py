"""What the evidence of two runs shows about a difference: draws from generators, and samples."""

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import dropwhile, zip_longest
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from det_callbacks.compare.differences import StepDifference
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.evidence import (
    BATCH,
    BATCH_START,
    CALLBACKS,
    CONSTANTS,
    INDICES,
    LOADER,
    OPTIONS,
    PARAMETERS,
    SAMPLE,
    SCRIPTED,
    SEED,
    START,
    UNSEEN_WRITE,
    VALUES,
    Row,
    evidence_path,
    read_evidence,
)
from det_callbacks.runs.program import IDLE, StepView
from det_callbacks.runs.store import Run

SKETCHED = 4
"""How many samples of a batch, those with the smallest digests, are searched in the reference."""

MIN_FOUND = 0.75
"""The share that is enough, because a sketch may leave one out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The evidence of one run after the last step that certainly matches."""

    rows: tuple[Row, ...]
    settings: Mapping[str, str]  # settings of the loaders: "num_workers of train_dataloader" -> "2"
    hooks: Mapping[str, str]  # "before on_train_batch_end" -> the callbacks called before ours
    constants: frozenset[str] = frozenset()  # initial tensors that hold a single value
    options: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # "lr of group 0" -> since which step, JSON
    starts: Mapping[str, int] = field(default_factory=dict)  # digest of each generator's first state
    scripted: tuple[str, ...] = ()  # modules that are, or contain, TorchScript

    def batch(self, step: int) -> dict[str, Row]:
        """Return the rows of a step's batch, by name."""
        return {row.name: row for row in self.rows if row.step == step and row.point == BATCH}

    def samples(self, step: int) -> list[int]:
        """Return the digests of the samples in a step's batch."""
        return [row.value for name, row in self.batch(step).items() if name.startswith(SAMPLE)]

    def states(self, name: str, step: int) -> list[Row]:
        """Return the states of a generator up to the end of a step."""
        return [row for row in self.rows if row.name == name and row.point != BATCH and row.step <= step]

    def seed(self, name: str, place: tuple[int, str]) -> int | None:
        """Return the first seed of a generator that was recorded at or after (step, point)."""
        rows = dropwhile(lambda row: row[:2] != place, self.rows)
        return next((row.value for row in rows if row.name == SEED + name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorChange:
    """How a generator started to differ from the reference's between two places (step, point)."""

    name: str
    equal_at: tuple[int, str] | None = None  # None if it was never equal in this fit
    differs_at: tuple[int, str]  # for an idle generator, the first place in the fit
    has_other_start: bool = False  # whether it started in a different state, unused in both runs until ``differs_at``
    points: tuple[str, ...] = ()  # in between, of either run, from ``equal_at`` on
    only_reference: tuple[str, ...] = ()  # points there that only the reference has
    only_current: tuple[str, ...] = ()
    seeds: tuple[int, int] | None = None  # the seeds in both runs, or None if either is unknown

    @property
    def is_reseeded(self) -> bool:
        """Whether the two runs seeded it differently."""
        return self.seeds is not None and self.seeds[0] != self.seeds[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChange:
    """How the batch of a step differs; None means unknown."""

    indices: Literal["same", "reordered", "cut", "other"] | None = (
        None  # that samplers drew; cut: different batch sizes
    )
    is_loaded_alike: bool | None = None  # the loaders' output matches
    found_at: int | None = None  # step of the reference with samples of this batch
    is_whole: bool = False  # that batch holds all of them
    was_searched: bool = False
    first_index: tuple[str, int, str, str] | None = None  # loader, position in the batch, both indices
    settings: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # settings of the loaders that differ


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """An option of an optimizer's group, such as "lr of group 0", that differs."""

    name: str
    reference: str
    current: str
    since: int  # step


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence of a step that differs; the generators are in the order in which they started to differ."""

    generators: tuple[GeneratorChange, ...] = ()
    idle: tuple[GeneratorChange, ...] = ()  # of generators from which nothing drew
    batch: BatchChange = BatchChange()
    hooks: Mapping[str, str] = field(default_factory=dict)  # hooks of the current run, see ``Window``
    constants: frozenset[str] = frozenset()  # initial tensors that are constant in both runs
    options: tuple[OptionChange, ...] = ()
    scripted: tuple[str, ...] = ()  # TorchScript modules of the current run
    moments: tuple[tuple[int, str], ...] = ()  # (step, point) of the current run, from the step before on
    unread: str = ""  # why it could not be read

    @property
    def other_starts(self) -> list[GeneratorChange]:
        """The generators that started in a different state."""
        never_equal = (one for one in self.generators if one.has_other_start or one.equal_at is None)
        return [*never_equal, *self.idle]


def find_evidence(reference: Run, current: Run, difference: StepDifference) -> Evidence:
    """Return the evidence of both runs on a step that differs; an error if only one run has it."""
    rank, segment, step = place = difference.rank, difference.segment, difference.step
    ours, theirs = read_window(reference, *place), read_window(current, *place)
    for run, window, other in ((reference, ours, theirs), (current, theirs, ours)):
        has_step = window is not None and any(row.step == step for row in window.rows)
        if other is not None and not has_step:
            path = str(evidence_path(run.rank(rank).file_of(segment, step).path))
            raise ReferenceFormatError(f"{path} has nothing of step {step}: a kill lost it, or it is gone", path)
    if ours is None or theirs is None:
        return Evidence()
    evidence = compare_windows(ours, theirs, step)
    if not any(difference.site(row).phase == "data" for row in difference.starting("outside")):
        return evidence
    known, samples = ours.samples(step), theirs.samples(step)
    others = [value for value in samples if value not in known][:SKETCHED]
    found_at, is_whole = None, False
    if others:
        found_at, is_whole = _find_samples(reference, *place, others=others, samples=samples)
    batch = replace(
        evidence.batch,
        is_loaded_alike=_is_loaded_alike((ours, difference.reference), (theirs, difference.current)),
        was_searched=bool(others),
        found_at=found_at,
        is_whole=is_whole,
    )
    return replace(evidence, batch=batch)


def _is_loaded_alike(*sides: tuple[Window, StepView]) -> bool | None:
    """Return whether the loaders returned the same batch, or None if neither run changed the batch after that."""
    given, noted = [], []
    for window, view in sides:
        rows = window.batch(view.record.step)
        sites = zip(view.program.sites, view.record.digests.tolist(), strict=True)
        of_batch = ((site, bits) for site, bits in sites if (site.phase, site.role) == ("data", "named"))
        given.append({f"{site.name} as loaded": bits for site, bits in of_batch})
        noted.append({name: row.value for name, row in rows.items() if name.endswith(" as loaded")})
    if any(noted) and given[0] | noted[0] == given[1] | noted[1]:
        return True
    return False if all(noted) else None


def read_window(run: Run, rank: int, segment: int, step: int) -> Window | None:
    """Return the evidence of a run up to a step, or None if there is none."""
    since = max((known for known in run.rank(rank).steps(segment).tolist() if known < step), default=None)

    def is_wanted(batch: pa.RecordBatch) -> np.ndarray:
        texts, points, steps = (batch.column(name).to_numpy(False) for name in ("text", "point", "step"))
        lasts = (texts != "") & (points != BATCH) & (points != VALUES) & (points != PARAMETERS)
        return np.asarray((steps <= step) & ((steps >= (since or 0)) | lasts))

    return gather_window(_read_rows(run, rank, segment, step, is_wanted), since=since)


def gather_window(rows: Iterable[Row], *, since: int | None) -> Window | None:
    """Return the evidence after a step (None: all of it), or None if there is none."""
    kept, last = list[Row](), list[Row]()
    settings, hooks = dict[str, str](), dict[str, str]()
    options, starts = dict[str, tuple[int, str]](), dict[str, int]()
    constants, scripted = frozenset[str](), tuple[str, ...]()
    for row in rows:
        if row.text and row.point == LOADER:
            settings[row.name] = row.text
        elif row.text and row.name.startswith(CALLBACKS):
            hooks[row.name.removeprefix(CALLBACKS)] = row.text
        elif row.name.startswith(START):
            starts[row.name.removeprefix(START)] = row.value
        elif row.name == CONSTANTS:
            constants = frozenset(json.loads(row.text or "[]"))
        elif row.name == SCRIPTED:
            scripted = tuple(json.loads(row.text))
        elif row.point == OPTIONS:
            options[row.name] = (row.step, row.text)
        elif row.point not in (UNSEEN_WRITE, VALUES, PARAMETERS):
            if since is None or row.step > since:
                kept.append(row)
            elif row.step == since:
                last.append(row)
    kept = [*from_batch_start(last), *kept]
    if not kept:
        return None
    return Window(
        rows=tuple(kept),
        settings=settings,
        hooks=hooks,
        constants=constants,
        options=options,
        starts=starts,
        scripted=scripted,
    )


def from_batch_start(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows since a step began, without those of its batch."""
    return (row for row in dropwhile(lambda row: row.point != BATCH_START, rows) if row.point != BATCH)


def _find_samples(
    run: Run, rank: int, segment: int, step: int, *, others: Sequence[int], samples: Sequence[int]
) -> tuple[int | None, bool]:
    """Return the first step that has all these samples, and True; else the first with one of ``others``.

    None if most of the others are not in the attempt.
    """
    steps: defaultdict[int, set[int]] = defaultdict(set)
    values = np.array(samples, dtype=np.uint64)
    rows = _read_rows(run, rank, segment, step, lambda batch: np.isin(batch.column("value").to_numpy(), values))
    for row in rows:
        if row.point == BATCH and row.name.startswith(SAMPLE):
            steps[row.value].add(row.step)
    found = [steps[value] for value in others if value in steps]
    if not found or len(found) < MIN_FOUND * len(others):
        return None, False
    if whole := set.intersection(*(steps[value] for value in samples)):
        return min(whole), True
    return min(map(min, found)), False


def _read_rows(
    run: Run, rank: int, segment: int, step: int, is_wanted: Callable[[pa.RecordBatch], np.ndarray]
) -> Iterator[Row]:
    path = evidence_path(run.rank(rank).file_of(segment, step).path)
    return read_evidence(path, run_id=run.manifest.run_id, keep=is_wanted)


def compare_windows(reference: Window, current: Window, step: int) -> Evidence:
    """Return the evidence from two windows on the same step."""
    states = (row for row in current.rows if row.point != BATCH and not row.text and not row.name.startswith(SEED))
    generators = dict.fromkeys(row.name for row in states)
    found = (_generator_change(reference, current, step, name) for name in generators)
    order = {(row.step, row.point): number for number, row in enumerate(current.rows)}
    changes = [change for change in found if change is not None]
    return Evidence(
        generators=tuple(sorted(changes, key=lambda change: order.get(change.differs_at, len(order)))),
        idle=tuple(_idle_generators(reference, current, step, moved={change.name for change in changes})),
        batch=_batch_change(reference, current, step),
        hooks=current.hooks,
        moments=tuple(dict.fromkeys((row.step, row.point) for row in current.rows if row.point != BATCH)),
        constants=reference.constants & current.constants,
        options=tuple(_option_changes(reference, current)),
        scripted=current.scripted,
    )


def _option_changes(reference: Window, current: Window) -> Iterator[OptionChange]:
    for name in sorted(reference.options.keys() & current.options):
        (ours_since, ours), (theirs_since, theirs) = reference.options[name], current.options[name]
        if ours != theirs:
            yield OptionChange(name=name, reference=ours, current=theirs, since=max(ours_since, theirs_since))


def _generator_change(reference: Window, current: Window, step: int, name: str) -> GeneratorChange | None:
    """Return how a generator differs by the end of the step, or None if it does not."""
    ours, theirs = reference.states(name, step), current.states(name, step)
    points = [row.point for row in ours], [row.point for row in theirs]
    blocks = SequenceMatcher(None, *points, autojunk=False).get_matching_blocks()
    pairs = [(block.a + offset, block.b + offset) for block in blocks for offset in range(block.size)]
    is_other = [ours[left].value != theirs[right].value for left, right in pairs]
    if not any(is_other):
        return None
    first = is_other.index(True)
    left, right = pairs[first]
    place = theirs[right].step, theirs[right].point
    change = GeneratorChange(name=name, differs_at=place, seeds=_seeds(reference, current, name, place))
    if not first:
        return change
    equal_left, equal_right = pairs[first - 1]
    is_drawn_in_both = ours[equal_left].value == IDLE and IDLE not in (ours[left].value, theirs[right].value)
    reference_between = points[0][equal_left + 1 : left]
    current_between = points[1][equal_right + 1 : right]
    only_reference = tuple(point for point in reference_between if point not in current_between)
    return replace(
        change,
        equal_at=(theirs[equal_right].step, theirs[equal_right].point),
        has_other_start=is_drawn_in_both and reference.starts.get(name) != current.starts.get(name),
        points=(theirs[equal_right].point, *current_between, *only_reference),
        only_reference=only_reference,
        only_current=tuple(point for point in current_between if point not in reference_between),
    )


def _idle_generators(
    reference: Window, current: Window, step: int, *, moved: Collection[str]
) -> Iterator[GeneratorChange]:
    """Yield the generators that started in a different state and did not move."""
    for name, start in current.starts.items():
        states = current.states(name, step)
        if name not in moved and states and reference.starts.get(name, start) != start:
            place = states[0].step, states[0].point
            yield GeneratorChange(name=name, differs_at=place, seeds=_seeds(reference, current, name, place))


def _seeds(reference: Window, current: Window, name: str, place: tuple[int, str]) -> tuple[int, int] | None:
    ours, theirs = reference.seed(name, place), current.seed(name, place)
    return None if ours is None or theirs is None else (ours, theirs)


def _batch_change(reference: Window, current: Window, step: int) -> BatchChange:
    ours, theirs = reference.batch(step), current.batch(step)

    def is_alike(names: Iterable[str]) -> bool:
        return all(name in ours and name in theirs and ours[name].value == theirs[name].value for name in names)

    names = [name for name in theirs if name.startswith(INDICES) and name in ours]
    drawn = [(json.loads(ours[name].text), json.loads(theirs[name].text)) for name in names]
    indices: Literal["same", "reordered", "cut", "other"] | None = None
    if names and is_alike(names):
        indices = "same"
    elif names and is_alike(f"sorted {name}" for name in names):
        indices = "reordered"
    elif names:
        indices = "cut" if all(_is_cut(*pair) for pair in drawn) else "other"
    firsts = (
        (name.removeprefix(INDICES), position, str(one), str(other))
        for name, pair in zip(names, drawn, strict=True)
        for position, (one, other) in enumerate(zip_longest(*pair, fillvalue="none"))
        if one != other
    )
    before, now = reference.settings, current.settings
    settings = {name: (before.get(name, "none"), now.get(name, "none")) for name in {**before, **now}}
    return BatchChange(
        indices=indices,
        first_index=next(firsts, None),
        settings={name: pair for name, pair in settings.items() if pair[0] != pair[1]},
    )


def _is_cut(ours: list[Any], theirs: list[Any]) -> bool:
    """Return whether one list of indices begins with the other."""
    length = min(len(ours), len(theirs))
    return length > 0 and len(ours) != len(theirs) and ours[:length] == theirs[:length]
