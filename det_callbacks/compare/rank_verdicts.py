"""What the ranks of a run found, each in its own steps, becomes one verdict: the same on all of them.

A rank that differs by itself is told from one that received the difference. What a rank reads from others it reads
through collectives; a place that follows one in its step may differ because another rank sent something else there,
so nothing that starts there is called an origin when another rank differs at the same step or an earlier one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from det_callbacks.verdict import Counts, Coverage, Divergence, EnvironmentDifference, Verdict

Order: TypeAlias = tuple[int, int, int, int]
"""Segment, step, position in the step, rank: the least comes first."""

MAX_ORIGINS = 100
MAX_SENTENCES = 4
"""Ranks of which a sentence is said; the others are counted."""

COLLECTIVES = ("c10d.", "_c10d_functional.", "_c10d_functional_autograd.", "c10d_functional.", "symm_mem.")
"""How the names of collectives begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVerdict:
    """What one rank found.

    Attributes:
        rank: of the process.
        verdict: on its own steps.
        order: of its first divergence; None where nothing differs.
        may_receive: whether that comes after something that other ranks had a part in.
    """

    rank: int
    verdict: Verdict
    order: Order | None = None
    may_receive: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which ``from_dict`` reads."""
        return {
            "rank": self.rank,
            "verdict": self.verdict.to_dict(),
            "environment": [asdict(difference) for difference in self.verdict.environment],
            "order": None if self.order is None else list(self.order),
            "may_receive": self.may_receive,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RankVerdict":
        """Return what ``to_dict`` wrote."""
        row = data["verdict"]
        coverage = row["coverage"]
        verdict = Verdict(
            verdict=row["verdict"],
            reference=row["reference"],
            current=row["current"],
            first_divergence=None if row["first_divergence"] is None else _divergence(row["first_divergence"]),
            origins=tuple(map(_divergence, row["origins"])),
            cause=row["cause"],
            explanation=row["explanation"],
            counts=Counts(**row["counts"]),
            coverage=Coverage(
                **{
                    **coverage,
                    "steps": None if coverage["steps"] is None else tuple(coverage["steps"]),
                    "opaque_regions": tuple(coverage["opaque_regions"]),
                }
            ),
            environment=tuple(EnvironmentDifference(**entry) for entry in data["environment"]),
        )
        order = None if data["order"] is None else tuple(data["order"])
        return cls(rank=data["rank"], verdict=verdict, order=order, may_receive=data["may_receive"])


def merge_verdicts(parts: Sequence[RankVerdict]) -> Verdict:
    """Return the verdict on all ranks.

    Word, cause and explanation are those of the rank whose divergence comes first; of several ranks that first differ
    in one step, it is one that differs by itself. Of the others a sentence says whether they received the difference.

    Args:
        parts: of every rank, in any order.

    Raises:
        ValueError: there are none.
    """
    if not parts:
        raise ValueError("a verdict needs at least one rank")
    parts = sorted(parts, key=lambda part: part.rank)
    differing = sorted((part for part in parts if part.order is not None), key=_order)
    base = parts[0].verdict
    common: dict[str, Any] = {
        "reference": base.reference,
        "current": base.current,
        "counts": _sum_counts(parts),
        "coverage": _join_coverage(parts),
        "environment": _join_environments(parts),
    }
    if not differing:
        refusing = next((part for part in parts if part.verdict.verdict != "match"), None)
        return Verdict(
            verdict="match" if refusing is None else refusing.verdict.verdict,
            first_divergence=None,
            origins=(),
            cause=None if refusing is None else refusing.verdict.cause,
            explanation=_explain_match(parts, common["counts"]) if refusing is None else refusing.verdict.explanation,
            **common,
        )
    received = _receivers(differing)
    is_in_collective = _starts_in_collective(differing, received)
    leader = _leader(differing, received)
    first = differing[0].verdict.first_divergence
    assert first is not None, "what has an order has a divergence"
    if differing[0].rank in received:
        first = replace(first, is_origin=False)
    elif is_in_collective:
        first = replace(first, is_origin=True)
    elif differing[0].may_receive and len(parts) > 1 and first.is_origin:
        first = replace(first, is_origin=None)
    own = [part for part in differing if part.rank not in received]
    origins = [first] if is_in_collective else []
    for part in own:
        # a place that follows a collective is proven to be an origin only when no other rank takes part in it
        if not (part.may_receive and len(parts) > 1):
            origins.extend(part.verdict.origins)
    texts = [f"Rank {leader.rank} of {len(parts)}: {leader.verdict.explanation}"]
    texts += _on_the_others(leader, parts, differing, received, is_in_collective=is_in_collective)
    return Verdict(
        verdict=leader.verdict.verdict,
        first_divergence=first,
        origins=tuple(origins[:MAX_ORIGINS]),
        cause="collective" if is_in_collective else leader.verdict.cause,
        explanation=" ".join(texts),
        **common,
    )


def is_collective(op: str) -> bool:
    """Return whether an op, as ``namespace.op.overload``, is a collective."""
    return op.startswith(COLLECTIVES)


def _order(part: RankVerdict) -> Order:
    assert part.order is not None
    return part.order


def _moment(part: RankVerdict) -> tuple[int, int]:
    return _order(part)[:2]


def _receivers(differing: Sequence[RankVerdict]) -> frozenset[int]:
    """Return the ranks whose difference came, or may have come, from another rank."""
    received = set()
    for part in differing:
        others = [other for other in differing if other is not part and _moment(other) <= _moment(part)]
        senders = [other for other in others if _moment(other) < _moment(part) or not other.may_receive]
        if part.may_receive and senders:
            received.add(part.rank)
    return frozenset(received)


def _starts_in_collective(differing: Sequence[RankVerdict], received: frozenset[int]) -> bool:
    """Return whether a collective gave other bits although what went in was the reference's on every rank."""
    first = differing[0]
    earliest = [part for part in differing if _moment(part) == _moment(first)]
    return not received.intersection(part.rank for part in earliest) and all(
        part.verdict.first_divergence is not None
        and is_collective(part.verdict.first_divergence.op)
        and part.verdict.first_divergence.is_origin is not False
        for part in earliest
    )


def _leader(differing: Sequence[RankVerdict], received: frozenset[int]) -> RankVerdict:
    earliest = [part for part in differing if _moment(part) == _moment(differing[0])]
    return next((part for part in earliest if part.rank not in received), earliest[0])


def _on_the_others(
    leader: RankVerdict,
    parts: Sequence[RankVerdict],
    differing: Sequence[RankVerdict],
    received: frozenset[int],
    *,
    is_in_collective: bool,
) -> list[str]:
    texts = []
    others = [part for part in differing if part is not leader]
    for part in others[:MAX_SENTENCES]:
        since = f"Rank {part.rank} differs from step {_order(part)[1]} on"
        if is_in_collective and _moment(part) == _moment(leader):
            texts.append(f"{since}: it took part in the same collective.")
        elif part.rank in received:
            texts.append(f"{since}: it received the difference.")
        elif part.may_receive:
            texts.append(f"{since}: after what the ranks exchange, so it may have received the difference or sent it.")
        else:
            texts.append(f"{since}: it also differs by itself.")
    if len(others) > MAX_SENTENCES:
        num_received = sum(part.rank in received for part in others[MAX_SENTENCES:])
        num_more = len(others) - MAX_SENTENCES
        texts.append(f"So do {num_more} more ranks, of which {num_received} received the difference.")
    num_equal = len(parts) - len(differing)
    if num_equal:
        texts.append(
            f"The other {num_equal} agree as far as they were compared." if num_equal > 1 else _one_equal(parts)
        )
    return texts


def _one_equal(parts: Sequence[RankVerdict]) -> str:
    equal = next(part for part in parts if part.order is None)
    return f"Rank {equal.rank} agrees as far as it was compared."


def _explain_match(parts: Sequence[RankVerdict], counts: Counts) -> str:
    if len(parts) == 1:
        return parts[0].verdict.explanation
    text = (
        f"All {counts.sites_compared} sites of {counts.steps_compared} steps of {len(parts)} ranks agree, bit for bit."
    )
    return " ".join([text, *dict.fromkeys(_after_first_sentence(part.verdict.explanation) for part in parts)]).strip()


def _after_first_sentence(text: str) -> str:
    """Return what a rank's explanation says besides that all agrees: how the machine differs, what was left out."""
    return text.partition("bit for bit.")[2].strip()


def _sum_counts(parts: Sequence[RankVerdict]) -> Counts:
    counts = [asdict(part.verdict.counts) for part in parts]
    return Counts(**{name: sum(row[name] for row in counts) for name in counts[0]})


def _join_coverage(parts: Sequence[RankVerdict]) -> Coverage:
    coverages = [part.verdict.coverage for part in parts]
    spans = [coverage.steps for coverage in coverages if coverage.steps is not None]
    skipped: Counter[str] = Counter()
    replayed: dict[str, dict[str, Any]] = {}
    for coverage in coverages:
        skipped.update(coverage.ops_skipped)
        for name, entry in coverage.replayed.items():
            known = replayed.setdefault(name, {})
            for key, value in entry.items():
                known[key] = known.get(key, 0) + value
    return Coverage(
        ranks=len(parts),
        steps=(min(span[0] for span in spans), max(span[1] for span in spans)) if spans else None,
        ops_seen=sum(coverage.ops_seen for coverage in coverages),
        ops_digested=sum(coverage.ops_digested for coverage in coverages),
        ops_skipped=dict(sorted(skipped.items())),
        opaque_regions=tuple(sorted({region for coverage in coverages for region in coverage.opaque_regions})),
        replayed=replayed,
    )


def _join_environments(parts: Sequence[RankVerdict]) -> tuple[EnvironmentDifference, ...]:
    found: dict[str, EnvironmentDifference] = {}
    for part in parts:
        for difference in part.verdict.environment:
            found.setdefault(difference.name, difference)
    return tuple(found[name] for name in sorted(found))


def _divergence(row: Mapping[str, Any]) -> Divergence:
    shape = None if row["shape"] is None else tuple(row["shape"])
    return Divergence(**{**row, "source": tuple(row["source"]), "shape": shape})
