"""What differs between two runs and is no site of a step: steps that only one has, and batches of validations."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from det_callbacks.verdict import Cause, Divergence, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSteps:
    """Steps of one fit of one rank that only one run has, or (kind "content") whose validations had other batches.

    Attributes:
        rank: process.
        segment: fit.
        kind: "missing", "extra" or "content".
        first: step; of a validation, the training step that follows it.
        last: likewise.
        count: of such steps.
        name: of the first batch that differs: "validation batch 3: batch[0]"; None of steps.
        cause: what it means for the verdict.
        digests: of that batch in the reference and now.
    """

    rank: int
    segment: int
    kind: Literal["missing", "extra", "content"]
    first: int
    last: int
    count: int = 1
    name: str | None = None
    cause: Cause = "structure"
    digests: tuple[str | None, str | None] = (None, None)

    def order(self) -> tuple[int, int, bool, int]:
        """Return what the first of several is found by: steps come before the validations ahead of them."""
        return (self.segment, self.first, self.kind == "content", self.rank)

    def how(self) -> str:
        """Return how a batch of a validation differs."""
        if None not in self.digests:
            return "differs"
        return f"is only in the {'reference' if self.digests[1] is None else 'current run'}"

    def _kind(self) -> Kind:
        if self.kind != "content" or None not in self.digests:
            return self.kind
        return "missing" if self.digests[1] is None else "extra"

    def with_step(self, step: int) -> "WholeSteps":
        """Return these steps and another one."""
        return replace(self, first=min(self.first, step), last=max(self.last, step), count=self.count + 1)

    def divergence(self) -> Divergence:
        """Return the first of them as a divergence."""
        is_batch = self.kind == "content"
        return Divergence(
            rank=self.rank,
            step=self.first,
            phase="data" if is_batch else "other",
            module="",
            op="",
            occurrence=0,
            output=0,
            name=self.name,
            kind=self._kind(),
            source=(),
            shape=None,
            dtype=None,
            reference_digest=self.digests[0],
            current_digest=self.digests[1],
            is_origin=False if is_batch else None,
        )


def explain_whole_steps(steps: Iterable[WholeSteps], *, show_rank: bool, num_equal: int | None = None) -> str:
    """Return which steps only one run has, and which validations differ, in words.

    Args:
        steps: by fit and rank.
        show_rank: whether there are several.
        num_equal: how many steps both have and agree in, to begin a sentence with; None goes on with one.
    """
    texts = []
    for whole in sorted(steps, key=WholeSteps.order):
        fit = f" of fit {whole.segment}" if whole.segment else ""
        rank = f" of rank {whole.rank}" if show_rank else ""
        if whole.kind == "content":
            more = f", and {whole.count - 1} more" if whole.count > 1 else ""
            texts.append(f"{whole.name} {whole.how()} in the validation ahead of step {whole.first}{fit}{rank}{more}")
            continue
        number = f"step {whole.first} is" if whole.count == 1 else f"steps {whole.first} to {whole.last}"
        number += f" ({whole.count} of them) are" if whole.count > 1 else ""
        side = "the reference" if whole.kind == "missing" else "the current run"
        texts.append(f"{number} only in {side}{fit}{rank}")
    text = "; ".join(texts[:4]) + (f" and so on ({len(texts)} such ranges)" if len(texts) > 4 else "")
    if num_equal is None:
        return text
    compared = f"; the {num_equal} steps that both have agree" if num_equal else ""
    return text[0].upper() + text[1:] + compared
