"""Parameters that DistributedDataParallel keeps equal on all ranks differ from rank to rank.

Example:
    first.weight, first.bias, norm.weight and 3 more differed between ranks 0 and 1, in steps 0
    to 7. Their gradients are not averaged, or only one rank updates them: check for code that
    bypasses the wrapped module's forward, moves it to another device, or writes weights.
    ReplicaAuditCallback stops at the first difference.
"""

from det_callbacks.findings.facts import MIN_STEPS
from det_callbacks.findings.rule import Fits, Found, Level, found_in, span
from det_callbacks.text import listed, ranks_text

NAME = "unequal_replicas"
LEVEL: Level = "state"


def find(fits: Fits) -> Found | None:
    if len(fits) < 2 or fits[0].choice("trainer.strategy") != "DDPStrategy":
        return None
    names, steps = list[str](), set[int]()
    for name in fits[0].gradients:  # a buffer may differ between broadcasts
        known = [fit.states[name] for fit in fits if name in fit.states]
        if len(known) < len(fits):
            continue
        by_step = [dict(zip(one.steps.tolist(), one.digests.tolist(), strict=True)) for one in known]
        common = set.intersection(*(set(one) for one in by_step))
        differing = {step for step in common if len({one[step] for one in by_step}) > 1}
        if len(differing) >= MIN_STEPS:
            names.append(name)
            steps |= differing
    if not names:
        return None
    return found_in(
        *fits,
        steps=steps,
        names=names,
        explanation=f"{listed(names)} differed between {ranks_text([fit.rank for fit in fits])}, in {span(steps)}",
        advice="Their gradients are not averaged, or only one rank updates them: check for code that bypasses the "
        "wrapped module's forward, moves it to another device, or writes weights. ReplicaAuditCallback stops at the "
        "first difference",
    )
