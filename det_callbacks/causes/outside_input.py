"""A tensor differs, and no recorded op produced it.

Example:
    Step 7: a tensor read in net.noise differs; no recorded op produced it. Check the code
    outside the step that computes it (labels, a loss scale, noise), and seed it if it is
    random.
"""

from det_callbacks.causes.phrases.unrecorded import advise_lost_value
from det_callbacks.causes.rule import CAUSE_OF_PHASE, Answer, Causes, is_of_parameter
from det_callbacks.compare.facts import Facts
from det_callbacks.runs.program import is_further
from det_callbacks.verdict import Cause

CAUSES: Causes = ("initial_weights", "forward", "backward", "optimizer", "structure", "unknown")

_SORT = (
    "They are the reference's in a different order, so sort what is iterated over: a set (whose order depends on "
    "PYTHONHASHSEED), or the files of a folder"
)


def find(facts: Facts) -> Answer | None:
    if facts.has_reordered_inputs:
        return Answer(cause="structure", advice=_SORT)
    cause = _cause(facts)
    return None if cause is None else Answer(cause=cause, advice=advise_lost_value(facts))


def _cause(facts: Facts) -> Cause | None:
    if not facts.sources:
        return None
    source = facts.sources[0]
    name = source.divergence.name
    if name is None:
        return "unknown"
    if is_further(name):
        return None  # in the first step a setting explains it, or it is initial state
    if is_of_parameter(source):
        return "unknown" if name.startswith("grad of ") else "optimizer"
    if facts.is_first_seen and not facts.is_after_gap:
        return "initial_weights"
    return CAUSE_OF_PHASE.get(facts.difference.first_reader(source.row), "unknown")
