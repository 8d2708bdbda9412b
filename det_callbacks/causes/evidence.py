"""The evidence of a verdict, one fact per line."""

from det_callbacks.causes.phrases.batches import batch_lines
from det_callbacks.causes.phrases.choices import both_values
from det_callbacks.causes.phrases.generators import show_change, show_idle
from det_callbacks.compare.facts import Facts
from det_callbacks.text import at_most, count

MAX_LINES = 20  # of evidence


def evidence_lines(facts: Facts) -> tuple[str, ...]:
    """Return the evidence in chronological order: weights, data, generators, settings."""
    lines = list[str]()
    if facts.evidence.unread:
        lines.append(f"the evidence of generators and data cannot be used: {facts.evidence.unread}")
    if facts.is_first_seen and facts.num_initial:
        lines.append(f"initial state: {_of_initial_state(facts)}")
    lines += batch_lines(facts)
    lines += [show_change(one, facts.evidence) for one in facts.evidence.generators]
    lines += [show_idle(one) for one in facts.evidence.idle]
    lines += [f"setting: {both_values([entry])}" for entry in facts.choices]
    return tuple(at_most(MAX_LINES, lines))


def _of_initial_state(facts: Facts) -> str:
    names = [name for name in facts.initial_sources if name not in facts.further]
    if not names:
        return f"{count(facts.num_initial, 'tensor')}, all equal"
    text = f"{len(names)} of {facts.num_initial} tensors differ"
    is_all_random = {*names} == facts.random_initial and len(names) < facts.num_initial
    return f"{text}, all that are not constant" if is_all_random else text
