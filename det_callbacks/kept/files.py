"""Where kept tensors lie: one safetensors file a step, in the format of ``replay/files.py``.

    rank-00000/kept/attempt-000.segment-000/step-000000012.safetensors
    rank-00000/kept/attempt-000.segment-000/shortage.json               only where something was not kept

A tensor's entry says in its options at which site of the step's program it was kept, and the digest there.
"""

import json
from dataclasses import asdict
from pathlib import Path

from det_callbacks.kept.counts import Shortage
from det_callbacks.replay.files import step_path, stream_folder
from det_callbacks.runs.files import damaged, rank_folder, replace_atomically
from det_callbacks.runs.store import Run

KEPT = "kept"

_SHORTAGE = "shortage.json"


def kept_folder(stream: Path) -> Path:
    """Return the folder of the kept tensors whose steps are in a stream (``attempt-000.segment-001.arrows``)."""
    return stream_folder(stream, KEPT)


def kept_path(stream: Path, step: int) -> Path:
    """Return the file of the kept tensors of a step that is in a stream."""
    return step_path(stream, KEPT, step)


def write_shortage(stream: Path, shortage: Shortage) -> None:
    """Write what was not kept beside what was."""
    folder = kept_folder(stream)
    folder.mkdir(parents=True, exist_ok=True)
    replace_atomically(folder / _SHORTAGE, json.dumps(asdict(shortage), indent=1).encode())


def read_shortage(stream: Path) -> Shortage | None:
    """Return what was not kept; None where nothing is missing.

    Raises:
        ReferenceFormatError: the file that says so is damaged.
    """
    path = kept_folder(stream) / _SHORTAGE
    try:
        return Shortage.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from error


def shortages(run: Run, rank: int) -> list[tuple[Path, Shortage]]:
    """Return what a rank did not keep, by the stream of each fit and attempt.

    Raises:
        ReferenceFormatError: a file that says so is damaged.
    """
    streams = sorted((run.path / rank_folder(rank)).glob("attempt-*.arrows"))
    found = ((stream, read_shortage(stream)) for stream in streams if ".evidence" not in stream.suffixes)
    return [(stream, shortage) for stream, shortage in found if shortage is not None]
