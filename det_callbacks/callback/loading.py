"""Checkpoints on their way in: compared with the digests beside them before anything is restored."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from det_callbacks.checkpoint.check import (
    CheckpointReport,
    Found,
    check_checkpoint,
    compare_loaded,
    find_sidecar,
    load_plainly,
    unreadable,
)
from det_callbacks.checkpoint.difference import EntryDifference
from det_callbacks.checkpoint.files import digest_path, is_remote, resolved
from det_callbacks.checkpoint.parts import read_parts
from det_callbacks.checkpoint.sidecar import FileDigest, Sidecar
from det_callbacks.errors import CheckpointMismatchError
from det_callbacks.report import mismatch_text, missing_files_line, missing_sidecar_line, print_closing_line

Read = Callable[[int], Mapping[str, bytes]]
"""Returns the content of the files that rank 0, and the rank that is given, keep beside a checkpoint, by name."""

OnLoaded = Callable[[str, Sidecar | None, Read], None]


class Loader:
    """Loads a checkpoint and compares what it is, and what it holds, with its sidecar.

    The file is read once more than without it, and the digest of every tensor is taken.

    Attributes:
        on_loaded: called with the path, the sidecar and what reads the files kept beside the checkpoint, once all
            of the checkpoint agreed; with None and a reader of nothing where no digests stand beside it.
    """

    def __init__(self) -> None:
        self.on_loaded: OnLoaded | None = None
        self._is_checked = False

    def load(self, path: str, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Load a file, unless it is not what was saved.

        Args:
            path: of the checkpoint, as Lightning has it.
            load: loads it as it would be loaded without this.

        Raises:
            CheckpointMismatchError: it differs from what was saved.
            CheckpointFormatError: it, or its sidecar, cannot be read.
        """
        if self._is_checked:
            return load()
        if is_remote(path):
            return self._load_unchecked(path, load)
        place = resolved(path)
        if not place.exists():
            return load()  # which says so
        if place.is_dir():
            return self.load_elsewhere(path, load)
        content = digest_path(place)
        found = find_sidecar(place, content)
        if found is None:
            return self._load_unchecked(path, load)
        self._require_content(place, found, content)
        checkpoint = load()
        _require_equal(compare_loaded(place, found, content, checkpoint))
        self._hand_over(path, found)
        return checkpoint

    def load_elsewhere(self, path: str, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Load a checkpoint that a strategy reads by itself: files and folders are compared before.

        Raises:
            CheckpointMismatchError, CheckpointFormatError: as ``load`` does.
        """
        if is_remote(path):
            return self._load_unchecked(path, load)
        place = resolved(path)
        if not place.exists():
            return load()
        content = None if place.is_dir() else digest_path(place)
        found = find_sidecar(place, content)
        if found is None:
            return self._load_unchecked(path, load)
        if content is None:
            _require_equal(check_checkpoint(path), but_files=True)
        else:
            self._require_content(place, found, content)
        # its own reading may come through the IO in which we stand
        self._is_checked = True
        try:
            checkpoint = load()
        finally:
            self._is_checked = False
        self._hand_over(path, found)
        return checkpoint

    def _require_content(self, place: Path, found: Found, content: FileDigest) -> None:
        """Raise for a file whose bytes are not those that were saved: whatever it holds, it is not opened otherwise."""
        if found.fits:
            return
        try:
            checkpoint = load_plainly(place)
        except Exception as error:  # a damaged file makes torch's readers raise anything
            raise unreadable(place, content, found, error) from error
        _require_equal(compare_loaded(place, found, content, checkpoint if isinstance(checkpoint, dict) else {}))

    def _load_unchecked(self, path: str, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        checkpoint = load()
        print_closing_line(missing_sidecar_line(path))
        if self.on_loaded is not None:
            self.on_loaded(path, None, lambda rank: {})
        return checkpoint

    def _hand_over(self, path: str, found: Found) -> None:
        if self.on_loaded is not None:
            self.on_loaded(path, found.sidecar, lambda rank: self._read_beside(path, found, rank))

    def _read_beside(self, path: str, found: Found, rank: int) -> Mapping[str, bytes]:
        contents, missing, damaged = read_parts(found.path, found.sidecar, {0, rank})
        if damaged:
            names = tuple(f"resume: {name}" for name in damaged)
            raise CheckpointMismatchError(
                f"What is kept beside {path} is not what was saved: {', '.join(names)} differs. The checkpoint "
                "itself is. Restore the folder beside it from a copy, or use another checkpoint.",
                path,
                names,
            )
        if missing:
            print_closing_line(missing_files_line(path, missing))
        return contents


def _require_equal(report: CheckpointReport, *, but_files: bool = False) -> None:
    """Raise where something differs; ``but_files`` leaves what is kept beside the checkpoint to be looked at later."""
    entries: tuple[EntryDifference, ...] = report.entries
    is_equal = report.equal
    if but_files:
        entries = tuple(entry for entry in entries if entry.section != "resume")
        is_equal = report.has_same_bytes and not entries
    if not is_equal:
        raise CheckpointMismatchError(mismatch_text(report), report.path, tuple(entry.name for entry in entries))
