"""Where a run is written: to its folder, or next to the run that it replaces when it is complete."""

import os
import shutil
from pathlib import Path

from det_callbacks.errors import ReferenceFormatError, ReferenceNotFoundError, RunExistsError
from det_callbacks.runs.disk import ANOTHER_FOLDER, list_folder, make_folder
from det_callbacks.runs.files import LAYOUTS, MANIFEST, PROGRAMS, REPLACEMENT, SITES
from det_callbacks.runs.lock import FolderLock
from det_callbacks.runs.manifest import Purpose, read_manifest
from det_callbacks.runs.replacement import finish_replacing, our_files, remove
from det_callbacks.runs.store import Run

HOW_TO_OVERWRITE = "det-callbacks record: --overwrite, Hydra: determinism.overwrite=true"
HOW_TO_CONTINUE = "Lightning: ckpt_path, Hugging Face: resume_from_checkpoint, TrainingRun: resume_from"

_VERDICT_FILES = ("verdict.json", "report.html")


def make_room(path: Path, *, purpose: Purpose = "record", overwrite: bool = False) -> Path:
    """Make the folder of a new run, and return where to write it; RunExistsError if something is in the way.

    With ``overwrite``, that is next to the earlier run. A verification replaces an earlier one.
    """
    make_folder(path, instead=ANOTHER_FOLDER[purpose])
    finish_replacing(path)
    present = our_files(path)
    if not present:
        return path
    if _is_left_by_kill(path):
        remove(present)
        return path
    if purpose == "verify" and _is_of_verification(path):
        # the verdict first, so that it is not taken for the next one's; run.json last, which says whose the files are
        remove(sorted(present, key=lambda child: (child.name not in _VERDICT_FILES, child.name == MANIFEST)))
        return path
    if purpose == "record" and not overwrite and (reason := _incomplete_reason(path)) is not None:
        raise RunExistsError(
            f"{path} holds an incomplete run: {reason} Nothing was changed. Continue it from a checkpoint "
            f"({HOW_TO_CONTINUE}), replace it with overwrite=True ({HOW_TO_OVERWRITE}), or record to another folder.",
            str(path),
        )
    names = ", ".join(child.name for child in present[:4])
    if not (path / MANIFEST).exists() and not _is_of_verification(path):
        raise RunExistsError(
            f"{path} holds {names}, which a run would replace, but no {MANIFEST}, so they may be yours. Nothing was "
            f"changed. Move them away, or {ANOTHER_FOLDER[purpose]}.",
            str(path),
        )
    if purpose == "verify":
        raise RunExistsError(
            f"{path} already holds a run ({names}), and a verification replaces only another verification. Nothing was "
            f"changed. To verify, {ANOTHER_FOLDER[purpose]}.",
            str(path),
        )
    if not overwrite:
        raise RunExistsError(
            f"{path} already holds a run ({names}). Nothing was changed. Record to another folder, replace the run "
            f"with overwrite=True ({HOW_TO_OVERWRITE}), or verify against it (DeterminismCallback and "
            'TrainingRun: mode="verify", ObserverContext: reference=...).',
            str(path),
        )
    beside = path / REPLACEMENT
    remove([beside])  # left by a recording that did not take its place
    make_folder(beside)
    return beside


def remove_verification(path: Path) -> None:
    """Remove an earlier verification, so that none of its files is taken for one that fails to begin."""
    if os.path.lexists(path):
        with FolderLock(path).hold(instead=ANOTHER_FOLDER["verify"]):
            make_room(path, purpose="verify")


def remove_run(path: Path) -> None:
    """Remove a run without a step; other ranks may still hold its files open."""
    remove(our_files(path), ignore_errors=True)
    if path.name == REPLACEMENT:
        shutil.rmtree(path, ignore_errors=True)


def _is_left_by_kill(path: Path) -> bool:
    """Return whether the files are those of a process that was killed before it wrote run.json, so before a step."""
    return all(_holds_nothing(child) for child in our_files(path))


def _holds_nothing(child: Path) -> bool:
    if child.name in (PROGRAMS, SITES, LAYOUTS):
        return child.is_dir() and not list_folder(child)
    if child.name.startswith("rank-"):
        return child.is_dir() and all(file.name.lstrip(".").startswith("attempt-") for file in list_folder(child))
    return child.name.startswith(f".{MANIFEST}.")


def _incomplete_reason(path: Path) -> str | None:
    """Return why a run ended early; None for a complete run, and for files that are no run that can be read."""
    try:
        return Run.open(path, check_steps=False).incomplete_reason
    except (ReferenceFormatError, ReferenceNotFoundError):
        return None


def _is_of_verification(path: Path) -> bool:
    if (path / MANIFEST).is_file():
        return read_manifest(path).purpose == "verify"
    return (path / "verdict.json").is_file() and not (path / PROGRAMS).exists()  # refused at its start
