"""Reading what was kept of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from det_callbacks.errors import ReferenceFormatError
from det_callbacks.replay.files import StepPlace, read_header, read_tensor
from det_callbacks.replay.parts import SavedTensor
from det_callbacks.runs.files import damaged
from det_callbacks.verdict import Divergence


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

    Raises:
        ReferenceFormatError: it is damaged, of another version, or of another step or run.
    """

    def __init__(self, path: Path, place: StepPlace) -> None:
        self.path = path
        self._entries = read_header(path, place).entries
        try:
            self._outputs = [entry for entry in self._entries.values() if entry["options"]["kept"] == "output"]
            self._inputs = [entry for entry in self._entries.values() if entry["options"]["kept"] == "input"]
        except (KeyError, TypeError) as error:
            raise damaged(path, f"it does not say what its tensors are ({error!r})") from error

    def find(self, divergence: Divergence, digest: str) -> KeptCall | None:
        """Return what was kept of a site; None where nothing was.

        Args:
            divergence: place of the site; its occurrence decides only where several sites there have this digest.
            digest: of the site, as the run holds it.

        Raises:
            ReferenceFormatError: what was kept is damaged.
        """
        try:
            found = [entry["options"] | {"entry": entry} for entry in self._outputs if _is_at(entry, divergence)]
            found = [one for one in found if one["site_digest"] == digest]
            if not found:
                return None
            one = min(found, key=lambda one: abs(int(one["occurrence"]) - divergence.occurrence))
            first = int(one["site"]) - int(one["output"])
            output = self._read(one["entry"], f"output {divergence.output}")
            inputs = [entry for entry in self._inputs if entry["options"]["site"] == first]
            num_outputs = sum(
                int(entry["options"]["site"]) - int(entry["options"]["output"]) == first for entry in self._outputs
            )
            wanted = [
                entry
                for entry in inputs
                if num_outputs == 1 or _index_of(entry["options"]["argument"]) in (None, divergence.output)
            ]
            return KeptCall(
                output=output,
                inputs={
                    entry["options"]["argument"]: self._read(entry, entry["options"]["argument"]) for entry in wanted
                },
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ReferenceFormatError):  # also a ValueError
                raise
            raise damaged(self.path, f"it does not say what its tensors are ({error!r})") from error

    def _read(self, entry: Mapping[str, Any], label: str) -> KeptTensor:
        return KeptTensor(label=label, name=entry["options"].get("name"), saved=read_tensor(self.path, entry))


def _is_at(entry: Mapping[str, Any], divergence: Divergence) -> bool:
    options = entry["options"]
    return all(options[name] == getattr(divergence, name) for name in ("phase", "module", "op", "output"))


def _index_of(argument: str) -> int | None:
    """Return which tensor of a list an argument is: 3 of "self[3]"; None where it is no list."""
    _, bracket, rest = argument.partition("[")
    return int(rest.rstrip("]")) if bracket else None
