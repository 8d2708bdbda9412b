"""The run that a resumed recording goes on with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_callbacks.errors import RankError, SelectionError
from det_callbacks.runs.peers import Peers
from det_callbacks.runs.store import Run


def is_there(path: Path, peers: Peers) -> bool:
    """Return whether there is a run to go on with: on every rank, or on none.

    Raises:
        RankError: on some only.
    """
    found = peers.agree((path / "run.json").exists, task=f"looking for {path}")
    if len(set(found)) > 1:
        raise RankError(
            f"{path} holds a run on rank {found.index(True)} and none on rank {found.index(False)}. Nothing "
            "was changed. Give each node the folder that it recorded before, or record to another one.",
            found.index(False),
        )
    return bool(found[0])


def open_earlier(path: Path, manifest: Mapping[str, Any], *, rank: int) -> Run:
    """Open the run, as far as it is of this process.

    Args:
        path: its folder.
        manifest: of the attempt that goes on with it.
        rank: of this process.

    Raises:
        SelectionError: it was recorded with other patterns to replay or to keep.
        ReferenceFormatError: it is damaged.
    """
    earlier = Run.open(path, ranks=(rank,))
    for name in ("replay", "keep_tensors"):
        recorded, asked = list(getattr(earlier.manifest, name)), list(manifest.get(name, ()))
        if set(recorded) != set(asked):
            raise SelectionError(
                f"{path} was recorded with {name}={recorded}, and this attempt asks for {asked}. "
                "Nothing was changed. Resume with the same patterns, or record to another folder."
            )
    return earlier
