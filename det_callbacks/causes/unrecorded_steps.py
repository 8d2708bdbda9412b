"""State differs, and an earlier step that was not recorded may have changed it.

Example:
    Step 7: net.weight differs; no recorded op produced it. This state first differed before
    step 7, in steps that were not recorded. Record those steps to find where the difference
    starts.
"""

from det_callbacks.causes.phrases.unrecorded import begun_before
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts, earlier_choice

CAUSES: Causes = ("unknown", "settings")


def find(facts: Facts) -> Answer | None:
    if not facts.is_after_gap or not _may_be_older(facts):
        return None
    what = "This state first differed" if facts.sources else "The difference may have started"
    return Answer(
        cause="unknown" if earlier_choice(facts.choices) is None else "settings",
        advice=begun_before(what, facts.difference.step, facts.choices),
    )


def _may_be_older(facts: Facts) -> bool:
    if facts.sources:
        source = facts.sources[0].divergence
        return source.phase in ("input", "state") and bool(source.name)
    # the inputs of the first difference were not recorded
    first = facts.first.divergence
    return facts.origin is None and not first.op and first.kind == "content"
