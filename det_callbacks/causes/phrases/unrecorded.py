"""Advice for a difference that nothing recorded explains."""

from collections.abc import Sequence

from det_callbacks.causes.phrases.choices import both_values
from det_callbacks.compare.facts import Facts, earlier_choice
from det_callbacks.verdict import EnvironmentDifference

_LOST_VALUE = (
    "Everything that the checkpoint restores matches, so a Python value that it does not hold may differ: save that "
    "value with on_save_checkpoint and on_load_checkpoint, or in a buffer"
)
_FROM_OUTSIDE = (
    "Check the code outside the step that computes it (labels, a loss scale, noise), and seed it if it is random"
)


def begun_before(what: str, step: int, choices: Sequence[EnvironmentDifference]) -> str:
    """Return that a difference may have started in steps that were not recorded; ``what`` starts the sentence."""
    choice = earlier_choice(choices)
    text = f"{what} before step {step}, in steps that were not recorded"
    if choice is None:
        return f"{text}. Record those steps to find where the difference starts"
    return f"{text}. A setting that differs explains it: {both_values([choice])}"


def advise_lost_value(facts: Facts) -> str:
    """Return advice on a value that a resume lost or that no recorded op produced; "" if a setting differs."""
    if facts.choices or not _may_be_python_value(facts):
        return ""
    if facts.is_resumed:
        return _LOST_VALUE
    return _FROM_OUTSIDE if facts.first.start == "outside" else ""


def _may_be_python_value(facts: Facts) -> bool:
    if not facts.sources:
        return facts.leading.divergence.kind in ("argument", "missing", "extra")
    are_unnamed = all(one.role == "input" and one.divergence.name is None for one in facts.sources)
    return are_unnamed and not facts.difference.current.program.leaves_out_ops
