"""Choices that differ: settings, options of the optimizer or the Trainer, hyperparameters."""

from collections.abc import Sequence

from det_callbacks.text import listed
from det_callbacks.verdict import EnvironmentDifference

USE_ONE_VALUE = "Use the reference's value, or record the reference again"


def both_values(entries: Sequence[EnvironmentDifference]) -> str:
    """Return entries of the environment in both runs."""
    return listed((f"{one.name}: {one.reference} in the reference, {one.current} now" for one in entries), "; ")


def explained_by(choice: EnvironmentDifference, sentence: str) -> str:
    """Return the sentence on a choice that differs, and the sentence on the first difference, which it explains."""
    both = f"{choice.reference} in the reference and {choice.current} in the current run"
    return f"{choice.name} is {both}, which explains the first difference. {sentence}"
