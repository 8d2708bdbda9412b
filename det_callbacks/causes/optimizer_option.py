"""An option of the optimizer differs: it was built so on this rank, or something changed the option during the fit.

Example:
    From step 4 on, lr of group 0 is 0.01 in the reference and 0.011 in the current run. Step 4,
    state: net.0.weight has different bits; the op that wrote it was not recorded, so the
    verdict cannot say where the difference starts. Check what sets lr of group 0 during the
    fit: a learning rate scheduler, a callback, or a hook of the module.
"""

from det_callbacks.causes.phrases.steps import explain_first
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.evidence import OptionChange
from det_callbacks.compare.facts import Facts
from det_callbacks.text import capitalised, listed

CAUSES: Causes = ("optimizer", "settings")


def find(facts: Facts) -> Answer | None:
    if not facts.evidence.options or facts.sources:
        return None
    if not facts.is_of_update(facts.leading.row):
        return None
    names = listed(one.name for one in facts.evidence.options)
    if _is_built_so(facts):
        changes = [f"{both} from the first update on" for both in map(_both_values, facts.evidence.options)]
        on_rank = f" on rank {facts.difference.rank}" if facts.shows_rank else ""
        return Answer(
            cause="settings",
            explanation=f"{listed(changes, '; ')}. {explain_first(facts)}",
            advice=f"Check how the script builds the optimizer and its schedulers{on_rank}, and what else sets {names} "
            "before the first update",
        )
    changes = [f"from step {one.since} on, {_both_values(one)}" for one in facts.evidence.options]
    return Answer(
        cause="optimizer",
        explanation=f"{capitalised(listed(changes, '; '))}. {explain_first(facts)}",
        advice=f"Check what sets {names} during the fit: a learning rate scheduler, a callback, or a hook of the "
        "module",
    )


def _both_values(option: OptionChange) -> str:
    return f"{option.name} is {option.reference} in the reference and {option.current} in the current run"


def _is_built_so(facts: Facts) -> bool:
    """Return whether the options had these values in the first update; a resume sets them from the checkpoint."""
    is_start_known = not (facts.is_resumed or facts.is_after_unrecorded)
    return is_start_known and all(one.is_first_value for one in facts.evidence.options)
