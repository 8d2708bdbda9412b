"""Reading what was kept of ops, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from det_callbacks.runs.store import Run
from det_callbacks.tensors.counts import KeptCounts
from det_callbacks.tensors.files import KEPT, SavedTensor, StepPlace, TensorFile, tensor_path
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptCall:
    """One output of an op, and what the op read.

    Attributes:
        output: the one.
        inputs: argument -> what was read; where the op takes lists and changes each of their tensors, those that
            belong to this output.
    """

    output: KeptTensor
    inputs: Mapping[str, KeptTensor]


class KeptStep:
    """The kept tensors of one step of a run. The header is read here, a tensor when it is asked for.

    Args:
        path: of the file, which is there.
        place: the step that it must belong to.

    Attributes:
        num_missing: calls of ops that were to be kept and were not.
        reason: why the first of them was not.

    Raises:
        ReferenceFormatError: it is damaged, of another version, or of another step or run.
    """

    def __init__(self, path: Path, place: StepPlace) -> None:
        self._file = TensorFile(path, place)
        self.num_missing, self.reason = self._file.values.get(LEFT_OUT, (0, ""))
        entries = self._file.entries
        self._outputs = {key: entry for key, entry in entries.items() if "argument" not in entry}
        self._inputs = {key: entry for key, entry in entries.items() if "argument" in entry}

    def find(self, divergence: Divergence, digest: str) -> KeptCall | None:
        """Return what was kept of a site; None where nothing was.

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
            return None
        _, key = min(found)
        call = self._outputs[key]["call"]
        is_alone = sum(entry["call"] == call for entry in self._outputs.values()) == 1
        return KeptCall(
            output=KeptTensor(label=f"output {divergence.output}", name=None, saved=self._file.read(key)),
            inputs={
                entry["argument"]: KeptTensor(label=entry["argument"], name=entry["name"], saved=self._file.read(key))
                for key, entry in self._inputs.items()
                if entry["call"] == call and (is_alone or _index_of(entry["argument"]) in (None, divergence.output))
            },
        )


def _index_of(argument: str) -> int | None:
    """Return which tensor of a list an argument is: 3 of "self[3]"; None where it is no list."""
    _, bracket, rest = argument.partition("[")
    return int(rest.rstrip("]")) if bracket else None


def not_kept(run: Run, rank: int) -> KeptCounts:
    """Return which calls a rank did not keep, in all steps that count; raise as ``KeptStep`` does."""
    counts, one = KeptCounts(), run.rank(rank)
    places = [(segment, int(step)) for segment in one.segments for step in one.steps(segment)]
    for segment, step in places:
        path = tensor_path(one.stream_of(segment, step), KEPT, step)
        if path.exists():
            kept = KeptStep(path, StepPlace(run_id=run.run_id, rank=rank, segment=segment, step=step))
            if kept.num_missing:
                counts = counts.with_missing(step, kept.num_missing, kept.reason)
    return counts
