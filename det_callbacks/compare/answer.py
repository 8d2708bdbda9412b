"""The answer to why a step differs: its cause, what is to be said of it, and the evidence."""

from det_callbacks.compare.cause import judge
from det_callbacks.compare.evidence import Evidence, LiveEvidence, RunEvidence, compare_windows, other_samples
from det_callbacks.compare.explain import explain_step
from det_callbacks.compare.facts import Facts
from det_callbacks.compare.first_difference import Words
from det_callbacks.compare.proof import evidence_lines
from det_callbacks.compare.step import StepDifference
from det_callbacks.errors import ReferenceFormatError


class EvidenceFinder:
    """Finds the evidence of both runs for a step that differs.

    Args:
        reference: of the reference.
        current: of the run that is compared.
    """

    def __init__(self, reference: RunEvidence, current: RunEvidence | LiveEvidence) -> None:
        self._reference = reference
        self._current = current

    def find(self, difference: StepDifference) -> tuple[Evidence | None, str]:
        """Return the evidence, None where a run has none, and what is to be said of that."""
        place = (difference.rank, difference.segment, difference.step)
        try:
            ours, theirs = self._reference.window(*place), self._current.window(*place)
            if ours is None or theirs is None:
                return None, ""
            sketch = other_samples(ours, theirs, difference.step)
            has_other_data = any(item.is_source and item.divergence.phase == "data" for item in difference.findings)
            found_at = self._reference.find_samples(*place, sketch) if sketch and has_other_data else None
            return compare_windows(ours, theirs, difference.step, found_at=found_at), ""
        except ReferenceFormatError as error:
            return None, f"the evidence of generators and data could not be used: {error}"


def answer(facts: Facts, *, show_rank: bool, unread: str = "") -> Words:
    """Return why a step differs.

    Args:
        facts: what is known of it.
        show_rank: whether the text names the rank.
        unread: why there is no evidence, "" where there is nothing to say.
    """
    difference = facts.difference
    judgement = judge(facts)
    text = explain_step(
        difference,
        show_rank=show_rank,
        is_resumed=facts.is_resumed,
        unrestored=facts.unrestored,
        batch_of=facts.batch_of if judgement.rule == "batch of another step" else None,
    )
    lines = evidence_lines(
        difference, facts.evidence, facts.environment, is_first=facts.is_first, batch_of=facts.batch_of
    )
    return Words(
        cause=judgement.cause,
        text=text,
        advice=judgement.advice,
        evidence=(*lines, unread) if unread else lines,
    )
