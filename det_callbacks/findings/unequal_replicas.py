"""Parameters differ from rank to rank that Lightning's DDPStrategy keeps equal, or that began equal in any other run.

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
    strategy = fits[0].choice("trainer.strategy")
    if len(fits) < 2 or strategy not in (None, "DDPStrategy"):
        return None
    # ranks of an unknown launcher may hold shards, of which only constants are equal when the fit begins
    if strategy is None and not _began_equal(fits):
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
    began = ", although they were equal when the fit began" if strategy is None else ""
    stops = ". ReplicaAuditCallback stops at the first difference" if strategy is not None else ""
    return found_in(
        *fits,
        steps=steps,
        names=names,
        explanation=f"{listed(names)} differed between {ranks_text([fit.rank for fit in fits])}, in {span(steps)}"
        f"{began}",
        advice="Their gradients are not averaged, or only one rank updates them: check for code that bypasses the "
        f"wrapped module's forward, moves it to another device, or writes weights{stops}",
    )


def _began_equal(fits: Fits) -> bool:
    """Return whether all ranks had the same trained parameters when the fit began."""
    starts = []
    for fit in fits:
        first = fit.series(lambda site: site.name if site.phase == "state" else None, takes_first=True)
        starts.append({name: int(first[name].digests[0]) for name in fit.gradients if name in first})
    return bool(starts[0]) and all(one == starts[0] for one in starts)
