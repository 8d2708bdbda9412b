"""Reading what was kept of ops, without torch."""

from dataclasses import dataclass, replace

from det_callbacks.runs.store import Run
from det_callbacks.tensors.files import KEPT, SavedStep, SavedTensor
from det_callbacks.verdict import Divergence

LEFT_OUT = "left_out"
"""Value of a step's file: how many calls were not kept, and why the first was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCounts:
    """What a run kept of the tensors of ops, and how many calls of ops it was asked to keep and did not."""

    num_tensors: int = 0
    num_steps: int = 0
    num_bytes: int = 0
    num_missing: int = 0
    first_missing: int = -1
    """The first step of which a call is not there, and what was in the way; -1 where nothing is missing."""
    reason: str = ""

    def with_missing(self, step: int, num_calls: int, reason: str) -> "KeptCounts":
        """Return the counts with calls of a step that were not kept."""
        first = self if self.num_missing else replace(self, first_missing=step, reason=reason)
        return replace(first, num_missing=self.num_missing + num_calls)

    def with_rank(self, other: "KeptCounts") -> "KeptCounts":
        """Return the counts of two processes together; the steps are those of the one with more of them."""
        both = replace(
            self,
            num_tensors=self.num_tensors + other.num_tensors,
            num_steps=max(self.num_steps, other.num_steps),
            num_bytes=self.num_bytes + other.num_bytes,
        )
        return both.with_missing(other.first_missing, other.num_missing, other.reason) if other.num_missing else both


def left_out(kept: SavedStep) -> tuple[int, str]:
    """Return how many calls of a step were not kept, and why the first was not."""
    num_calls, reason = kept.values.get(LEFT_OUT, (0, ""))
    return num_calls, reason


def find_kept(kept: SavedStep, divergence: Divergence, digest: str) -> SavedTensor | None:
    """Return what a step kept of a site with this digest; of several at a place that have it, the tensors are equal."""
    place = {name: getattr(divergence, name) for name in ("phase", "module", "op", "output")}
    place["site_digest"] = digest
    keys = (key for key, entry in kept.entries.items() if place.items() <= entry.items())
    return next(map(kept.read, keys), None)


def not_kept(run: Run, rank: int) -> KeptCounts:
    """Return which calls a rank did not keep, in all steps that count."""
    counts, one = KeptCounts(), run.rank(rank)
    for segment in one.segments:
        for step in map(int, one.steps(segment)):
            num_calls, reason = left_out(SavedStep.of(run, rank=rank, segment=segment, step=step, kind=KEPT))
            if num_calls:
                counts = counts.with_missing(step, num_calls, reason)
    return counts
