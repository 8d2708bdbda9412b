"""Joining the folders of the nodes that wrote one run without a shared file system."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from det_callbacks.errors import ReferenceFormatError, RunExistsError
from det_callbacks.trace.run_files import (
    LAYOUTS,
    PROGRAMS,
    layout_path,
    program_path,
    rank_folder,
    read_layout,
    read_program,
    write_manifest,
)
from det_callbacks.trace.store import Run

_VERDICT = "verdict.json"
_SAME = (
    "run_id",
    "world_size",
    "selection",
    "purpose",
    "keeps",
    "replay",
    "keep_tensors",
    "eval_batches",
    "settings",
    "attempts",
)


def gather_runs(folders: Sequence[str | Path], to: str | Path) -> Run:
    """Join the folders of all nodes into one run, and return it; the folders stay as they are.

    Every step, program and layout is read once and checked. The run appears whole or not at all: it is built beside
    its place, on the same disk, which needs as much room as the folders take.

    Args:
        folders: of the nodes, in any order.
        to: the new folder.

    Raises:
        ReferenceNotFoundError: one of them is no run.
        ReferenceFormatError: one is damaged; or they do not belong together: another run, world size or selection, two
            with the same rank, or a rank that none has.
        RunExistsError: there is something at ``to``.
    """
    to = Path(to)
    if to.exists() or to.is_symlink():
        raise RunExistsError(
            f"{to} is there already. Nothing was changed. Name a folder that does not exist yet.", str(to)
        )
    runs = [Run.open(folder) for folder in folders]
    _require_together(runs)
    to.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{to.name}.", suffix=".tmp", dir=to.parent))
    try:
        building.chmod(0o777 & ~_umask())
        _copy(runs, building)
        Run.open(building)
        try:
            os.rename(building, to)  # onto a folder that came in between it fails, unless that is empty
        except OSError as error:
            raise RunExistsError(
                f"{to} came to be while it was written. Nothing was changed there.", str(to)
            ) from error
    except BaseException:  # Ctrl-C too: half a folder is taken away, and it is raised again
        shutil.rmtree(building, ignore_errors=True)
        raise
    return Run.open(to)


def _require_together(runs: Sequence[Run]) -> None:
    if not runs:
        raise ReferenceFormatError("No folder was named, so there is nothing to join.", "")
    first = runs[0]
    for run in runs[1:]:
        for name in _SAME:
            ours, theirs = (one.manifest.get(name) for one in (first, run))
            if ours != theirs:
                raise ReferenceFormatError(
                    f"{first.path} and {run.path} do not belong together: {name} is {json.dumps(ours)} in one and "
                    f"{json.dumps(theirs)} in the other. Nothing was written. Name the folders of one run.",
                    str(run.path),
                )
    owners: dict[int, Run] = {}
    for run in runs:
        for rank in run.ranks:
            if rank in owners:
                raise ReferenceFormatError(
                    f"{owners[rank].path} and {run.path} both hold rank {rank}. Nothing was written. Name the folder "
                    "of each node once.",
                    str(run.path),
                )
            owners[rank] = run
    missing = [rank for rank in range(first.world_size) if rank not in owners]
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ReferenceFormatError(
            f"No folder holds rank {shown} of {first.world_size}. Nothing was written; the {len(owners)} other ranks "
            "are there. Name the folders of the other nodes, too.",
            str(first.path),
        )


def _copy(runs: Sequence[Run], target: Path) -> None:
    for folder in (PROGRAMS, LAYOUTS):
        (target / folder).mkdir()
    for run in runs:
        for rank in run.ranks:
            shutil.copytree(run.path / rank_folder(rank), target / rank_folder(rank))
            for record in run.rank(rank).iterate():
                for path_of, read, identity in (
                    (program_path, read_program, record.program_id),
                    (layout_path, read_layout, record.layout_id),
                ):
                    copied = path_of(target, identity)
                    if not copied.exists():
                        read(run.path, identity)
                        shutil.copyfile(path_of(run.path, identity), copied)
        if (run.path / _VERDICT).is_file() and not (target / _VERDICT).exists():
            shutil.copyfile(run.path / _VERDICT, target / _VERDICT)
    leader = next(run for run in runs if 0 in run.ranks)
    manifest = {key: value for key, value in leader.manifest.items() if key not in ("digest", "ranks")}
    write_manifest(target, manifest)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
