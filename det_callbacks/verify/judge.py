"""The judge: two run folders become one verdict, the same for the callback and for ``diff``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Literal

from det_callbacks.causes.graph import Graph
from det_callbacks.causes.sentences import explained_by
from det_callbacks.causes.table import (
    evidence_lines,
    find_cause,
    find_walk,
    first_entry,
    trail_of,
    trail_of_metric,
)
from det_callbacks.compare.differences import compare_steps
from det_callbacks.compare.evidence import Evidence, find_evidence
from det_callbacks.compare.metrics import MetricComparison, MetricDifference
from det_callbacks.compare.module_names import ModuleNames
from det_callbacks.compare.next_recording import find_command, next_recording
from det_callbacks.compare.nonfinite import first_nonfinite
from det_callbacks.compare.numbers import with_numbers
from det_callbacks.compare.numerics import compare_numerics
from det_callbacks.compare.ranks import (
    Classification,
    FirstDifference,
    RankResult,
    RunPair,
    UnpairedSteps,
    classify,
)
from det_callbacks.compare.record import TOGETHER, RankRecord, Tally, read_records
from det_callbacks.compare.resume import resume_of
from det_callbacks.compare.rounding import Rounding
from det_callbacks.errors import NothingComparedError, ReferenceFormatError
from det_callbacks.findings.table import find_findings
from det_callbacks.report.numerics import nonfinite_sentence
from det_callbacks.report.sentences import (
    advise_metric,
    environment_notes,
    explain_match,
    explain_metric,
    explain_ranks,
    explain_unfinished,
    explain_unpaired_steps,
    metric_lines,
    order_lines,
    steps_agree,
    without_starts,
)
from det_callbacks.runs.manifest import (
    FOLLOWED,
    LENGTHS,
    UNRECORDED,
    WITHOUT_EFFECT,
    choices_of_steps,
    compare_environments,
    framework_of,
    has_failed,
)
from det_callbacks.runs.metrics import read_metrics
from det_callbacks.runs.store import Run
from det_callbacks.text import MAX_RANKS, capitalised, count, listed
from det_callbacks.verdict import (
    MAX_ORIGINS,
    Cause,
    Counts,
    Coverage,
    Divergence,
    EnvironmentDifference,
    Finding,
    Resume,
    TrailEntry,
    Verdict,
    VerdictName,
)
from det_callbacks.verify.comparable import (
    other_world_size,
    require_equal_selections,
    require_reference,
)

SMALL_BYTES = 256 * 2**20
"""Two runs whose steps take less than this together are read whole: it takes a second or less."""

SAME_LENGTH = (
    "Train both runs for the same number of steps, or compare only the steps that both have: "
    'steps="common" (det-callbacks: --steps common)'
)
CHAINS_NOTE = (
    "Steps before the first difference were compared by their chains, and their digests were not "
    "read again (det-callbacks export reads and checks every step)"
)

_order = attrgetter("order")  # the place of a difference in the run


def compare_runs(
    reference: str | Path,
    current: str | Path,
    *,
    steps: Literal["all", "common"] = "all",
    numerics: bool = False,
    tolerance: str | Path | None = None,
    names: str | Path | None = None,
) -> Verdict:
    """Compare a run with its reference, bit for bit.

    Steps up to the first difference of a rank are compared by their chains, later ones one at a
    time, in 200 microseconds for 4,000 sites of one program. Two recordings of less than 256 MiB
    together are read whole, so that a damaged file is an error wherever it is damaged; of larger
    ones the explanation says what was not read.

    Args:
        reference: folder of the reference.
        current: folder of the run to compare, or of a verification.
        steps: "all" demands exactly the reference's steps: a missing or an additional step is a
            divergence. "common" compares the steps that both runs have. A verification keeps the
            value that it ran with.
        numerics: also measure the difference, and whether it is rounding, at the sites whose
            tensors both runs kept.
        tolerance: folder of ``det-callbacks check --numerics``, which measured what rounding does,
            or None for what ``torch.testing`` tolerates for each dtype.
        names: file that maps modules with a different name in the current run; see ``ModuleNames``.

    Returns:
        The verdict, with the ``exit_code`` of the command line. Runs with different numbers of
        processes are ``not_comparable``, without a comparison of their steps.

    Raises:
        ReferenceNotFoundError: there is no run at one of the paths.
        ReferenceFormatError: a file of a run is damaged or missing, or the reference is incomplete
            and ``steps`` is "all", or a verification used a different reference.
        SelectionError: the runs recorded different modules, phases or levels; for ``numerics``, a
            run kept no tensors.
        NothingComparedError: the runs have no step in common, or no site.
        ValueError: ``steps`` has another value.

    Examples:
        >>> compare_runs("refs/run1", "refs/run1").verdict
        'match'
        >>> compare_runs("refs/run1", "refs/run2").cause
        'settings'
    """
    if steps not in ("all", "common"):
        raise ValueError(f'steps must be "all" or "common"; got {steps!r}.')
    if numerics:
        measured = compare_numerics(
            Run.open(reference, check_steps=False),
            Run.open(current, check_steps=False),
            tolerance=None if tolerance is None else Rounding.read(tolerance),
            names=None if names is None else ModuleNames.read(names),
        )
        return replace(compare_runs(reference, current, steps=steps), numerics=measured)
    if tolerance is not None or names is not None:
        raise ValueError("tolerance and names belong to numerics=True.")
    reference_run = Run.open(reference, check_steps=False)
    current_run = Run.open(current, check_steps=False)
    environment = compare_environments(
        reference_run.manifest.environment, current_run.manifest.environment
    )
    world_size = current_run.manifest.world_size
    if reference_run.manifest.world_size != world_size:
        reason = other_world_size(reference_run, world_size)
        return Verdict.refused(str(reference_run.path), str(current_run.path), reason, environment)
    require_equal_selections(reference_run, current_run)
    is_verification = current_run.keeps != "all"
    records = read_records(reference_run, current_run) if is_verification else {}
    if records:
        steps = next(iter(records.values())).steps
    require_reference(reference_run, steps)
    notes = _notes(reference_run, current_run, steps, records)
    if not records and not _read_whole(reference_run, current_run):
        notes.append(CHAINS_NOTE)
    pair = RunPair(
        reference=reference_run, current=current_run, is_common=steps == "common", records=records
    )
    # settings are those of rank 0 in both runs, because seeds and arguments may differ among ranks
    differing = {entry.name: entry for record in records.values() for entry in record.machine}
    differing |= {entry.name: entry for entry in environment}
    judge = _Judge(
        pair=pair,
        ranks=[pair.compare(rank) for rank in reference_run.ranks],
        environment=tuple(differing[name] for name in sorted(differing)),
        notes=notes,
    )
    verdict = judge.verdict()
    findings, unread = _findings(current_run)
    record_next = next_recording(verdict, reference_run.manifest.selection)
    return replace(
        verdict,
        record_next=record_next,
        find_command=None if record_next is None else find_command(current_run),
        findings=findings,
        evidence=(*verdict.evidence, *unread, *_nonfinite(reference_run, current_run)),
    )


def _notes(
    reference: Run, current: Run, steps: Literal["all", "common"], records: Mapping[int, RankRecord]
) -> list[str]:
    """Return what was not compared."""
    notes = []
    if not reference.is_complete:
        why = reference.incomplete_reason
        notes.append(f"The reference is incomplete, and was compared up to its last step: {why}")
    if not current.is_complete and current.keeps == "all":
        notes.append(f"The current run is incomplete: {current.incomplete_reason}")
    if steps == "common":
        notes.append("Only the steps that both runs have were compared")
    if unfinished := explain_unfinished(records):
        notes.append(unfinished)
    return notes


def _read_whole(reference: Run, current: Run) -> bool:
    """Read all steps of two runs, so that damage is found, if they are small; return whether."""
    ranks = [run.rank(rank) for run in (reference, current) for rank in run.ranks]
    is_small = sum(rank.num_bytes for rank in ranks) < SMALL_BYTES
    for rank in ranks if is_small else ():
        rank.check_steps()
    return is_small


def _nonfinite(reference: Run, current: Run) -> list[str]:
    """Return the first number of each run that is not finite, among the tensors that it kept."""
    sides = {"reference": first_nonfinite(reference), "current run": first_nonfinite(current)}
    return [
        f"{side}: {nonfinite_sentence(first)}" for side, first in sides.items() if first is not None
    ]


def _findings(current: Run) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return the findings of the current run, or why they cannot be read;
    that does not change the verdict.
    """
    try:
        return find_findings(current), ()
    except ReferenceFormatError as error:
        return (), (f"the findings of the current run cannot be read: {error}",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What differs first, and why."""

    first: Divergence | None = None
    cause: Cause | None = None
    text: str
    advice: str = ""
    evidence: tuple[str, ...] = ()
    setting: str = ""  # with which the text begins
    trail: tuple[TrailEntry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """Makes a verdict from the results of all ranks; ``notes`` says what was not compared."""

    pair: RunPair
    ranks: Sequence[RankResult]
    environment: tuple[EnvironmentDifference, ...]
    notes: Sequence[str]

    @property
    def show_rank(self) -> bool:
        return self.pair.reference.manifest.world_size > 1

    @cached_property
    def metrics(self) -> MetricComparison:
        reference, current = self.pair.reference, self.pair.current
        record = self.pair.records.get(0)
        stop = None if record is None else record.stopped
        comparison = MetricComparison(is_common=self.pair.is_common)
        for segment in sorted({*reference.segments, *current.segments}):
            if stop is not None and segment > stop.segment:
                break
            current_metrics = read_metrics(current, segment)
            fit = None if record is None else record.fit(segment)
            comparison.begin(segment, read_metrics(reference, segment))
            for step in current_metrics.resumed:
                comparison.resume(step, is_first=fit is not None and fit.metrics_since == step)
            for reading in current_metrics.by_key.values():
                comparison.add(reading)
            if stop is None or segment < stop.segment:
                comparison.end()
        return comparison

    def _first_metric(self) -> MetricDifference | None:
        first = self.metrics.first
        if first is None:
            return None
        reading = first.readings[1]
        selections = [run.manifest.selection for run in (self.pair.reference, self.pair.current)]
        # an epoch's mean depends on all its steps, a validation on the last
        if reading.where == "epoch":
            is_recorded = all(selection.is_every_step for selection in selections)
        else:
            is_recorded = all(selection.selects_step(reading.step) for selection in selections)
        is_after_gap = reading.step >= 0 and not is_recorded
        return replace(first, choices=choices_of_steps(self.environment), is_after_gap=is_after_gap)

    @cached_property
    def tally(self) -> Tally:
        tally = Tally(
            num_metrics=self.metrics.num_compared, num_differing=self.metrics.num_differing
        )
        for rank in self.ranks:
            tally.add(rank.tally)
        return tally

    def verdict(self) -> Verdict:
        """Return the verdict; NothingComparedError if no site was compared."""
        unpaired = [steps for rank in self.ranks for steps in rank.unpaired]
        first = {rank.rank: rank.first for rank in self.ranks if rank.first is not None}
        first_metric = self.metrics.first
        has_divergence = bool(first or unpaired or first_metric)
        self._require_comparison(has_divergence=has_divergence)
        first = with_numbers(self.pair.reference, self.pair.current, first)
        bits_differ = bool(first) or (first_metric is not None and first_metric.kind == "content")
        is_other_machine = any(
            entry.is_machine and entry.changes_bits for entry in self.environment
        )
        verdict: VerdictName = "diverged" if has_divergence else "match"
        if bits_differ and is_other_machine:
            verdict = "not_comparable"
        ranks = self._classify(first)
        answer = self._answer(first, unpaired, ranks)
        in_order = sorted(first.values(), key=_order)
        origins = [origin for of_rank in in_order for origin in of_rank.origins_among(ranks)]
        others = [entry for entry in self.environment if entry.name != answer.setting]
        resume = self._resume
        if resume is not None:  # its generators started from those of a later step
            others = without_starts(others)
        if not unpaired:  # the length of a run explains nothing in a step that both have
            others = [entry for entry in others if entry.name not in LENGTHS]
        tally = self.tally
        idle = self.pair.current.manifest.environment.get(WITHOUT_EFFECT)
        notes = [*order_lines(tally.reordered), *environment_notes(others, verdict), *self.notes]
        notes += [
            f"A setting has no effect: {text}" for text in (() if idle is None else idle.value)
        ]
        parts = [answer.text, answer.advice, *notes]
        return Verdict(
            verdict=verdict,
            reference=str(self.pair.reference.path),
            current=str(self.pair.current.path),
            first_divergence=answer.first,
            origins=tuple(origins[:MAX_ORIGINS]),
            cause=answer.cause,
            explanation=" ".join(f"{part.rstrip('.')}." for part in parts if part),
            counts=Counts(
                steps_compared=tally.num_steps,
                sites_compared=tally.num_sites,
                sites_differing=tally.num_differing,
            ),
            coverage=self._coverage,
            # the evidence names the generators that may be the cause
            environment=tuple(
                self.environment
                if verdict == "match" and resume is None
                else without_starts(self.environment)
            ),
            trail=answer.trail,
            resume=resume,
            evidence=answer.evidence,
        )

    @property
    def _coverage(self) -> Coverage:
        tally = self.tally
        return Coverage(
            ranks=self._num_ranks or int(bool(tally.num_metrics)),
            steps=tally.steps,
            ops_seen=tally.ops_seen,
            ops_digested=tally.ops_digested,
            ops_skipped=dict(sorted(tally.ops_skipped.items())),
            opaque_regions=tuple(sorted(tally.opaque_regions)),
            replayed=tally.replayed,
            metrics=tally.num_metrics,
            lost=self._unrecorded,
            followed=self._followed,
        )

    @property
    def _resume(self) -> Resume | None:
        record, runs = self.pair.records.get(0), (self.pair.reference, self.pair.current)
        resumes = (resume_of(*runs, fit) for fit in (() if record is None else record.fits))
        return next((resume for resume in resumes if resume is not None), None)

    @property
    def _unrecorded(self) -> tuple[str, ...]:
        """Parts of a followed training that no step of a run holds."""
        runs = self.pair.reference, self.pair.current
        entries = [run.manifest.environment.get(UNRECORDED) for run in runs]
        return tuple(
            dict.fromkeys(text for entry in entries if entry is not None for text in entry.value)
        )

    @property
    def _followed(self) -> str:
        entry = self.pair.current.manifest.environment.get(FOLLOWED)
        return "" if entry is None else str(entry.value)

    @property
    def _num_ranks(self) -> int:
        return sum(bool(rank.tally.num_steps) for rank in self.ranks)

    def _require_comparison(self, *, has_divergence: bool) -> None:
        """Raise if too little was compared for a verdict."""
        tally, pair = self.tally, self.pair
        has_steps = bool(tally.num_steps or pair.records)
        has_compared = bool(tally.num_sites or tally.num_metrics)
        unfinished = explain_unfinished(pair.records)
        if unfinished and not has_divergence:
            raise NothingComparedError(
                f"{unfinished}, and found no difference in {pair.current.path}. Verify again."
            )
        if pair.records and has_failed(pair.current.manifest) and not has_divergence:
            raise NothingComparedError(
                f"The script of the verification in {pair.current.path} ended with an error, and "
                "the steps before it match. Verify again."
            )
        # steps in only one run compare nothing
        if not has_compared and not (has_divergence and has_steps):
            raise NothingComparedError(
                f"{pair.reference.path} and {pair.current.path} have no step with recorded sites "
                "in common, so nothing was compared. Check with det-callbacks show that both "
                "record the same script with the same selection."
            )
        if has_divergence:
            return
        stops = []
        for rank, record in pair.records.items():
            if (stop := record.stopped) is not None:
                on_rank = f" on rank {rank}" if self.show_rank else ""
                stops.append(f"by {stop.reason} after step {stop.step}{on_rank}")
        if stops:
            raise NothingComparedError(
                f"The verification in {pair.current.path} was stopped "
                f"{listed(stops, limit=MAX_RANKS)}. The steps until then match, but the rest was "
                "not compared. Verify again."
            )

    def _classify(self, first: Mapping[int, FirstDifference]) -> Classification | None:
        """Return which ranks started the difference, or None for one process,
        or if a rank stopped alone.
        """
        stops = {
            record.stopped.reason
            for record in self.pair.records.values()
            if record.stopped is not None
        }
        if not self.show_rank or not first or stops - {TOGETHER}:
            return None
        return classify([first.get(rank) for rank in self.pair.reference.ranks])

    def _answer(
        self,
        first: Mapping[int, FirstDifference],
        unpaired: Sequence[UnpairedSteps],
        ranks: Classification | None,
    ) -> _Answer:
        agree = "" if first else steps_agree(self.tally.num_steps)
        earliest = min(first.values(), key=_order, default=None)
        lacking = min(unpaired, key=_order, default=None)
        metric = self._first_metric()
        if metric is not None:
            is_unpaired = lacking is not None and metric.follows_from_unpaired(lacking.segment)
            is_later = earliest is not None and metric.follows_from_step(*earliest.moment)
            metric = None if is_unpaired or is_later else metric
        differences = [
            difference for difference in (earliest, lacking, metric) if difference is not None
        ]
        if not differences:
            text = explain_match(self.tally, num_ranks=self._num_ranks, unrecorded=self._unrecorded)
            return _Answer(text=text)
        only_in_one = explain_unpaired_steps(unpaired, show_rank=self.show_rank)
        leader = min(differences, key=_order)
        if isinstance(leader, MetricDifference):
            return self._answer_metric(leader, agree if not unpaired else "")
        if isinstance(leader, UnpairedSteps):
            return _Answer(
                first=leader.divergence(),
                cause="structure",
                text=capitalised(only_in_one) + agree,
                advice=SAME_LENGTH,
            )
        origins = [] if ranks is None else [first[rank] for rank in ranks.ranks("origin")]
        same_place = (one for one in origins if one.order[:3] == leader.order[:3])
        leader = next(same_place, leader)  # the rank that comes first may have received
        if ranks is not None and ranks.is_collective:
            shown = leader.with_origin_from(ranks)
            text = f"Step {shown.step}, {shown.phase}: {explain_ranks(ranks)}"
            return _Answer(first=shown, cause="collective", text=text)
        return self._answer_step(leader, origins, ranks, only_in_one)

    def _answer_step(
        self,
        shown: FirstDifference,
        origins: Sequence[FirstDifference],
        ranks: Classification | None,
        only_in_one: str,
    ) -> _Answer:
        """Return why a step differs, by a rank that started it if one did in that step."""
        at_once = (origin for origin in origins if origin.moment == shown.moment)
        leader = min(at_once, key=_order, default=shown)
        graph = self._graph(leader)
        walk = find_walk(graph)
        cause = find_cause(graph, walk)
        of_ranks = "" if ranks is None else f"; {explain_ranks(ranks)}"
        in_addition = f"; in addition, {only_in_one}" if only_in_one else ""
        trail = trail_of(graph, walk)
        if shown is not leader:
            trail = (*trail, first_entry(self._graph(shown)))
        return _Answer(
            first=shown.with_origin_from(ranks),
            cause=cause.cause,
            text=f"{cause.text}{of_ranks}{in_addition}",
            advice=cause.advice,
            evidence=evidence_lines(graph),
            setting=cause.setting,
            trail=trail,
        )

    def _answer_metric(self, metric: MetricDifference, agree: str) -> _Answer:
        others = self.metrics.num_differing - 1
        more = f", and {count(others, 'more metric')}" if others else ""
        text, setting = capitalised(explain_metric(metric) + more + agree), ""
        choice = metric.explaining_choice
        if choice is not None:
            values = choice.reference, choice.current
            text, setting = explained_by(choice.name, values, text), choice.name
        return _Answer(
            first=metric.divergence(),
            cause=metric.cause,
            text=text,
            advice=advise_metric(metric),
            evidence=metric_lines(metric),
            setting=setting,
            trail=trail_of_metric(metric),
        )

    def _graph(self, first: FirstDifference) -> Graph:
        """Return the step in which a rank first differs, with what explains it."""
        segment, step, _, rank = first.order
        reference, current = self.pair.reference, self.pair.current
        difference = compare_steps(*self.pair.views(rank, segment, step))
        record = self.pair.records.get(rank)
        fit = None if record is None else record.fit(segment)
        reference_steps = reference.rank(rank).steps(segment)
        first_step = reference_steps[0] if fit is None else min(fit.compared)
        # a verification stores only the steps that differ
        last_step = (
            current.rank(rank).steps(segment)[-1] if fit is None else max(fit.compared | fit.extra)
        )
        before = self.pair.before(segment, step)
        may_be_unrestored = (
            fit is not None and before == "resumed" and not difference.starting("here")
        )
        try:
            evidence = find_evidence(reference, current, difference)
        except ReferenceFormatError as error:
            evidence = Evidence(unread=str(error))
        return Graph(
            difference=difference,
            choices=choices_of_steps(self.environment),
            is_first_seen=step == first_step,
            is_after_unrecorded=before == "unrecorded",
            is_resumed=before == "resumed",
            unrestored=fit.unrestored if fit is not None and may_be_unrestored else (),
            evidence=evidence,
            shows_rank=self.show_rank,
            framework=framework_of(current.manifest.environment),
            resumed_at=max(
                (at for fit, at in current.resumed_steps if fit == segment and at <= step),
                default=None,
            ),
            is_last=(reference_steps[-1] == step, last_step == step),
        )
