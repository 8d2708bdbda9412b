"""run.json: what was recorded, and in which environment."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from det_callbacks.digest.host import DIGEST_VERSION, digest_bytes, format_digest
from det_callbacks.errors import ReferenceFormatError, ReferenceNotFoundError
from det_callbacks.runs.disk import replace_atomically
from det_callbacks.runs.environment import EnvironmentEntry
from det_callbacks.runs.files import FORMAT_VERSION, MANIFEST, READ_ERRORS, damaged, read_json
from det_callbacks.runs.selection import Selection
from det_callbacks.verdict import as_json

Purpose = Literal["record", "verify"]
Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedFit:
    """A fit that continued from a checkpoint, and its first step after that."""

    segment: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch of the run's processes: its number of fits, and the least number of readings of each."""

    segments: Count = 1
    resumed_from: tuple[ResumedFit, ...] = ()
    readings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of run.json."""

    selection: Selection
    environment: dict[str, EnvironmentEntry]
    settings: Mapping[str, Any] = field(default_factory=dict)
    replay: tuple[str, ...] = ()
    keep_tensors: tuple[str, ...] = ()
    recorded_by: str = ""  # "ObserverContext", or "" for a training
    run_id: str
    purpose: Purpose = "record"
    world_size: Count = 1
    attempts: Annotated[tuple[Attempt, ...], msgspec.Meta(min_length=1)] = (Attempt(),)
    format_version: int = FORMAT_VERSION
    digest_version: int = DIGEST_VERSION
    det_callbacks_version: str = field(default_factory=lambda: version("det_callbacks"))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write run.json with a digest of its content."""
    content = as_json(manifest)
    content["digest"] = _digest(content)
    replace_atomically(folder / MANIFEST, json.dumps(content, indent=1).encode() + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Return the content of run.json; an error if it is missing, damaged or has a different version."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        runs = folder.glob(f"*/{MANIFEST}") if os.path.isdir(folder) else ()
        inside = sorted(child.parent.name for child in runs)[:10]
        hint = f"but these folders in it are runs: {', '.join(inside)}" if inside else "record one there first"
        raise ReferenceNotFoundError(f"There is no run in {folder}: it has no {MANIFEST}; {hint}.", str(folder))
    content = read_json(path, dict[str, Any])
    try:
        return _manifest_of(content, path)
    except ReferenceFormatError:
        raise
    except READ_ERRORS as error:
        raise damaged(path, error) from error


def _manifest_of(content: dict[str, Any], path: Path) -> Manifest:
    for name, known in (("format_version", FORMAT_VERSION), ("digest_version", DIGEST_VERSION)):
        if content.get(name) != known:
            raise ReferenceFormatError(
                f"{path} has {name} {content.get(name)!r}, but this version of det_callbacks reads {known}. Use the "
                "version that recorded the run, or record it again.",
                str(path),
            )
    if content.pop("digest", None) != _digest(content):
        raise ValueError("its content does not match its digest")
    manifest = msgspec.convert(content, Manifest)
    if as_json(manifest) != content:
        raise ValueError("it has entries that this version of det_callbacks does not know")
    return manifest


def _digest(content: Mapping[str, Any]) -> str:
    return format_digest(digest_bytes(json.dumps(content, sort_keys=True).encode()))
