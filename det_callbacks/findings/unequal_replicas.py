"""Parameters that DistributedDataParallel keeps equal on all ranks differ from rank to rank.

Example:
    first.weight, first.bias, norm.weight and 3 more differ between ranks 0, 1, in steps 0 to 7. Their gradients are
    not averaged, or only one rank updates them: look at what calls the wrapped module past its forward, moves it to
    another device, or writes weights by itself. ReplicaAuditCallback stops where it begins.
"""

from collections.abc import Sequence

from det_callbacks.findings.facts import MIN_STEPS, FitFacts, RunFacts
from det_callbacks.findings.rule import Found, Level, span
from det_callbacks.report.console import listed, ranks_text

NAME = "unequal_replicas"
LEVEL: Level = "state"


def find(facts: RunFacts) -> Found | None:
    if facts.choice("trainer.strategy") != "DDPStrategy":
        return None
    for fits in facts.by_segment():
        if len(fits) > 1 and (found := _in_fits(fits)) is not None:
            return found
    return None


def _in_fits(fits: Sequence[FitFacts]) -> Found | None:
    names, steps = list[str](), set[int]()
    for name in fits[0].gradients:  # what is trained; a buffer may differ between broadcasts
        known = [fit.states.get(name) for fit in fits]
        by_step = [dict(zip(one.steps.tolist(), one.digests.tolist(), strict=True)) for one in known if one is not None]
        common = set.intersection(*(set(one) for one in by_step)) if len(by_step) == len(fits) else set[int]()
        differing = {step for step in common if len({one[step] for one in by_step}) > 1}
        if len(differing) >= MIN_STEPS:
            names.append(name)
            steps |= differing
    if not names:
        return None
    ranks, span_of_steps = tuple(fit.rank for fit in fits), (min(steps), max(steps))
    return Found(ranks=ranks, steps=span_of_steps, names=tuple(names), segment=fits[0].segment)


def explain(found: Found) -> str:
    verb = "differs" if len(found.names) == 1 else "differ"
    return f"{listed(found.names)} {verb} between {ranks_text(found.ranks)}, in {span(found)}"


def advise(found: Found) -> str:
    return (
        "Their gradients are not averaged, or only one rank updates them: look at what calls the wrapped module past "
        "its forward, moves it to another device, or writes weights by itself. ReplicaAuditCallback stops where it "
        "begins"
    )
