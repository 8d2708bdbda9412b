"""The parts of each finding's file."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from det_callbacks.findings.facts import FitFacts
from det_callbacks.runs.selection import Level as Level

Fits: TypeAlias = Sequence[FitFacts]
"""The same fit of all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a finding applies, and its message; the sentences have no final stop."""

    ranks: tuple[int, ...]
    steps: tuple[int, ...]  # the first and the last that show it
    names: tuple[str, ...]
    explanation: str
    advice: str


class Rule(Protocol):
    """A module with a word, the lowest level that records what it needs, and a function.

    The first paragraph of the module's docstring says when the finding applies. After "Example:" comes a whole
    message, which a test compares with that of a real training. ``make findings`` writes both to
    ``docs/reference/findings.md``.
    """

    NAME: str
    LEVEL: Level

    def find(self, fits: Fits, /) -> Found | None:
        """Return where the finding applies, or None if it does not, or if the recording lacks the facts."""


def of_one_process(look: Callable[[FitFacts], Found | None]) -> Callable[[Fits], Found | None]:
    """Make a rule from a look at one process: its first finding, with the ranks and names of all that have it."""

    def find(fits: Fits) -> Found | None:
        found = [one for fit in fits if (one := look(fit)) is not None]
        if not found:
            return None
        names = dict.fromkeys(name for one in found for name in one.names)
        return replace(found[0], ranks=tuple(rank for one in found for rank in one.ranks), names=tuple(names))

    return find


def found_in(*fits: FitFacts, steps: Iterable[int], names: Iterable[str], explanation: str, advice: str) -> Found:
    ranks = tuple(fit.rank for fit in fits)
    first_and_last = ends(steps)
    return Found(ranks=ranks, steps=first_and_last, names=tuple(names), explanation=explanation, advice=advice)


def ends(steps: Iterable[int]) -> tuple[int, int]:
    numbers = [int(step) for step in steps]
    return min(numbers), max(numbers)


def span(steps: Iterable[int]) -> str:
    """Return "step 3", "steps 3 to 17"."""
    first, last = ends(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def from_to(steps: Iterable[int]) -> str:
    """Return "from step 3 to 17"."""
    first, last = ends(steps)
    return f"from step {first} to {last}"
