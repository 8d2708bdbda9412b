"""What each file of a finding has; ``table.py`` lists the findings in the order in which they are looked for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from det_callbacks.findings.facts import FitFacts, RunFacts

Level = Literal["op", "module", "state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a finding holds; ``detail`` is what its sentence needs besides."""

    ranks: tuple[int, ...]
    steps: tuple[int, ...]  # the first and the last that show it; () for the run as a whole
    names: tuple[str, ...] = ()
    detail: str = ""
    segment: int = 0


class Rule(Protocol):
    """One finding: a module with its word, the least level that has its facts, and three functions.

    The module's docstring says in its first paragraph when the finding applies. The example of the whole message
    follows "Example:". The page ``docs/reference/findings.md`` is made of both (``make findings``), and a test compares
    the example with what a real training gives.
    """

    NAME: str
    LEVEL: Level

    def find(self, facts: RunFacts) -> Found | None:
        """Return where the finding holds; None where it does not, or where the recording lacks the facts."""

    def explain(self, found: Found) -> str:
        """Return what is wrong, without a final stop."""

    def advise(self, found: Found) -> str:
        """Return what to do about it, without a final stop."""


def in_fits(facts: RunFacts, look: Callable[[FitFacts], Found | None]) -> Found | None:
    """Return what the first fit that has a finding shows, with all processes whose same fit shows it."""
    found = [one for fit in facts.fits if (one := look(fit)) is not None]
    if not found:
        return None
    first = min(found, key=lambda one: (one.segment, one.ranks))
    alike = [one for one in found if one.segment == first.segment]
    return Found(
        ranks=tuple(dict.fromkeys(rank for one in alike for rank in one.ranks)),
        steps=first.steps,
        names=tuple(dict.fromkeys(name for one in alike for name in one.names)),
        detail=first.detail,
        segment=first.segment,
    )


def in_fit(fit: FitFacts, steps: Iterable[int], names: Iterable[str] = (), detail: str = "") -> Found:
    """Return what one fit of one process shows, from the first to the last of these steps."""
    numbers = sorted(int(step) for step in steps)
    span = (numbers[0], numbers[-1]) if numbers else ()
    return Found(ranks=(fit.rank,), steps=span, names=tuple(names), detail=detail, segment=fit.segment)


def span(found: Found) -> str:
    """Return "step 3", "steps 3 to 17"."""
    first, last = found.steps
    return f"step {first}" if first == last else f"steps {first} to {last}"
