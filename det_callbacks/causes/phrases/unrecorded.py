"""What to do if nothing recorded explains a difference."""

from collections.abc import Sequence

from det_callbacks.causes.phrases.choices import both_values
from det_callbacks.compare.facts import Facts, earlier_choice
from det_callbacks.verdict import EnvironmentDifference

_LOST_VALUE = (
    "All that a checkpoint restores matches: look for a Python value that the checkpoint does not hold, and keep it "
    "there with on_save_checkpoint and on_load_checkpoint, or in a buffer"
)
_FROM_OUTSIDE = "Seed what makes it, record it, or name it there: observe_non_deterministic (docs/how-to/replay.md)"


def begun_before(what: str, step: int, choices: Sequence[EnvironmentDifference]) -> str:
    """Return that something may have begun in steps that were not recorded; ``what`` is the subject."""
    choice = earlier_choice(choices)
    text = f"{what} before step {step}, and steps before it were not recorded"
    if choice is None:
        return f"{text}: record them too to see where it starts"
    return f"{text}: a choice explains it, {both_values([choice])}"


def advise_lost_value(facts: Facts) -> str:
    """Return advice on a value that a resume lost or that came from outside; "" if a choice differs."""
    if facts.choices or not _may_be_python_value(facts):
        return ""
    if facts.is_resumed:
        return _LOST_VALUE
    return _FROM_OUTSIDE if facts.first.start == "outside" else ""


def _may_be_python_value(facts: Facts) -> bool:
    if not facts.sources:
        return facts.leading.divergence.kind in ("argument", "missing", "extra")
    are_unnamed = all(one.role == "input" and one.divergence.name is None for one in facts.sources)
    return are_unnamed and "unselected" not in facts.difference.current.program.ops_skipped
