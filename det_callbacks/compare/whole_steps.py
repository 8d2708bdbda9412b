"""What differs between two runs and is no site of a step: steps that only one has, and batches not trained on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from det_callbacks.verdict import Cause, Divergence, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSteps:
    """Steps of one fit of one rank that only one run has; or batches (kind "content") that are not trained on.

    Attributes:
        rank: process.
        segment: of the run.
        kind: "missing", "extra" or "content".
        first: step; of a batch of a fit, the training step that follows it.
        last: likewise.
        count: of such steps, or batches.
        name: of the first batch that differs: "validation batch 3: batch[0]"; None of steps.
        stage: of that batch: "validation"; "" of steps.
        is_alone: the batch is of a segment that is no fit: a ``trainer.test``, say.
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
    stage: str = ""
    is_alone: bool = False
    cause: Cause = "structure"
    digests: tuple[str | None, str | None] = (None, None)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "WholeSteps":
        """Return what ``asdict`` gave, also after it went through JSON; KeyError or TypeError where it is not that."""
        reference, current = content["digests"]
        return cls(**{**content, "digests": (reference, current)})

    def order(self) -> tuple[int, int, bool, int]:
        """Return what the first of several is found by: steps come before the batches ahead of them."""
        return (self.segment, self.first, self.kind == "content", self.rank)

    def where(self) -> str:
        """Return where the first one is, in words: "in the validation ahead of step 6 of fit 1"."""
        fit = f" of fit {self.segment}" if self.segment else ""
        if self.is_alone:
            return f"in the {self.stage}" + (f" (segment {self.segment} of the run)" if self.segment else "")
        return (
            f"in the {self.stage}{fit}"
            if self.stage == "sanity check"
            else (f"in the {self.stage} ahead of step {self.first}{fit}")
        )

    def how(self) -> str:
        """Return how a batch differs."""
        if None not in self.digests:
            return "differs"
        return f"is only in the {'reference' if self.digests[1] is None else 'current run'}"

    def _kind(self) -> Kind:
        if self.kind != "content" or None not in self.digests:
            return self.kind
        return "missing" if self.digests[1] is None else "extra"

    def and_more(self, more: "WholeSteps") -> "WholeSteps":
        """Return these and further ones, which come later."""
        return replace(
            self, first=min(self.first, more.first), last=max(self.last, more.last), count=self.count + more.count
        )

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
    """Return which steps only one run has, and which batches differ, in words.

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
            batches = "batch" if whole.count == 2 else "batches"
            more = f", and {whole.count - 1} more {batches}" if whole.count > 1 else ""
            texts.append(f"{whole.name} {whole.how()} {whole.where()}{rank}{more}")
            continue
        number = f"step {whole.first} is" if whole.count == 1 else f"steps {whole.first} to {whole.last}"
        number += f" ({whole.count} of them) are" if whole.count > 1 else ""
        side = "the reference" if whole.kind == "missing" else "the current run"
        texts.append(f"{number} only in {side}{fit}{rank}")
    text = "; ".join(texts[:4]) + (f" and so on ({len(texts)} such ranges)" if len(texts) > 4 else "")
    if num_equal is None:
        return text
    shared = "step that both have agrees" if num_equal == 1 else "steps that both have agree"
    compared = f"; the {num_equal} {shared}" if num_equal else ""
    return text[0].upper() + text[1:] + compared
