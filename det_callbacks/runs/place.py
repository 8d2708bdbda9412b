"""Where a run is written: to its folder, or next to the run that it replaces when it is complete."""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from det_callbacks.errors import ReferenceFormatError, ReferenceNotFoundError, RunExistsError
from det_callbacks.runs.disk import ANOTHER_FOLDER, make_folder, writing
from det_callbacks.runs.files import LAYOUTS, MANIFEST, PROGRAMS, SITES, SOURCES
from det_callbacks.runs.manifest import Purpose, read_manifest
from det_callbacks.runs.store import Run

# Folders in a run's folder with its replacement: until that is complete, while the earlier run is removed, while the
# replacement moves to its place. After a kill, the name says what is left to do.
REPLACEMENT, COMPLETE, MOVING = ".replacement", ".complete", ".moving"

HOW_TO_OVERWRITE = "det-callbacks record: --overwrite, Hydra: determinism.overwrite=true"
HOW_TO_CONTINUE = "Lightning: ckpt_path, Hugging Face: resume_from_checkpoint, TrainingRun: resume_from"

DISAGREEMENT = ".disagreement"  # folder with what a resumed recording found different, until the recording ends

_OUR_NAME = re.compile(
    rf"{MANIFEST}|{PROGRAMS}|{SITES}|{LAYOUTS}|{SOURCES}|verdict\.json|report\.html|rank-\d{{5}}"
    rf"|\.(run\.json|verdict\.json|report\.html)\.\d+\.tmp"
    rf"|\{REPLACEMENT}|\{COMPLETE}|\{MOVING}|\{DISAGREEMENT}"
)


def make_room(path: Path, *, purpose: Purpose = "record", overwrite: bool = False) -> Path:
    """Make the folder of a new run, and return where to write it; RunExistsError if something is in the way.

    With ``overwrite``, that is next to the earlier run. A verification replaces an earlier one.
    """
    make_folder(path, instead=ANOTHER_FOLDER[purpose])
    _finish_replacing(path)
    present = _ours(path)
    if not present:
        return path
    if _is_left_by_kill(path) or (purpose == "verify" and _is_of_verification(path)):
        _remove(present)
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
    shutil.rmtree(beside, ignore_errors=True)  # left by an incomplete recording
    make_folder(beside)
    return beside


def put_in_place(path: Path) -> None:
    """Replace the run in a folder with the complete one in it; after a kill in between, ``make_room`` finishes."""
    with writing(path):
        (path / REPLACEMENT).rename(path / COMPLETE)
    _finish_replacing(path)


def _finish_replacing(path: Path) -> None:
    complete, moving = path / COMPLETE, path / MOVING
    if complete.exists():
        _remove(child for child in _ours(path) if child != complete)
        with writing(path):
            complete.rename(moving)
    if moving.exists():
        with writing(path):
            for child in reversed(_ours(moving)):  # run.json last: without it there is no run
                child.rename(path / child.name)
            moving.rmdir()


def remove_run(path: Path) -> None:
    """Remove a run without a step; other ranks may still hold its files open."""
    _remove(_ours(path), ignore_errors=True)
    if path.name == REPLACEMENT:
        shutil.rmtree(path, ignore_errors=True)


def _ours(path: Path) -> list[Path]:
    """Return the files of a run, run.json first: without it there is no run."""
    ours = (child for child in path.iterdir() if _OUR_NAME.fullmatch(child.name))
    return sorted(ours, key=lambda child: (child.name != MANIFEST, child.name))


def _remove(children: Iterable[Path], *, ignore_errors: bool = False) -> None:
    for child in children:
        with writing(child):
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child, ignore_errors=ignore_errors)
            else:
                child.unlink(missing_ok=True)  # another rank may remove it at the same time


def _is_left_by_kill(path: Path) -> bool:
    """Return whether the files are those of a process that was killed before it wrote run.json, so before a step."""
    return all(_holds_nothing(child) for child in _ours(path))


def _holds_nothing(child: Path) -> bool:
    if child.name in (PROGRAMS, SITES, LAYOUTS):
        return child.is_dir() and not any(child.iterdir())
    if child.name.startswith("rank-"):
        return child.is_dir() and all(file.name.lstrip(".").startswith("attempt-") for file in child.iterdir())
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
