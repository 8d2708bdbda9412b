"""The state of a generator differs first, or only the current run has an op that draws from one.

Example:
    Step 3: the generator state differs (torch.cpu); the step started with this difference, so
    no op caused it. Validation draws from the generator torch.cpu: give it a separate
    generator, or restore the state of torch.cpu afterwards.
"""

from det_callbacks.causes.phrases.choices import USE_ONE_VALUE, explained_by
from det_callbacks.causes.phrases.generators import RESUME_EXACTLY, keep_from_drawing, show_change
from det_callbacks.causes.phrases.steps import explain_first
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.differences import Finding
from det_callbacks.compare.facts import Facts
from det_callbacks.runs.evidence import LOADER
from det_callbacks.text import capitalised

CAUSES: Causes = ("rng", "settings")


def find(facts: Facts) -> Answer | None:
    if not _is_cause(facts):
        return None
    return of_validation(facts) or Answer(cause="rng", advice=advise(facts))


def of_validation(facts: Facts) -> Answer | None:
    """Return the answer if only one run validated, because of a setting."""
    choice = facts.validation_choice
    if choice is None:
        return None
    return Answer(cause="settings", explanation=explained_by(choice, explain_first(facts)), advice=USE_ONE_VALUE)


def _is_cause(facts: Facts) -> bool:
    if "rng" in facts.source_phases:
        return True
    if facts.sources:
        return bool(facts.drawn_within) and all(map(_is_made_outside, facts.sources))
    if facts.model_choice is not None:
        return False
    is_passed_on = bool(facts.drawn_within) and facts.first.start == "passed on"
    return is_passed_on or facts.draws_in_step or _draws_in_one_run(facts)


def _is_made_outside(source: Finding) -> bool:
    """Return whether a source may hold numbers that NumPy or Python drew: no name, and no op made it."""
    return source.role == "input" and source.divergence.name is None


def _draws_in_one_run(facts: Facts) -> bool:
    first = facts.first.divergence
    return first.kind == "extra" and bool(first.op) and facts.draws(facts.first.row)


def advise(facts: Facts) -> str:
    consumed, changes = facts.consumed, facts.evidence.generators
    was_before_fit = any(one.equal_at is None or LOADER in one.points for one in changes)
    if facts.is_resumed and was_before_fit and "rng" in facts.source_phases:
        return RESUME_EXACTLY
    if _draws_in_one_run(facts):
        module = facts.first.divergence.module
        if module in ("", "?"):
            return "Remove the draw, or record the reference again"
        return (
            f"Only the current run draws in {module}: compare its train() or eval() mode, and the arguments "
            "of its dropout"
        )
    if consumed is not None:
        return keep_from_drawing(consumed, facts.evidence)
    if not changes:
        return "Seed this generator, and save its state in checkpoints"
    first = changes[0]
    what = show_change(first, facts.evidence)
    if first in facts.evidence.other_starts and first.seeds is None:
        return f"{capitalised(what)}, so seed Python, NumPy and torch before you build the model"
    return capitalised(what)
