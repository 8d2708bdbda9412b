"""The parts of a finding."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from det_callbacks.findings.fit_summary import FitSummary
from det_callbacks.runs.selection import Level

Fits: TypeAlias = Sequence[FitSummary]
"""The same fit of all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a finding applies, and its message; the sentences have no final stop."""

    ranks: tuple[int, ...]
    steps: tuple[int, ...]  # the first and the last that show it
    names: tuple[str, ...]
    explanation: str
    advice: str


class Rule:
    """A finding: its name, the lowest level that records what it needs, and a function.

    The first paragraph of the docstring says when the finding applies. After "Example:" comes a
    whole message, which a test compares with that of a real training. ``make findings`` writes both
    to ``docs/reference/findings.md``.
    """

    def __init__(
        self, look: Callable[..., Found | None], level: Level, *, is_of_ranks: bool
    ) -> None:
        self.name = look.__name__
        self.level = level
        self.is_of_ranks = is_of_ranks
        self.__doc__ = look.__doc__
        self._look = look

    def find(self, fits: Fits) -> Found | None:
        """Return where the finding applies, or None if it does not,
        or if the recording lacks the facts.

        A finding of one process is the first process's, with the ranks and
        names of all that have it.
        """
        if self.is_of_ranks:
            return self._look(fits)
        per_fit = [one for fit in fits if (one := self._look(fit)) is not None]
        if not per_fit:
            return None
        names = dict.fromkeys(name for one in per_fit for name in one.names)
        return replace(
            per_fit[0],
            ranks=tuple(rank for one in per_fit for rank in one.ranks),
            names=tuple(names),
        )


def of_one_process(level: Level) -> Callable[[Callable[[FitSummary], Found | None]], Rule]:
    return lambda look: Rule(look, level, is_of_ranks=False)


def of_ranks(level: Level) -> Callable[[Callable[[Fits], Found | None]], Rule]:
    return lambda look: Rule(look, level, is_of_ranks=True)


def found_in(
    *fits: FitSummary, steps: Iterable[int], names: Iterable[str], explanation: str, advice: str
) -> Found:
    ranks = tuple(fit.rank for fit in fits)
    first_and_last = ends(steps)
    return Found(
        ranks=ranks,
        steps=first_and_last,
        names=tuple(names),
        explanation=explanation,
        advice=advice,
    )


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
