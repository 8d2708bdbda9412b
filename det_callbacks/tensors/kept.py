"""Reading what was kept of ops, without torch."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from det_callbacks.runs.store import Run
from det_callbacks.tensors.files import KEPT, SavedStep, SavedTensor
from det_callbacks.verdict import Divergence

LEFT_OUT = "left_out"
"""Value of a step's file: how many calls were not kept, and why the first was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCounts:
    """What a run kept of the tensors of ops, and what it was asked to keep and did not.

    Attributes:
        num_tensors: outputs of ops and what they read.
        num_steps: of which something was kept.
        num_bytes: on the disk.
        num_missing: calls of ops that were not kept.
        first_missing: the first step of which a call is not there; -1 where nothing is missing.
        reason: what was in the way the first time.
    """

    num_tensors: int = 0
    num_steps: int = 0
    num_bytes: int = 0
    num_missing: int = 0
    first_missing: int = -1
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

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; ``KeptCounts(**content)`` reads it."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptTensor:
    """One tensor that was kept.

    Attributes:
        label: "output 0", or the argument that the op read it as.
        name: parameter, buffer or optimizer state that it is; None otherwise.
        saved: its bits.
    """

    label: str
    name: str | None
    saved: SavedTensor


class KeptStep:
    """The kept tensors of one step of a run. The header is read here, a tensor when it is asked for.

    Args:
        saved: of the kind ``KEPT``.

    Attributes:
        num_missing: calls of ops that were to be kept and were not.
        reason: why the first of them was not.

    Raises:
        ReferenceFormatError: it is damaged, of another version, or of another step or run.
    """

    def __init__(self, saved: SavedStep) -> None:
        self._saved, entries = saved, saved.entries
        self.num_missing, self.reason = saved.values.get(LEFT_OUT, (0, ""))
        self._outputs = {key: entry for key, entry in entries.items() if "argument" not in entry}
        self._inputs = {key: entry for key, entry in entries.items() if "argument" in entry}

    def find(self, divergence: Divergence, digest: str) -> list[KeptTensor]:
        """Return what was kept of a site: the output, and what the op read; nothing where nothing was.

        Where the op takes lists and changes each of their tensors, what it read is what belongs to this output.

        Args:
            divergence: place of the site; its occurrence decides only where several sites there have this digest.
            digest: of the site, as the run holds it.

        Raises:
            ReferenceFormatError: what was kept is damaged.
        """
        place = {name: getattr(divergence, name) for name in ("phase", "module", "op", "output")}
        found = [
            (abs(entry["occurrence"] - divergence.occurrence), key)
            for key, entry in self._outputs.items()
            if entry["site_digest"] == digest and all(entry[name] == value for name, value in place.items())
        ]
        if not found:
            return []
        _, key = min(found)
        call = self._outputs[key]["call"]
        is_alone = sum(entry["call"] == call for entry in self._outputs.values()) == 1
        return [
            KeptTensor(label=f"output {divergence.output}", name=None, saved=self._saved.read(key)),
            *(
                KeptTensor(label=entry["argument"], name=entry["name"], saved=self._saved.read(key))
                for key, entry in self._inputs.items()
                if entry["call"] == call and (is_alone or _index_of(entry["argument"]) in (None, divergence.output))
            ),
        ]


def _index_of(argument: str) -> int | None:
    """Return which tensor of a list an argument is: 3 of "self[3]"; None where it is no list."""
    _, bracket, rest = argument.partition("[")
    return int(rest.rstrip("]")) if bracket else None


def not_kept(run: Run, rank: int) -> KeptCounts:
    """Return which calls a rank did not keep, in all steps that count; raise as ``KeptStep`` does."""
    counts, one = KeptCounts(), run.rank(rank)
    places = [(segment, int(step)) for segment in one.segments for step in one.steps(segment)]
    for segment, step in places:
        kept = KeptStep(SavedStep.of(run, rank=rank, segment=segment, step=step, kind=KEPT))
        if kept.num_missing:
            counts = counts.with_missing(step, kept.num_missing, kept.reason)
    return counts
