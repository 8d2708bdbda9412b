"""What the evidence of two runs shows about a difference: draws from generators, and samples."""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import dropwhile, zip_longest
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from det_callbacks.compare.differences import StepDifference
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.evidence import (
    BATCH_START,
    KIND_OF_SAMPLER,
    LASTING,
    OF_BATCH,
    EvidenceKind,
    EvidenceRow,
    evidence_path,
    read_evidence,
)
from det_callbacks.runs.program import IDLE, StepView
from det_callbacks.runs.store import Run

MAX_SEARCHED = 4
"""How many samples of a batch's sketch, those with the smallest digests,
are searched in the reference.
"""

MIN_FOUND = 0.75
"""The share that is enough, because a sketch may leave one out."""

_RECENT = OF_BATCH | {"generator", "seed"}
"""The kinds of which a window keeps the rows since the last step that certainly matches."""

Part: TypeAlias = tuple[str, str]
"""What a row is of, and which part of it: ("train_dataloader", "num_workers")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The evidence of one run since the last step that certainly matches began; settings and
    options may be older.
    """

    rows: tuple[EvidenceRow, ...]
    # settings of the loaders: ("train_dataloader", "num_workers") -> "2"
    settings: Mapping[Part, str]
    # ("on_train_batch_end", "before") -> the callbacks called before ours
    hooks: Mapping[Part, str]
    constants: frozenset[str] = frozenset()  # initial tensors that hold a single value
    options: Mapping[Part, tuple[int, str]] = field(
        default_factory=dict
    )  # ("0", "lr of group 0") -> since which step, JSON
    changed_options: frozenset[Part] = frozenset()  # those that have had another value
    # digest of each generator's first state
    starts: Mapping[str, int] = field(default_factory=dict)
    scripted: tuple[str, ...] = ()  # modules that are, or contain, TorchScript
    # "0" -> the parameters that it trains
    optimizers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # whether modules are in train mode, see ``mode_of``
    modes: Mapping[str, bool] = field(default_factory=dict)

    def of_batch(self, kind: EvidenceKind, step: int) -> dict[str, EvidenceRow]:
        """Return the rows of a kind on the batch of a step, by what they are of."""
        return {
            row.of or row.part: row for row in self.rows if (row.step, row.kind) == (step, kind)
        }

    def samples(self, step: int) -> list[int]:
        """Return the digests of the samples in a step's batch."""
        return [row.value for row in self.of_batch("sample", step).values()]

    def states(self, name: str, step: int) -> list[EvidenceRow]:
        """Return the states of a generator up to the end of a step."""
        return [
            row
            for row in self.rows
            if (row.kind, row.of) == ("generator", name) and row.step <= step
        ]

    def seed(self, name: str, place: tuple[int, str]) -> int | None:
        """Return the first seed of a generator that was recorded at or after (step, moment)."""
        rows = dropwhile(lambda row: row[:2] != place, self.rows)
        return next((row.value for row in rows if (row.kind, row.of) == ("seed", name)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorChange:
    """How a generator started to differ from the reference's between two places (step, point)."""

    name: str
    equal_at: tuple[int, str] | None = None  # None if it is equal nowhere in the window
    differs_at: tuple[int, str]  # for an idle generator, the first place in the window
    # whether it started in a different state, unused in both runs until ``differs_at``
    has_other_start: bool = False
    points: tuple[str, ...] = ()  # in between, of either run, from ``equal_at`` on
    only_reference: tuple[str, ...] = ()  # points there that only the reference has
    only_current: tuple[str, ...] = ()
    seeds: tuple[int, int] | None = None  # the seeds in both runs, or None if either is unknown

    @property
    def is_reseeded(self) -> bool:
        """Whether the two runs seeded it differently."""
        return self.seeds is not None and self.seeds[0] != self.seeds[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """The step of the reference that has samples of a batch that differs."""

    step: int
    has_all: bool  # of the batch's samples
    epoch: int
    place: int  # in its epoch
    is_other_epoch: bool  # not that of the batch
    batch_place: int  # of the batch, in its epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChange:
    """How the batch of a step differs; None means unknown."""

    # how the indices that samplers drew differ; cut: different batch sizes
    indices: Literal["same", "reordered", "cut", "other"] | None = None
    has_loader: bool = True  # in either run
    # torch's RandomSampler shuffles with the generator of the process
    is_process_shuffle: bool = False
    loader_matches: bool | None = None  # the loaders' output matches
    source: SampleSource | None = None
    was_searched: bool = False  # for the source
    num_samples: int = 0  # that the current run recorded of the batch
    num_same: int = 0  # of these, the ones that the reference's batch of the same step has
    # loader, position in the batch, both indices
    first_index: tuple[str, int, str, str] | None = None
    # settings of the loaders that differ
    settings: Mapping[Part, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """An option of an optimizer's group, such as "lr of group 0", that differs."""

    name: str
    reference: str
    current: str
    since: int  # step
    is_first_value: bool  # in both runs it had no other value before


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence of a step that differs; the generators are in the order in
    which they started to differ.
    """

    generators: tuple[GeneratorChange, ...] = ()
    idle: tuple[GeneratorChange, ...] = ()  # of generators from which nothing drew
    batch: BatchChange = BatchChange()
    # hooks of the current run, see ``Window``
    hooks: Mapping[Part, str] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()  # initial tensors that are constant in both runs
    options: tuple[OptionChange, ...] = ()
    scripted: tuple[str, ...] = ()  # TorchScript modules of the current run
    # as in ``Window``, if equal in both runs
    optimizers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # of the reference and of the current run, see ``mode_of``
    modes: tuple[Mapping[str, bool], Mapping[str, bool]] = ({}, {})
    # (step, point) of the current run, from the step before on
    moments: tuple[tuple[int, str], ...] = ()
    unread: str = ""  # why it could not be read

    @property
    def modules_in_other_mode(self) -> list[str]:
        """The outermost modules that are in train mode in one run only."""
        names = sorted({**self.modes[0], **self.modes[1]})
        found = list[str]()
        for name in filter(self.has_other_mode, names):
            if not any(outer in ("", name[: len(outer)]) for outer in found):
                found.append(name)
        return found

    def has_other_mode(self, module: str) -> bool:
        """Return whether a module is in train mode in one run only."""
        reference, current = (mode_of(modes, module) for modes in self.modes)
        return None not in (reference, current) and reference != current

    @property
    def other_starts(self) -> list[GeneratorChange]:
        """The generators that started in a different state."""
        never_equal = (
            change
            for change in self.generators
            if change.has_other_start or change.equal_at is None
        )
        return [*never_equal, *self.idle]


def mode_of(modes: Mapping[str, bool], module: str) -> bool | None:
    """Return whether a module is in train mode, as the innermost listed module around it is;
    None if that is unknown.
    """
    while module and module not in modes:
        module = module.rpartition(".")[0]
    return modes.get(module)


def find_evidence(reference: Run, current: Run, difference: StepDifference) -> Evidence:
    """Return the evidence of both runs on a step that differs; an error if only one run has it."""
    place = difference.rank, difference.segment, difference.step
    step = difference.step
    reference_window, current_window = read_window(reference, *place), read_window(current, *place)
    if current_window is not None:
        _require_step(reference, reference_window, *place)
    if reference_window is not None:
        _require_step(current, current_window, *place)
    if reference_window is None or current_window is None:
        return Evidence()
    has_other_batch = any(
        difference.site(row).phase == "data" for row in difference.starting("outside")
    )
    is_resumed = (difference.segment, step) in current.resumed_steps
    evidence = compare_windows(
        reference_window,
        current_window,
        step,
        has_other_batch=has_other_batch,
        is_resumed=is_resumed,
    )
    if not has_other_batch:
        return evidence
    batch = _with_samples(evidence.batch, reference, (reference_window, current_window), place)
    loader_matches = _loader_matches(
        (reference_window, difference.reference),
        (current_window, difference.current),
    )
    return replace(evidence, batch=replace(batch, loader_matches=loader_matches))


def _with_samples(
    batch: BatchChange,
    reference: Run,
    windows: tuple[Window, Window],
    place: tuple[int, int, int],
) -> BatchChange:
    """Return a batch with how many of its samples the reference has, and where."""
    reference_samples, current_samples = (window.samples(place[-1]) for window in windows)
    new_samples = [sample for sample in current_samples if sample not in reference_samples]
    new_samples = new_samples[:MAX_SEARCHED]
    return replace(
        batch,
        was_searched=bool(new_samples),
        source=_find_source(reference, *place, new_samples=new_samples, samples=current_samples),
        num_samples=len(current_samples),
        num_same=sum(sample in reference_samples for sample in current_samples),
    )


def _require_step(run: Run, window: Window | None, rank: int, segment: int, step: int) -> None:
    """Raise ReferenceFormatError unless the evidence of a run has a step,
    which the other run has.
    """
    if window is None or all(row.step != step for row in window.rows):
        path = str(evidence_path(run.rank(rank).file_of(segment, step).path))
        raise ReferenceFormatError(
            f"{path} has nothing of step {step}: a kill lost it, or it is gone", path
        )


def _loader_matches(
    reference: tuple[Window, StepView], current: tuple[Window, StepView]
) -> bool | None:
    """Return whether the loaders returned the same batch, or None if that is unknown.

    A run records what its loader returned only where something changed it until the step.
    """
    reference_changed = _changed_after_loading(*reference)
    current_changed = _changed_after_loading(*current)
    reference_loaded = _batch_of(reference[1]) | reference_changed
    current_loaded = _batch_of(current[1]) | current_changed
    if (reference_changed or current_changed) and reference_loaded == current_loaded:
        return True
    return False if reference_changed and current_changed else None


def _changed_after_loading(window: Window, view: StepView) -> dict[str, int]:
    """Return the digests of the tensors as loaded that the run changed afterwards."""
    return {name: row.value for name, row in window.of_batch("loaded", view.record.step).items()}


def _batch_of(view: StepView) -> dict[str, int]:
    """Return the digests of the batch that a step got, by name."""
    sites = zip(view.program.sites, view.record.digests.tolist(), strict=True)
    return {
        site.name or "": bits
        for site, bits in sites
        if (site.phase, site.role) == ("data", "named")
    }


def read_window(run: Run, rank: int, segment: int, step: int) -> Window | None:
    """Return the evidence of a run up to a step, or None if there is none."""
    earlier_steps = (at for at in run.rank(rank).steps(segment).tolist() if at < step)
    since = max(earlier_steps, default=None)

    def is_wanted(batch: pa.RecordBatch) -> np.ndarray:
        kinds, steps = (batch.column(name).to_numpy(False) for name in ("kind", "step"))
        is_recent = steps >= (since or 0)
        return np.asarray((steps <= step) & (is_recent | np.isin(kinds, [*LASTING])))

    return gather_window(read_rows(run, rank, segment, step, is_wanted), since=since)


def gather_window(rows: Iterable[EvidenceRow], *, since: int | None) -> Window | None:
    """Return the evidence since a step began (None: all of it), or None if there is none.

    Of the kinds in ``_RECENT`` it has the rows since then, of all others the last value.
    """
    kept, last = list[EvidenceRow](), list[EvidenceRow]()
    settings, hooks = dict[Part, str](), dict[Part, str]()
    options, starts = dict[Part, tuple[int, str]](), dict[str, int]()
    constants, scripted = frozenset[str](), tuple[str, ...]()
    optimizers, changed = dict[str, tuple[str, ...]](), set[Part]()
    modes = dict[str, bool]()
    for row in rows:
        part = row.of, row.part
        if row.kind == "loader":
            settings[part] = row.text
        elif row.kind == "hook":
            hooks[part] = row.text
        elif row.kind == "start":
            starts[row.of] = row.value
        elif row.kind == "constants":
            constants = frozenset(json.loads(row.text or "[]"))
        elif row.kind == "scripted":
            scripted = tuple(json.loads(row.text or "[]"))
        elif row.kind == "modes":
            modes = dict(json.loads(row.text or "{}"))
        elif row.kind == "option":
            _update_options(row, options, changed)
        elif row.kind == "trained":
            optimizers[row.of] = tuple(json.loads(row.text or "[]"))
        elif row.kind in _RECENT:
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
        changed_options=frozenset(changed),
        starts=starts,
        scripted=scripted,
        optimizers=optimizers,
        modes=modes,
    )


def _update_options(
    row: EvidenceRow, options: dict[Part, tuple[int, str]], changed: set[Part]
) -> None:
    """Note since which step each group has its value of an option, and whether it had another."""
    for index, value in enumerate(json.loads(row.text)):
        part, text = (row.of, f"{row.part} of group {index}"), json.dumps(value)
        if part not in options:
            options[part] = row.step, text
        elif options[part][1] != text:
            options[part] = row.step, text
            changed.add(part)


def from_batch_start(rows: Iterable[EvidenceRow]) -> Iterator[EvidenceRow]:
    """Yield the rows since a step began, without those of its batch."""
    return (
        row
        for row in dropwhile(lambda row: row.moment != BATCH_START, rows)
        if row.kind not in OF_BATCH
    )


def _find_source(
    run: Run,
    rank: int,
    segment: int,
    step: int,
    *,
    new_samples: Sequence[int],
    samples: Sequence[int],
) -> SampleSource | None:
    """Return the step that has all these samples, or else one of ``new_samples``: one of the same
    epoch rather than of another, and then the first.

    None if less than ``MIN_FOUND`` of the new samples are in the attempt.
    """
    if not new_samples:
        return None
    steps_of: defaultdict[int, set[int]] = defaultdict(set)
    for row in rows_with_values(run, rank, segment, step, samples):
        if row.kind == "sample":
            steps_of[row.value].add(row.step)
    steps_of_new = [steps_of[sample] for sample in new_samples if sample in steps_of]
    if not steps_of_new or len(steps_of_new) < MIN_FOUND * len(new_samples):
        return None
    steps_with_all = set.intersection(*(steps_of[sample] for sample in samples))
    steps = run.rank(rank).steps(segment).tolist()

    def epoch_of(step: int) -> int:
        return run.rank(rank).read(segment, step).epoch

    def place_in_epoch(step: int) -> int:
        return int(steps.index(step) - bisect_left(steps, epoch_of(step), key=epoch_of))

    own_epoch = epoch_of(step)
    candidates = steps_with_all or set.union(*steps_of_new)
    source = min(candidates, key=lambda step: (epoch_of(step) != own_epoch, step))
    return SampleSource(
        step=source,
        has_all=bool(steps_with_all),
        epoch=epoch_of(source),
        place=place_in_epoch(source),
        is_other_epoch=epoch_of(source) != own_epoch,
        batch_place=place_in_epoch(step),
    )


def rows_with_values(
    run: Run, rank: int, segment: int, step: int, values: Collection[int]
) -> Iterator[EvidenceRow]:
    """Return the evidence of an attempt that has one of these values."""
    wanted = np.array([*values], dtype=np.uint64)
    return read_rows(
        run, rank, segment, step, lambda batch: np.isin(batch.column("value").to_numpy(), wanted)
    )


def read_rows(
    run: Run, rank: int, segment: int, step: int, is_wanted: Callable[[pa.RecordBatch], np.ndarray]
) -> Iterator[EvidenceRow]:
    path = evidence_path(run.rank(rank).file_of(segment, step).path)
    return read_evidence(path, run_id=run.manifest.run_id, keep=is_wanted)


def compare_windows(
    reference: Window,
    current: Window,
    step: int,
    *,
    has_other_batch: bool = False,
    is_resumed: bool = False,
) -> Evidence:
    """Return what differs; a generator that was restored before the step only
    matters if the batch differs.

    At a resume it does not matter for the order of the samples either,
    which the position in the data determines.
    """
    batch = _batch_change(reference, current, step)
    counts_earlier = has_other_batch and not (is_resumed and batch.indices not in (None, "same"))
    generators = dict.fromkeys(row.of for row in current.rows if row.kind == "generator")
    changes = [
        change
        for name in generators
        if (
            change := _generator_change(
                reference, current, step, name, counts_earlier=counts_earlier
            )
        )
    ]
    last_row = {(row.step, row.moment): index for index, row in enumerate(current.rows)}
    changes.sort(key=lambda change: last_row.get(change.differs_at, len(last_row)))
    return Evidence(
        generators=tuple(changes),
        idle=tuple(
            _idle_generators(reference, current, step, moved={change.name for change in changes})
        ),
        batch=batch,
        hooks=current.hooks,
        moments=tuple(dict.fromkeys((row.step, row.moment) for row in current.rows if row.moment)),
        constants=reference.constants & current.constants,
        options=tuple(_option_changes(reference, current)),
        scripted=current.scripted,
        modes=(reference.modes, current.modes),
        optimizers=current.optimizers if current.optimizers == reference.optimizers else {},
    )


def _option_changes(reference: Window, current: Window) -> Iterator[OptionChange]:
    """Yield the options that differ; optimizers are the same if they train the same parameters."""
    numbers = {frozenset(names): number for number, names in reference.optimizers.items()}
    partners = {
        number: numbers.get(frozenset(names), number)
        for number, names in current.optimizers.items()
    }
    for number, option in sorted(current.options, key=lambda part: part[::-1]):
        key = partners.get(number, number), option
        if key not in reference.options:
            continue
        reference_since, reference_value = reference.options[key]
        current_since, current_value = current.options[number, option]
        if reference_value != current_value:
            yield OptionChange(
                name=f"{option} of optimizer {number}" if len(partners) > 1 else option,
                reference=reference_value,
                current=current_value,
                since=max(reference_since, current_since),
                is_first_value=key not in reference.changed_options
                and (number, option) not in current.changed_options,
            )


def _generator_change(
    reference: Window, current: Window, step: int, name: str, *, counts_earlier: bool
) -> GeneratorChange | None:
    """Return how a generator differs by the end of the step, or None if it does not.

    Unless ``counts_earlier``, a state that matches when the step begins
    ends what differed before it.
    """
    reference_states, current_states = reference.states(name, step), current.states(name, step)
    pairs = _paired_states(reference_states, current_states)
    differs = [
        reference_states[reference_index].value != current_states[current_index].value
        for reference_index, current_index in pairs
    ]
    begins = (
        number
        for number, (_, index) in enumerate(pairs)
        if current_states[index][:2] == (step, BATCH_START)
    )
    begin = next(begins, None)
    if begin is not None and not counts_earlier and not differs[begin]:
        pairs, differs = pairs[begin:], differs[begin:]
    if not any(differs):
        return None
    first = differs.index(True)
    reference_index, current_index = pairs[first]
    reference_state = reference_states[reference_index]
    current_state = current_states[current_index]
    place = current_state.step, current_state.moment
    change = GeneratorChange(
        name=name, differs_at=place, seeds=_seeds(reference, current, name, place)
    )
    if not first:
        return change
    reference_equal_index, current_equal_index = pairs[first - 1]
    equal_state = current_states[current_equal_index]
    was_idle = equal_state.value == IDLE
    is_drawn_in_both = was_idle and IDLE not in (reference_state.value, current_state.value)
    reference_between = _moments(reference_states[reference_equal_index + 1 : reference_index])
    current_between = _moments(current_states[current_equal_index + 1 : current_index])
    only_reference = tuple(point for point in reference_between if point not in current_between)
    return replace(
        change,
        equal_at=(equal_state.step, equal_state.moment),
        has_other_start=is_drawn_in_both and reference.starts.get(name) != current.starts.get(name),
        points=(equal_state.moment, *current_between, *only_reference),
        only_reference=only_reference,
        only_current=tuple(point for point in current_between if point not in reference_between),
    )


def _paired_states(
    reference: Sequence[EvidenceRow], current: Sequence[EvidenceRow]
) -> list[tuple[int, int]]:
    """Return the indices of the states that were read at the same place of both runs, in order."""
    # with their steps, since a run may have resumed at the last one
    places = [row[:2] for row in reference], [row[:2] for row in current]
    blocks = SequenceMatcher(None, *places, autojunk=False).get_matching_blocks()
    return [
        (block.a + offset, block.b + offset) for block in blocks for offset in range(block.size)
    ]


def _moments(rows: Iterable[EvidenceRow]) -> list[str]:
    return [row.moment for row in rows]


def _idle_generators(
    reference: Window, current: Window, step: int, *, moved: Collection[str]
) -> Iterator[GeneratorChange]:
    """Yield the generators that started in a different state and did not move."""
    for name, start in current.starts.items():
        states = current.states(name, step)
        is_idle = bool(states) and all(row.value == IDLE for row in states)
        if name not in moved and is_idle and reference.starts.get(name, start) != start:
            place = states[0].step, states[0].moment
            yield GeneratorChange(
                name=name, differs_at=place, seeds=_seeds(reference, current, name, place)
            )


def _seeds(
    reference: Window, current: Window, name: str, place: tuple[int, str]
) -> tuple[int, int] | None:
    reference_seed, current_seed = reference.seed(name, place), current.seed(name, place)
    return (
        None if reference_seed is None or current_seed is None else (reference_seed, current_seed)
    )


def _batch_change(reference: Window, current: Window, step: int) -> BatchChange:
    drawn = _in_both(reference, current, step, "indices")
    texts = {
        loader: [json.loads(row.text or "[]") for row in rows] for loader, rows in drawn.items()
    }
    indices: Literal["same", "reordered", "cut", "other"] | None = None
    if drawn and _are_equal(drawn):
        indices = "same"
    elif drawn and _are_equal(_in_both(reference, current, step, "sorted_indices")):
        indices = "reordered"
    elif drawn:
        indices = "cut" if all(_is_cut(*pair) for pair in texts.values()) else "other"
    other_indices = (
        (loader, position, str(reference_index), str(current_index))
        for loader, pair in texts.items()
        for position, (reference_index, current_index) in enumerate(
            zip_longest(*pair, fillvalue="none")
        )
        if reference_index != current_index
    )
    settings = {
        part: (reference.settings.get(part, "none"), current.settings.get(part, "none"))
        for part in {**reference.settings, **current.settings}
    }
    return BatchChange(
        indices=indices,
        has_loader=bool(reference.settings or current.settings),
        is_process_shuffle=_is_process_shuffle(current.settings),
        first_index=next(other_indices, None),
        settings={part: pair for part, pair in settings.items() if pair[0] != pair[1]},
    )


def _in_both(
    reference: Window, current: Window, step: int, kind: EvidenceKind
) -> dict[str, tuple[EvidenceRow, EvidenceRow]]:
    of_reference, of_current = reference.of_batch(kind, step), current.of_batch(kind, step)
    return {of: (of_reference[of], row) for of, row in of_current.items() if of in of_reference}


def _are_equal(rows: Mapping[str, tuple[EvidenceRow, EvidenceRow]]) -> bool:
    return all(reference.value == current.value for reference, current in rows.values())


def _is_process_shuffle(settings: Mapping[Part, str]) -> bool:
    shuffled = [
        loader
        for (loader, setting), value in settings.items()
        if setting == "sampler" and value.split(KIND_OF_SAMPLER)[-1] == "RandomSampler"
    ]
    return any(settings.get((loader, "separate generator")) == str(False) for loader in shuffled)


def _is_cut(reference: list[Any], current: list[Any]) -> bool:
    """Return whether one list of indices begins with the other."""
    length = min(len(reference), len(current))
    return length > 0 and len(reference) != len(current) and reference[:length] == current[:length]
