"""Gathers the comparison of the steps of a run into one verdict."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from det_callbacks.compare.answer import EvidenceFinder, answer
from det_callbacks.compare.collectives import Classification, classify, explain
from det_callbacks.compare.facts import Facts
from det_callbacks.compare.first_difference import FirstDifference, Words
from det_callbacks.compare.metrics import MetricDifference
from det_callbacks.compare.numbers import Measure, measured
from det_callbacks.compare.rank_findings import RankFindings
from det_callbacks.compare.step import StepDifference, compare_steps
from det_callbacks.compare.tally import Tally
from det_callbacks.compare.whole_steps import WholeSteps, explain_whole_steps, steps_agree
from det_callbacks.compare.wording import count, explain_match, show_choices, show_machine
from det_callbacks.errors import NothingComparedError
from det_callbacks.runs.program import Program, StepView
from det_callbacks.verdict import Counts, Divergence, EnvironmentDifference, Verdict, VerdictName

FindBatch = Callable[[int, int, int, Mapping[str, int]], int | None]
"""``find_batch`` of a run: (rank, segment, step, wanted) -> step."""


class VerdictBuilder:
    """Compares a run with its reference step by step, in bounded memory, and words the outcome.

    Steps of one rank are added in order; ranks may come in any order. Nothing is held per step.

    Args:
        reference: name of the reference, as the verdict shows it.
        current: name of the current run.
        max_divergences: divergences and origins that are described; all are counted.

    Raises:
        ValueError: ``max_divergences`` is not at least 1.

    Example:
        >>> builder = VerdictBuilder("refs/run1", "runs/today")
        >>> builder.has_divergence
        False
    """

    def __init__(self, reference: str, current: str, *, max_divergences: int = 100) -> None:
        if max_divergences < 1:
            raise ValueError(f"max_divergences must be at least 1; got {max_divergences}.")
        self._names = (reference, current)
        self._max_divergences = max_divergences
        self._num_described = 0
        self._first: dict[int, FirstDifference] = {}
        self._whole: dict[tuple[int, int, str], WholeSteps] = {}
        self._metric: MetricDifference | None = None
        self._seen: set[tuple[int, int]] = set()
        self._environment: tuple[EnvironmentDifference, ...] = ()
        self._unrestored: tuple[str, ...] = ()
        self._world_size = 0
        self._agreeing: set[int] = set()
        self._find_batch: FindBatch | None = None
        self._find_evidence: EvidenceFinder | None = None
        self._notes: list[str] = []
        self._refusals: list[str] = []
        self._tally = Tally()

    @property
    def has_divergence(self) -> bool:
        """Whether anything differed so far."""
        return bool(self._first or self._whole or self._metric)

    @property
    def counts(self) -> Counts:
        """How much was compared so far."""
        return self._tally.counts()

    @property
    def tally(self) -> Tally:
        """What was compared so far, to go on counting."""
        return self._tally

    def add_step(
        self,
        reference: StepView,
        current: StepView,
        *,
        is_first: bool | None = None,
        is_resumed: bool = False,
    ) -> StepDifference:
        """Compare one step, and return how it differs; see ``compare_steps`` for the cost.

        Args:
            reference: the step as the reference has it.
            current: the same step of the current run.
            is_first: whether it is the first step of its fit; by default, whether it is the first one added.
            is_resumed: whether one of the runs had just been resumed, so that its state came from a checkpoint.
        """
        rank, segment = current.rank, current.record.segment
        if is_first is None:
            is_first = (rank, segment) not in self._seen
        budget = max(0, self._max_divergences - self._num_described)
        limit = budget if rank in self._first else max(1, budget)
        difference = compare_steps(reference, current, limit=limit)
        self._count(rank, segment, current.record.step, current.program, difference.num_compared)
        if difference.num_differing:
            self._tally.num_differing += difference.num_differing
            self._num_described += len(difference.divergences)
            if rank not in self._first:
                self._first[rank] = FirstDifference.of(difference, is_first=is_first, is_resumed=is_resumed)
        return difference

    def add_equal_step(self, view: StepView) -> None:
        """Count a step that is known to be equal; its digests, program and layout are the reference's."""
        self._count(view.rank, view.record.segment, view.record.step, view.program, len(view.program))

    def add_equal_steps(self, rank: int, segment: int, steps: Sequence[int], program: Program) -> None:
        """Count steps of one program that are known to be equal; nothing is done for each of them."""
        if steps:
            self._count(rank, segment, steps[0], program, len(program) * len(steps), num_steps=len(steps))
            self._tally.include(steps[-1])

    def add_missing_step(self, rank: int, step: int, segment: int = 0) -> None:
        """Count a step that only the reference has."""
        self.add_whole(WholeSteps(rank=rank, segment=segment, kind="missing", first=step, last=step))

    def add_extra_step(self, rank: int, step: int, segment: int = 0) -> None:
        """Count a step that only the current run has."""
        self.add_whole(WholeSteps(rank=rank, segment=segment, kind="extra", first=step, last=step))

    def set_environment(self, differences: Iterable[EnvironmentDifference]) -> None:
        """Set how the environments differ."""
        self._environment = tuple(differences)

    def set_world_size(self, world_size: int) -> None:
        """Say that the steps of this many ranks are added: it can then be told which of them started a difference."""
        self._world_size = world_size

    def set_agreeing(self, ranks: Iterable[int]) -> None:
        """Say of which ranks it is known that nothing differs unless steps of them are added."""
        self._agreeing = set(ranks)

    def set_batches(self, find_batch: FindBatch) -> None:
        """Set what finds the step at which the reference had a batch: see ``find_batch``, without the run."""
        self._find_batch = find_batch

    def set_evidence(self, finder: EvidenceFinder) -> None:
        """Set what finds the evidence of both runs for the first step that differs."""
        self._find_evidence = finder

    def set_unrestored(self, names: Sequence[str]) -> None:
        """Set which restored state is not what the reference ended the step before with."""
        self._unrestored = tuple(names)

    def measure(self, measure: Measure) -> None:
        """Say by how much the first differences differ, where both runs kept the tensors; reads what they kept."""
        self._first |= measured(self._first, measure)

    def set_replayed(self, replayed: Mapping[str, Any]) -> None:
        """Set what was put back instead of compared downstream: op -> count, differing, mib_per_step."""
        self._tally.replayed = {name: dict(entry) for name, entry in replayed.items()}

    def note(self, text: str) -> None:
        """Add a sentence to the explanation: what was left out of the comparison, and why."""
        if text not in self._notes:
            self._notes.append(text)

    def refuse(self, reason: str) -> None:
        """Make the verdict ``not_comparable``, whatever the steps say."""
        self._refusals.append(reason)

    def copy(self) -> Self:
        """Return a builder that goes on from here without changing this one."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict | set | list | Tally):
                setattr(other, name, value.copy())
        return other

    def part(self) -> Self:
        """Return an empty builder for other ranks, to be filled anywhere, in another thread too, and merged."""
        return type(self)(*self._names, max_divergences=self._max_divergences)

    def merge(self, part: Self) -> None:
        """Add the steps of ranks that this builder has none of.

        Raises:
            ValueError: both have steps of a rank.
        """
        if both := self._tally.ranks & part._tally.ranks:
            raise ValueError(f"both builders have steps of ranks {sorted(both)}")
        self._num_described += part._num_described
        self._first.update(part._first)
        self._whole.update(part._whole)
        self._note_metric(part._metric)
        self._seen |= part._seen
        self._tally.add(part._tally)
        self._trim()

    def _trim(self) -> None:
        """Drop what no verdict shows: only the first divergence is explained, and only the first origins are listed."""
        if sum(len(known.origins) for known in self._first.values()) <= 2 * self._max_divergences:
            return
        ordered = sorted(self._first.items(), key=lambda item: item[1].order)
        # whoever comes first of those that began in the same way may turn out to be the one that started it
        explaining = {ordered[0][0], *{known.among_ranks.begins: rank for rank, known in reversed(ordered)}.values()}
        num_left = self._max_divergences
        for rank, known in ordered:
            kept = known.without_details(num_origins=num_left)
            num_left -= len(kept.origins)
            self._first[rank] = replace(kept, context=known.context) if rank in explaining else kept

    def finish(self) -> Verdict:
        """Return the verdict on what was added so far; it may be called again after more was added.

        Raises:
            NothingComparedError: not a single site was compared.
        """
        self._require_compared()
        bits_differ = bool(self._first) or (self._metric is not None and self._metric.has_other_bits)
        verdict: VerdictName = "match"
        if self._refusals or (bits_differ and show_machine(self._environment)):
            verdict = "not_comparable"
        elif self.has_divergence:
            verdict = "diverged"
        first, words, explanation = self._judge()
        return Verdict(
            verdict=verdict,
            reference=self._names[0],
            current=self._names[1],
            first_divergence=first,
            origins=self._origins(),
            cause=None if words is None else words.cause,
            explanation=self._explain(explanation, verdict),
            counts=self._tally.counts(),
            coverage=self._tally.coverage(),
            environment=self._environment,
            evidence=() if words is None else words.evidence,
        )

    def findings(self, rank: int, *, has_steps: bool = True) -> RankFindings:
        """Return what this builder, to which only steps of one rank were added, has found, for the other ranks.

        Args:
            rank: whose steps were added.
            has_steps: False where nothing was trained, and only rank 0 has something to compare.

        Raises:
            NothingComparedError: not a single site was compared.
        """
        if has_steps:
            self._require_compared()
        known = self._first.get(rank)
        return RankFindings(
            rank=rank,
            tally=self._tally.copy(),
            first=None if known is None else replace(known, words=self._words(known)),
            whole=self.whole,
            metric=self._metric,
            environment=self._environment,
            notes=tuple(self._notes),
            refusals=tuple(self._refusals),
        )

    def add_findings(self, found: RankFindings) -> None:
        """Add what another process found of a rank that this builder has no steps of.

        Raises:
            ValueError: it has.
        """
        part = self.part()
        part._tally = found.tally.copy()
        part._first = {} if found.first is None else {found.rank: found.first}
        part._whole = {(steps.rank, steps.segment, steps.kind): steps for steps in found.whole}
        part._metric = found.metric
        self.merge(part)
        known = {difference.name for difference in self._environment}
        others = (difference for difference in found.environment if difference.name not in known)
        self._environment = tuple(sorted((*self._environment, *others), key=lambda difference: difference.name))
        for note in found.notes:
            self.note(note)
        self._refusals.extend(reason for reason in found.refusals if reason not in self._refusals)

    def _require_compared(self) -> None:
        if not self._tally.has_compared and not self.has_divergence and not self._refusals:
            reference, current = self._names
            num_steps = self._tally.num_steps
            empty = f"{count(num_steps, 'step')} held no site at all" if num_steps else "no step was"
            raise NothingComparedError(
                f"Nothing was compared between the reference {reference} and {current}: {empty}. That is no match. "
                "Check that both runs recorded steps, and with the same selection."
            )

    def _count(
        self, rank: int, segment: int, step: int, program: Program, num_sites: int, *, num_steps: int = 1
    ) -> None:
        self._seen.add((rank, segment))
        self._tally.count(rank, step, program, num_sites, num_steps=num_steps)

    def add_whole(self, steps: WholeSteps) -> None:
        """Count steps that only one run has."""
        self._tally.num_differing += steps.count
        key = (steps.rank, steps.segment, steps.kind)
        known = self._whole.get(key)
        self._whole[key] = steps if known is None else known.and_more(steps)

    def add_metrics(self, differences: Iterable[MetricDifference], *, num_compared: int = 0) -> None:
        """Count metrics that differ, and how many both runs have."""
        if num_compared:
            self._tally.ranks.add(0)  # whose values they are
            self._tally.num_metrics += num_compared
        for difference in differences:
            self._tally.num_differing += 1
            self._note_metric(difference)

    def _note_metric(self, found: MetricDifference | None) -> None:
        if found is not None:
            self._metric = found if self._metric is None else self._metric.and_more(found)

    @property
    def whole(self) -> tuple[WholeSteps, ...]:
        """The steps that only one run has."""
        return tuple(self._whole.values())

    def _judge(self) -> tuple[Divergence | None, Words | None, str]:
        """Return the first divergence, what the rank says that it is judged by, and what is to be said of it all."""
        earliest = min(self._first.values(), key=lambda known: known.order, default=None)
        whole = min(self._whole.values(), key=lambda one: one.order, default=None)
        metric = self._metric
        first_order = min(known.order for known in (earliest, whole, metric) if known) if self.has_divergence else None
        if metric is not None and metric.order == first_order:
            return self._judge_metric(metric)
        if whole is not None and whole.order == first_order:
            num_equal = None if self._first else self._tally.num_steps
            text = explain_whole_steps(self._whole.values(), show_rank=self._show_rank, num_equal=num_equal)
            return whole.divergence(), Words(cause="structure", text=text), text
        if earliest is None:
            return None, None, explain_match(self._tally.counts(), self._tally.coverage())
        ranks = self._classify()
        first = earliest.among(ranks)
        if ranks is not None and ranks.is_collective:
            text = f"Step {first.step}, {first.phase}: {explain(ranks)}"
            return first, Words(cause="collective", text=text), text
        leader = earliest
        if ranks is not None and ranks.origins:
            leader = min((self._first[rank] for rank in ranks.origins), key=lambda known: known.order)
        words = self._words(leader)
        text = words.text
        if ranks is not None:
            text += f"; {explain(ranks)}"
        if self._whole:
            text += f"; besides, {explain_whole_steps(self._whole.values(), show_rank=self._show_rank)}"
        return first, words, f"{text}. {words.advice}" if words.advice else text

    def _judge_metric(self, metric: MetricDifference) -> tuple[Divergence, Words, str]:
        text = metric.words.text
        if metric.count > 1:
            text += f", and {count(metric.count - 1, 'more metric')}"
        if not self._first and not self._whole:
            text += steps_agree(self._tally.num_steps)
        text = f"{text[0].upper()}{text[1:]}"
        return metric.divergence, metric.words, f"{text}. {metric.words.advice}" if metric.words.advice else text

    @property
    def _show_rank(self) -> bool:
        ranks = self._tally.ranks | {steps.rank for steps in self._whole.values()}
        return self._world_size > 1 or len(ranks) > 1

    def _words(self, known: FirstDifference) -> Words:
        """Return what is to be said of the first difference of a rank, by itself."""
        if known.words is not None:
            return known.words
        assert known.context is not None, "what may be explained keeps its context"
        difference, is_resumed = known.context.difference, known.context.is_resumed
        evidence, unread = (None, "") if self._find_evidence is None else self._find_evidence.find(difference)
        facts = Facts(
            difference=difference,
            environment=self._environment,
            is_first=known.context.is_first,
            is_resumed=is_resumed,
            unrestored=self._unrestored if is_resumed else (),
            batch_of=self._step_of_batch(difference),
            evidence=evidence,
        )
        return answer(facts, show_rank=self._show_rank, unread=unread)

    def _classify(self) -> Classification | None:
        """Return who started the difference; None unless there are several ranks and all of them are known."""
        if self._world_size < 2 or self._tally.ranks | self._agreeing != set(range(self._world_size)):
            return None
        known = (self._first.get(rank) for rank in range(self._world_size))
        return classify([None if first is None else first.among_ranks for first in known])

    def _step_of_batch(self, difference: StepDifference) -> int | None:
        wanted = {
            str(finding.divergence.name): int(finding.divergence.current_digest, 16)
            for finding in difference.findings
            if finding.divergence.phase == "data" and finding.role != "samples" and finding.divergence.current_digest
        }
        if self._find_batch is None or not wanted:
            return None
        return self._find_batch(difference.rank, difference.segment, difference.step, wanted)

    def _origins(self) -> tuple[Divergence, ...]:
        origins: list[Divergence] = []
        ranks = self._classify()
        collective = None if ranks is None or ranks.collective is None else ranks.collective.key
        for known in sorted(self._first.values(), key=lambda known: known.order):
            delivered = (divergence for key, divergence in known.delivered if key == collective)
            origins.extend(replace(divergence, is_origin=True) for divergence in delivered)
            # what looks like one to a rank alone is none where the others tell that it received the difference
            if ranks is None or ranks.sides[known.order[-1]] == "origin":
                origins.extend(known.origins)
        return tuple(origins[: self._max_divergences])

    def _explain(self, text: str, verdict: VerdictName) -> str:
        parts = [*self._refusals, text] if self._refusals else [text]
        if self.has_divergence and (choices := show_choices(self._environment)):
            parts.append(f"Choices differ: {choices}")
        machine = show_machine(self._environment)
        if verdict == "not_comparable" and machine:
            parts.append(f"The machine differs too, so nothing is proven either way: {machine}")
        elif machine:
            parts.append(f"The machine differs: {machine}")
        parts.extend(self._notes)
        return " ".join(f"{part.rstrip('.')}." for part in parts if part)
