"""Gathers the comparison of the steps of a run into one verdict."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from det_callbacks.compare.cause import explain_step, find_cause, show_choices, show_machine
from det_callbacks.compare.collectives import Classification, classify, explain
from det_callbacks.compare.loads import explain_loads
from det_callbacks.compare.rank_verdicts import Order, RankVerdict
from det_callbacks.compare.step import StepDifference, compare_steps
from det_callbacks.compare.tally import Tally
from det_callbacks.compare.whole_steps import WholeSteps, explain_whole_steps
from det_callbacks.errors import NothingComparedError
from det_callbacks.trace.program import Program, StepView
from det_callbacks.trace.weight_loads import WeightLoad
from det_callbacks.verdict import Cause, Divergence, EnvironmentDifference, Verdict, VerdictName

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
        self._first: dict[int, tuple[Order, StepDifference, bool, bool]] = {}
        self._may_receive: dict[int, bool] = {}
        self._whole: dict[tuple[int, int, str], WholeSteps] = {}
        self._seen: set[tuple[int, int]] = set()
        self._environment: tuple[EnvironmentDifference, ...] = ()
        self._loads: tuple[tuple[WeightLoad, ...], tuple[WeightLoad, ...]] = ((), ())
        self._unrestored: tuple[str, ...] = ()
        self._world_size = 0
        self._find_batch: FindBatch | None = None
        self._notes: list[str] = []
        self._refusals: list[str] = []
        self._tally = Tally()

    @property
    def has_divergence(self) -> bool:
        """Whether anything differed so far."""
        return bool(self._first or self._whole)

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
                position = difference.findings[0].position
                order = (segment, difference.step, position, rank)
                self._first[rank] = (order, difference, is_first, is_resumed)
                self._may_receive[rank] = _follows_exchange(difference)
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
        self._add_whole(rank, step, segment, "missing")

    def add_extra_step(self, rank: int, step: int, segment: int = 0) -> None:
        """Count a step that only the current run has."""
        self._add_whole(rank, step, segment, "extra")

    def set_environment(self, differences: Iterable[EnvironmentDifference]) -> None:
        """Set how the environments differ."""
        self._environment = tuple(differences)

    def set_world_size(self, world_size: int) -> None:
        """Say that the steps of this many ranks are added: it can then be told which of them started a difference."""
        self._world_size = world_size

    def set_weight_loads(self, reference: Sequence[WeightLoad], current: Sequence[WeightLoad]) -> None:
        """Set where the two runs loaded weights after the model was set up; said where weights differ."""
        self._loads = (tuple(reference), tuple(current))

    def set_batches(self, find_batch: FindBatch) -> None:
        """Set what finds the step at which the reference had a batch: see ``find_batch``, without the run."""
        self._find_batch = find_batch

    def set_unrestored(self, names: Sequence[str]) -> None:
        """Set which restored state is not what the reference ended the step before with."""
        self._unrestored = tuple(names)

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
        self._seen |= part._seen
        self._tally.add(part._tally)
        self._trim()

    def _trim(self) -> None:
        """Drop what no verdict shows: only the first divergence is explained, and only the first origins are listed."""
        if sum(len(difference.origins) for _, difference, *_ in self._first.values()) <= 2 * self._max_divergences:
            return
        num_origins = 0
        for number, (rank, known) in enumerate(sorted(self._first.items(), key=lambda item: item[1][0])):
            order, difference, is_first, is_resumed = known
            kept = difference.origins if num_origins < self._max_divergences else ()
            num_origins += len(kept)
            if number:
                difference = replace(difference, divergences=(), origins=kept, findings=(), restored=())
            self._first[rank] = (order, difference, is_first, is_resumed)

    def finish(self) -> Verdict:
        """Return the verdict on what was added so far; it may be called again after more was added.

        Raises:
            NothingComparedError: not a single site was compared.
        """
        if not self._tally.num_sites and not self.has_divergence and not self._refusals:
            reference, current = self._names
            raise NothingComparedError(
                f"Nothing was compared between the reference {reference} and {current}: "
                + (f"{self._tally.num_steps} steps held no site at all. " if self._tally.num_steps else "no step was. ")
                + "That is no match. Check that both runs recorded steps, and with the same selection."
            )
        bits_differ = bool(self._first)
        verdict: VerdictName = "match"
        if self._refusals or (bits_differ and show_machine(self._environment)):
            verdict = "not_comparable"
        elif self.has_divergence:
            verdict = "diverged"
        first, cause, explanation = self._judge()
        return Verdict(
            verdict=verdict,
            reference=self._names[0],
            current=self._names[1],
            first_divergence=first,
            origins=self._origins(),
            cause=cause,
            explanation=self._explain(explanation, verdict),
            counts=self._tally.counts(),
            coverage=self._tally.coverage(),
            environment=self._environment,
        )

    def of_rank(self, rank: int, verdict: Verdict) -> RankVerdict:
        """Return a verdict of this builder, to which only steps of one rank were added, with where it began."""
        orders = [known[0] for known in self._first.values()]
        whole = [(steps.segment, steps.first, -1, steps.rank) for steps in self._whole.values()]
        order = min((*orders, *whole), default=None)
        may_receive = order in orders and self._may_receive.get(rank, False)
        return RankVerdict(rank=rank, verdict=verdict, order=order, may_receive=may_receive)

    def _count(
        self, rank: int, segment: int, step: int, program: Program, num_sites: int, *, num_steps: int = 1
    ) -> None:
        self._seen.add((rank, segment))
        self._tally.count(rank, step, program, num_sites, num_steps=num_steps)

    def _add_whole(self, rank: int, step: int, segment: int, kind: Literal["missing", "extra"]) -> None:
        self._tally.num_differing += 1
        known = self._whole.get((rank, segment, kind))
        self._whole[rank, segment, kind] = (
            WholeSteps(rank=rank, segment=segment, kind=kind, first=step, last=step)
            if known is None
            else replace(known, first=min(known.first, step), last=max(known.last, step), count=known.count + 1)
        )

    def _judge(self) -> tuple[Divergence | None, Cause | None, str]:
        """Return the first divergence, its cause and what is to be said of it."""
        by_steps = min(self._first.values(), key=lambda known: known[0], default=None)
        whole = min(self._whole.values(), key=lambda steps: (steps.segment, steps.first, steps.rank), default=None)
        show_rank = len(self._tally.ranks | {steps.rank for steps in self._whole.values()}) > 1
        if whole is not None and (by_steps is None or (whole.segment, whole.first, -1, whole.rank) < by_steps[0]):
            return (
                whole.divergence(),
                "structure",
                explain_whole_steps(
                    self._whole.values(), show_rank=show_rank, num_equal=None if self._first else self._tally.num_steps
                ),
            )
        if by_steps is None:
            return None, None, self._explain_match()
        first_divergence = by_steps[1].findings[0].divergence
        ranks = self._classify()
        if ranks is not None and ranks.collective is not None and not ranks.origins:
            if any(
                divergence == first_divergence
                for key, divergence in by_steps[1].delivered
                if key == ranks.collective.key
            ):
                first_divergence = replace(first_divergence, is_origin=True)
            text = f"Step {first_divergence.step}, {first_divergence.phase}: {explain(ranks)}"
            return first_divergence, "collective", text
        if ranks is not None and ranks.origins:
            by_steps = min((self._first[rank] for rank in ranks.origins), key=lambda known: known[0])
        _, difference, is_first, is_resumed = by_steps
        unrestored = self._unrestored if is_resumed else ()
        batch_of = self._step_of_batch(difference)
        cause = find_cause(
            difference,
            self._environment,
            is_first=is_first,
            is_resumed=is_resumed,
            unrestored=unrestored,
            batch_of=batch_of,
        )
        text = explain_step(
            difference, show_rank=show_rank, is_resumed=is_resumed, unrestored=unrestored, batch_of=batch_of
        )
        if cause in ("initial_weights", "checkpoint"):
            text += explain_loads(*self._loads, segment=difference.segment, step=difference.step)
        if ranks is not None and (among := explain(ranks)):
            text += f"; {among}"
        if self._whole:
            text += f"; besides, {explain_whole_steps(self._whole.values(), show_rank=show_rank)}"
        return first_divergence, cause, text

    def _classify(self) -> Classification | None:
        """Return who started the difference; None unless all ranks were compared."""
        if not self._world_size or self._tally.ranks != set(range(self._world_size)):
            return None
        known = (self._first.get(rank) for rank in range(self._world_size))
        return classify([None if first is None else first[1].among_ranks for first in known])

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
        for _, difference, *_ in sorted(self._first.values(), key=lambda known: known[0]):
            delivered = (divergence for key, divergence in difference.delivered if key == collective)
            origins.extend(replace(divergence, is_origin=True) for divergence in delivered)
            origins.extend(difference.origins)
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

    def _explain_match(self) -> str:
        if not self._tally.num_sites:
            return ""
        steps = f"{self._tally.num_steps} step" + ("s" if self._tally.num_steps != 1 else "")
        ranks = f" of {len(self._tally.ranks)} ranks" if len(self._tally.ranks) > 1 else ""
        return f"All {self._tally.num_sites} sites of {steps}{ranks} agree, bit for bit"


def _follows_exchange(difference: StepDifference) -> bool:
    """Return whether the first divergence of a step comes after something that other ranks had a part in.

    That is a collective in the trace; also gradients and what is made of them, since what synchronises them (DDP's
    reducer) need not be in it.
    """
    first = difference.findings[0]
    if first.role == "delivered":
        return True
    if first.is_source and first.divergence.phase in ("data", "rng"):
        return False
    if first.divergence.phase == "optimizer" and first.divergence.is_origin:
        return False  # the gradients that it read are recorded, and agree
    if first.divergence.phase in ("gradient", "optimizer") or (first.role == "named" and not first.is_leading):
        return True
    # else nobody knows who wrote it: a bucket of gradients, or gathered parameters; what was delivered before agrees
    return first.divergence.phase == "input" and first.divergence.name is None and first.divergence.module == "?"
