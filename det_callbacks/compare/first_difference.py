"""Where a rank first differs: what the verdict on all ranks needs of it, and can be told to the others as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeAlias

from det_callbacks.compare.collectives import CallKey, Classification, RankDifference
from det_callbacks.compare.step import StepDifference
from det_callbacks.verdict import Cause, Divergence

Order: TypeAlias = tuple[int, int, int, int]
"""Segment, step, position in the step, rank: the least comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a rank says of its first difference.

    Attributes:
        cause: as the verdict names it.
        text: where it starts, with what, and why there; without its final stop.
        advice: what can be done; likewise, "" where there is nothing to add.
        evidence: what led to the cause, one line a finding.
    """

    cause: Cause
    text: str
    advice: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the words are found from, where the rank was compared by this process.

    Attributes:
        difference: of the step.
        is_first: it is the first one of its fit.
        is_resumed: it is the first one after a checkpoint was restored.
    """

    difference: StepDifference
    is_first: bool
    is_resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first difference of a rank.

    Attributes:
        order: of it among those of all ranks.
        first: divergence.
        among_ranks: what tells, with that of the other ranks, who started it.
        delivered: by collectives into which this rank put what the reference did.
        origins: of the step, as this rank alone sees it.
        words: None where nobody asked for them yet.
        context: None where another process compared this rank, or it is not needed any more.
    """

    order: Order
    first: Divergence
    among_ranks: RankDifference
    delivered: tuple[tuple[CallKey, Divergence], ...] = ()
    origins: tuple[Divergence, ...] = ()
    words: Words | None = None
    context: Context | None = None

    @classmethod
    def of(cls, difference: StepDifference, *, is_first: bool, is_resumed: bool) -> Self:
        """Return what is needed of a step that differs."""
        finding = difference.findings[0]
        assert difference.among_ranks is not None, "a step that differs was described"
        return cls(
            order=(difference.segment, difference.step, finding.position, difference.rank),
            first=finding.divergence,
            among_ranks=difference.among_ranks,
            delivered=difference.delivered,
            origins=difference.origins,
            context=Context(difference=difference, is_first=is_first, is_resumed=is_resumed),
        )

    def among(self, ranks: Classification | None) -> Divergence:
        """Return the divergence with what all ranks together tell of where it started; None where they tell nothing."""
        if ranks is None:
            return self.first
        if ranks.is_collective and ranks.collective is not None:
            by_it = [divergence for key, divergence in self.delivered if key == ranks.collective.key]
            return replace(self.first, is_origin=replace(self.first, numbers=None) in by_it)
        side = ranks.sides[self.order[-1]]
        if side == "receiver":
            return replace(self.first, is_origin=False)
        return replace(self.first, is_origin=None) if side == "unknown" and self.first.is_origin else self.first

    def without_details(self, *, num_origins: int) -> Self:
        """Return it with the first origins only and without what its words are found from."""
        return replace(self, origins=self.origins[:num_origins], context=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, in which the context is replaced by the words that came from it."""
        assert self.words is not None, "what is told was put in words"
        return {
            "order": list(self.order),
            "first": self.first.to_dict(),
            "among_ranks": self.among_ranks.to_dict(),
            "delivered": [[list(key), divergence.to_dict()] for key, divergence in self.delivered],
            "origins": [origin.to_dict() for origin in self.origins],
            "words": asdict(self.words),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Return what ``to_dict`` gave, also after it went through JSON; KeyError or TypeError where it is not that."""
        segment, step, position, rank = content["order"]
        return cls(
            order=(segment, step, position, rank),
            first=Divergence.from_dict(content["first"]),
            among_ranks=RankDifference.from_dict(content["among_ranks"]),
            delivered=tuple(
                ((op, group, number), Divergence.from_dict(row)) for (op, group, number), row in content["delivered"]
            ),
            origins=tuple(map(Divergence.from_dict, content["origins"])),
            words=Words(**{**content["words"], "evidence": tuple(content["words"]["evidence"])}),
        )
