"""Whether what the ranks keep beside a checkpoint belongs together: all go on from it, or none does."""

from collections.abc import Mapping, Sequence
from typing import Any

from det_callbacks.resume.state import ResumeState

_SHARED = ("step", "epoch", "is_epoch_over", "is_mid_batch", "accumulates", "reload_epoch")


def row_of(state: ResumeState | None, *, why: str | None = None) -> dict[str, Any]:
    """Return what a rank tells the others of the state that it read, as JSON holds it.

    Args:
        state: of this rank; None where it found none.
        why: it found none, although one was saved.
    """
    if state is None:
        return {"is_there": False, "why": why}
    return {
        "is_there": True,
        "world_size": state.world_size,
        "problems": list(state.problems),
        "buckets": None if state.reduction is None else state.reduction.stage,
        "common": dict(state.common),
        **{name: getattr(state, name) for name in _SHARED},
    }


def belong_together(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why a run of as many ranks cannot go on from what they read at all, as sentences; none where it can.

    Args:
        rows: what each rank told, by rank; of at least one rank a state is there.
    """
    num_ranks = len(rows)
    sizes = sorted({row["world_size"] for row in rows if row["is_there"]})
    if sizes and sizes != [num_ranks]:
        size = " or ".join(map(str, sizes))
        return [f"it was saved by {size} process{'es' * (sizes != [1])}, and there are {num_ranks} now"]
    absent = [rank for rank, row in enumerate(rows) if not row["is_there"]]
    if absent:
        reasons = [rows[rank]["why"] for rank in absent if rows[rank]["why"]]
        return reasons or [f"the state of rank {', '.join(map(str, absent))} of {num_ranks} was not saved beside it"]
    first = rows[0]
    apart = [
        f"{name} is {_by_rank(rows, name)}"
        for name in ("buckets", *_SHARED)
        if any(row[name] != first[name] for row in rows)
    ]
    if apart:
        return [f"the ranks did not save it at the same moment, by rank: {'; '.join(apart)}"]
    return []


def problems_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why the run would not be the same run, as sentences, with the ranks where not all have the reason."""
    found: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        for problem in row["problems"]:
            found.setdefault(problem, []).append(rank)
    texts = [
        problem if len(ranks) == len(rows) else f"rank {', '.join(map(str, ranks))}: {problem}"
        for problem, ranks in found.items()
    ]
    first = rows[0]["common"]
    names = dict.fromkeys(name for row in rows for name in {**first, **row["common"]})
    for name in names:
        others = [rank for rank, row in enumerate(rows) if row["common"].get(name) != first.get(name)]
        if others:
            ranks = ", ".join(map(str, others))
            texts.append(f"{name} was not the same on rank {ranks} as on rank 0, and Lightning saves that of rank 0")
    return texts


def _by_rank(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    return ", ".join(str(row[name]) for row in rows)
