"""Finds the first op that made a NaN or an infinity from finite numbers, by the statistics of kept tensors.

An infinity may be intended: an attention mask contains infinities, and its softmax does not. So an infinity counts
only if it leads to a NaN, or to a tensor that nothing reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from det_callbacks.compare.numerics import kept_sites
from det_callbacks.runs.program import Site, StepView
from det_callbacks.runs.store import Run
from det_callbacks.tensors.files import KEPT, SavedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """An op that reads only finite numbers and writes NaNs or infinities, as far as tensors were kept.

    Attributes:
        num_unknown: number of tensors that the op reads and that were not kept.
        first_nan: the op that turned its infinities into the first NaN, if it is a different op.
    """

    rank: int
    segment: int
    step: int
    site: Site
    num_nan: int
    num_inf: int
    num_elements: int
    num_unknown: int
    first_nan: Site | None


def first_nonfinite(run: Run) -> NonFinite | None:
    """Return the first such op of the earliest step that has one, or None if no kept step has one."""
    return next(_found(run), None) if run.manifest.keep_tensors else None


def _found(run: Run) -> Iterator[NonFinite]:
    places = {
        (segment, int(step), rank)
        for rank in run.ranks
        for segment in run.rank(rank).segments
        for step in run.rank(rank).steps(segment)
    }
    for segment, step, rank in sorted(places):
        place: dict[str, Any] = {"rank": rank, "segment": segment, "step": step}
        saved = SavedStep.of(run, **place, kind=KEPT)
        if any(_number(entry, "nan", "inf") for entry in saved.entries.values()):
            yield from _in_step(run.view(**place), saved)


def _number(entry: Any, *kinds: str) -> int:
    return sum(int(entry.get("statistics", {}).get(kind, 0)) for kind in kinds)


def _in_step(view: StepView, saved: SavedStep) -> Iterator[NonFinite]:
    sites = view.program.sites
    known = {position: saved.entries[key] for position, key in kept_sites(view, saved).items()}
    # a tensor that was not kept inherits from its inputs
    bad, has_nan = list[bool](), list[bool]()
    for position, site in enumerate(sites):
        entry = known.get(position)
        of_read = [any(flags[read] for read in site.inputs) for flags in (bad, has_nan)]
        bad.append(of_read[0] if entry is None else _number(entry, "nan", "inf") > 0)
        has_nan.append(of_read[1] if entry is None else _number(entry, "nan") > 0)
    readers: dict[int, list[int]] = {}
    for position, site in enumerate(sites):
        for read in site.inputs:
            readers.setdefault(read, []).append(position)
    # whether it leads to a NaN, or to a tensor that nothing reads; and the first such NaN
    lasts, next_nan = [False] * len(sites), [len(sites)] * len(sites)
    for position in reversed(range(len(sites))):
        if not bad[position]:
            continue
        later = [reader for reader in readers.get(position, []) if bad[reader]]
        lasts[position] = has_nan[position] or not readers.get(position) or any(lasts[reader] for reader in later)
        next_nan[position] = position if has_nan[position] else min((next_nan[it] for it in later), default=len(sites))
    for position, entry in known.items():
        site, nan = sites[position], next_nan[position]
        if not (bad[position] and lasts[position]) or any(bad[read] for read in site.inputs):
            continue
        yield NonFinite(
            rank=view.rank,
            segment=view.record.segment,
            step=view.record.step,
            site=site,
            num_nan=_number(entry, "nan"),
            num_inf=_number(entry, "inf"),
            num_elements=prod(entry["shape"]),
            num_unknown=sum(read not in known for read in site.inputs),
            first_nan=sites[nan] if position < nan < len(sites) else None,
        )
