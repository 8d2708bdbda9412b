"""Reading what was kept of ops, without torch."""

from dataclasses import dataclass

from det_callbacks.runs.store import Run
from det_callbacks.tensors.counts import KeptCounts
from det_callbacks.tensors.files import KEPT, SavedStep, SavedTensor
from det_callbacks.verdict import Divergence

LEFT_OUT = "left_out"
"""Value of a step's file: how many calls were not kept, and why the first was not."""


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
