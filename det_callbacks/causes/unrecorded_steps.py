"""State differs that a step before it may have changed, and that step was not recorded.

Example:
    Step 7: an input from outside the trace differs (net.weight); it entered the step that way,
    so no op is to blame. This state began to differ before step 7, and steps before it were not
    recorded: record them too to see where it starts.
"""

from det_callbacks.causes.phrases.unrecorded import begun_before
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts, earlier_choice

CAUSES: Causes = ("unknown", "settings")


def find(facts: Facts) -> Answer | None:
    if not facts.is_after_gap or not _may_be_older(facts):
        return None
    what = "This state began to differ" if facts.sources else "It may have started"
    return Answer(
        cause="unknown" if earlier_choice(facts.choices) is None else "settings",
        advice=begun_before(what, facts.difference.step, facts.choices),
    )


def _may_be_older(facts: Facts) -> bool:
    if facts.sources:
        source = facts.sources[0].divergence
        return source.phase in ("input", "state") and bool(source.name)
    # what it was computed from is not recorded
    first = facts.first.divergence
    return facts.origin is None and not first.op and first.kind == "content"
