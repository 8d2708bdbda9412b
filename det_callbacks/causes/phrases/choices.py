"""Settings that differ: those of det_callbacks, options of the optimizer or the Trainer, hyperparameters."""

from collections.abc import Sequence

from det_callbacks.text import listed
from det_callbacks.verdict import EnvironmentDifference

USE_ONE_VALUE = "Use the reference's value, or record the reference again"


def both_values(entries: Sequence[EnvironmentDifference]) -> str:
    """Return "settings.seed (0 in the reference, 1 in the current run)" for entries of the environment."""
    return listed(f"{one.name} ({one.reference} in the reference, {one.current} in the current run)" for one in entries)


def explained_by(choice: EnvironmentDifference, sentence: str) -> str:
    """Return a sentence on a setting that differs, then ``sentence``, on the first difference that it explains."""
    both = f"{choice.reference} in the reference and {choice.current} in the current run"
    return f"{choice.name} is {both}, which explains the first difference. {sentence}"
