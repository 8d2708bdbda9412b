"""The loss has the same bits in all steps, while the batches differ.

Example:
    The loss has the same bits in all 8 examined steps, from step 0 to 7, although the batches
    differ. Check whether it depends on the batch: dead ReLUs, an output that is saturated,
    detached or overwritten, or a loss computed from constants make it constant.
"""

from det_callbacks.findings.facts import MIN_BATCHES, MIN_STEPS, FitFacts
from det_callbacks.findings.rule import Found, Level, found_in, from_to, of_one_process
from det_callbacks.runs.program import Site

NAME = "constant_loss"
LEVEL: Level = "state"

_COARSE = ("float16", "bfloat16")  # in which a loss often repeats a value


@of_one_process
def find(fit: FitFacts) -> Found | None:
    if fit.num_batches < MIN_BATCHES:
        return None
    losses: dict[int, bytes] = {}  # by step
    for program, records in fit.programs:
        chosen = [at for at, site in enumerate(program.sites) if _is_loss(site)]
        layouts = [fit.layout(records[0]).entries[at] for at in chosen]
        if not chosen or any(entry is not None and entry.dtype in _COARSE for entry in layouts):
            return None
        losses.update((record.step, record.digests[chosen].tobytes()) for record in records)
    if len(losses) < MIN_STEPS or len({*losses.values()}) > 1:
        return None
    return found_in(
        fit,
        steps=losses,
        names=["loss"],
        explanation=f"The loss has the same bits in all {len(losses)} examined steps, {from_to(losses)}, although the "
        "batches differ",
        advice="Check whether it depends on the batch: dead ReLUs, an output that is saturated, detached or "
        "overwritten, or a loss computed from constants make it constant",
    )


def _is_loss(site: Site) -> bool:
    """Return whether a site is a loss that started a backward pass of the step."""
    if site.phase != "forward" or site.role != "named" or site.op or site.module or site.name is None:
        return False
    return site.name == "loss" or site.name.startswith("loss[")
