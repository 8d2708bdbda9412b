"""Steps that only one of two runs has."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from det_callbacks.verdict import Divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSteps:
    """Steps of one fit of one rank that only one run has.

    Attributes:
        rank: process.
        segment: fit.
        kind: "missing" or "extra".
        first: step.
        last: likewise.
        count: of such steps.
    """

    rank: int
    segment: int
    kind: Literal["missing", "extra"]
    first: int
    last: int
    count: int = 1

    @property
    def order(self) -> tuple[int, int, int, int]:
        """What the first of several is found by: before the sites of its step."""
        return (self.segment, self.first, -1, self.rank)

    def and_more(self, more: "WholeSteps") -> "WholeSteps":
        """Return these and further ones, which come later."""
        return replace(
            self, first=min(self.first, more.first), last=max(self.last, more.last), count=self.count + more.count
        )

    def divergence(self) -> Divergence:
        """Return the first of them as a divergence."""
        return Divergence(
            rank=self.rank,
            step=self.first,
            phase="other",
            module="",
            op="",
            occurrence=0,
            output=0,
            name=None,
            kind=self.kind,
            source=(),
            shape=None,
            dtype=None,
            reference_digest=None,
            current_digest=None,
            is_origin=None,
        )


def explain_whole_steps(steps: Iterable[WholeSteps], *, show_rank: bool, num_equal: int | None = None) -> str:
    """Return which steps only one run has, in words.

    Args:
        steps: by fit and rank.
        show_rank: whether there are several.
        num_equal: how many steps both have and agree in, to begin a sentence with; None goes on with one.
    """
    texts = []
    for whole in sorted(steps, key=lambda one: one.order):
        fit = f" of fit {whole.segment}" if whole.segment else ""
        rank = f" of rank {whole.rank}" if show_rank else ""
        number = f"step {whole.first} is" if whole.count == 1 else f"steps {whole.first} to {whole.last}"
        number += f" ({whole.count} of them) are" if whole.count > 1 else ""
        side = "the reference" if whole.kind == "missing" else "the current run"
        texts.append(f"{number} only in {side}{fit}{rank}")
    text = "; ".join(texts[:4]) + (f" and so on ({len(texts)} such ranges)" if len(texts) > 4 else "")
    return text if num_equal is None else f"{text[0].upper()}{text[1:]}{steps_agree(num_equal)}"


def steps_agree(num_equal: int) -> str:
    """Return how many steps agree, as the end of a sentence; "" where there are none."""
    shared = "step that both have agrees" if num_equal == 1 else "steps that both have agree"
    return f"; the {num_equal} {shared}" if num_equal else ""
