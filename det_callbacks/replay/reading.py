"""Reading the saved tensors of a step while a run is verified."""

from pathlib import Path
from typing import Any, Self

from torch import Tensor

from det_callbacks.errors import ReferenceFormatError
from det_callbacks.replay.files import StepFile, StepPlace, read_header, read_tensor, replay_path
from det_callbacks.replay.parts import SavedTensor, misfit
from det_callbacks.runs.store import Run


class SavedStep:
    """The saved tensors of one step of a reference, each to be taken once.

    Nothing is read before the first ``take``; a step that saved nothing has no file.

    Args:
        path: of the file.
        place: the step that it must belong to.
    """

    def __init__(self, path: Path, place: StepPlace) -> None:
        self.path = path
        self._place = place
        self._content: StepFile | None = None
        self._taken: set[str] = set()

    @classmethod
    def of(cls, run: Run, *, rank: int, segment: int, step: int) -> Self:
        """Return the saved tensors of a recorded step; those of the attempt that counts, where it was repeated."""
        path = replay_path(run.rank(rank).stream_of(segment, step), step)
        return cls(path, StepPlace(run_id=run.run_id, rank=rank, segment=segment, step=step))

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of what was saved, in that order."""
        content = self._open()
        return (*content.entries, *content.values)

    def take(self, key: str, *, like: Tensor) -> SavedTensor:
        """Return a saved tensor for ``put_back``.

        Args:
            key: it was saved under.
            like: the live tensor that it is for.

        Raises:
            ReferenceFormatError: it is not there, was taken already, has another dtype, shape or layout, or its bits
                are not those that were saved. The file and the key are named.
        """
        entry = self._find(key, "entries")
        saved = read_tensor(self.path, entry)
        problem = misfit(saved, like)
        if problem:
            raise self._error(f"{key!r} does not fit: {problem}")
        self._taken.add(key)
        return saved

    def take_value(self, key: str) -> Any:
        """Return a saved plain value; raise ReferenceFormatError when there is none of that key."""
        value = self._find(key, "values")
        self._taken.add(key)
        if not isinstance(value, dict):
            return value
        if "complex" in value:
            return complex(*map(float.fromhex, value["complex"]))
        return float.fromhex(value["float"])

    def untaken(self) -> tuple[str, ...]:
        """Return the keys that nobody took, to be reported at the step's end."""
        return tuple(key for key in self.keys if key not in self._taken)

    def _find(self, key: str, kind: str) -> Any:
        content = self._open()
        if key in self._taken:
            raise self._error(f"{key!r} was taken already")
        held = getattr(content, kind)
        if key in held:
            return held[key]
        if key in content.entries or key in content.values:
            raise self._error(f"{key!r} is {'a plain value' if kind == 'entries' else 'a tensor'} there")
        if not self.path.exists():
            raise self._error(f"there is no such file, and so no {key!r}")
        known = ", ".join(repr(name) for name in self.keys[:4]) or "nothing"
        raise self._error(f"it has no {key!r}; it has {known}{', ...' if len(self.keys) > 4 else ''}")

    def _open(self) -> StepFile:
        if self._content is None:
            self._content = read_header(self.path, self._place) if self.path.exists() else StepFile()
        return self._content

    def _error(self, what: str) -> ReferenceFormatError:
        return ReferenceFormatError(
            f"{self.path}: {what}. Without the saved bits of step {self._place.step} nothing after it could be "
            "compared, so this is an error and not a difference. Record the reference again with the same code.",
            str(self.path),
        )
