"""The first op that made a NaN or an infinity from finite numbers,
by the statistics of kept tensors.

An infinity may be intended: an attention mask contains infinities, and its softmax does not. So an
infinity counts only if it leads to a NaN, or to a tensor that nothing reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from det_callbacks.compare.step_numerics import kept_sites
from det_callbacks.runs.program import Site, StepView
from det_callbacks.runs.store import Run
from det_callbacks.tensors.files import KEPT, SavedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """An op that reads only finite numbers and writes NaNs or infinities,
    as far as tensors were kept.

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
    """Return the first such op of the earliest step that has one,
    or None if no kept step has one.
    """
    return next(_nonfinite_ops(run), None) if run.manifest.keep_tensors else None


def _nonfinite_ops(run: Run) -> Iterator[NonFinite]:
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
    kept = {position: saved.entries[key] for position, key in kept_sites(view, saved).items()}
    is_nonfinite = _with_inputs(sites, kept, "nan", "inf")
    next_nan = _next_nans(sites, is_nonfinite, _with_inputs(sites, kept, "nan"))
    for position, entry in kept.items():
        site, nan = sites[position], next_nan[position]
        has_bad_inputs = any(is_nonfinite[read] for read in site.inputs)
        if not is_nonfinite[position] or nan is None or has_bad_inputs:
            continue
        yield NonFinite(
            rank=view.rank,
            segment=view.record.segment,
            step=view.record.step,
            site=site,
            num_nan=_number(entry, "nan"),
            num_inf=_number(entry, "inf"),
            num_elements=prod(entry["shape"]),
            num_unknown=sum(read not in kept for read in site.inputs),
            first_nan=sites[nan] if position < nan < len(sites) else None,
        )


def _with_inputs(sites: Sequence[Site], kept: Mapping[int, Any], *kinds: str) -> list[bool]:
    """Return, by position, whether a tensor has such elements; one that was not kept has those of
    its inputs.
    """
    has_some = list[bool]()
    for position, site in enumerate(sites):
        entry = kept.get(position)
        of_inputs = any(has_some[read] for read in site.inputs)
        has_some.append(of_inputs if entry is None else _number(entry, *kinds) > 0)
    return has_some


def _next_nans(
    sites: Sequence[Site], is_nonfinite: Sequence[bool], has_nan: Sequence[bool]
) -> list[int | None]:
    """Return the position of the first NaN to which each site leads; the number of sites if it
    only leads to a tensor that nothing reads, and None if it leads to neither.
    """
    readers: dict[int, list[int]] = {}
    for position, site in enumerate(sites):
        for read in site.inputs:
            readers.setdefault(read, []).append(position)
    next_nan: list[int | None] = [None] * len(sites)
    for position in reversed(range(len(sites))):
        if has_nan[position]:
            next_nan[position] = position
        elif is_nonfinite[position]:
            later = [next_nan[reader] for reader in readers.get(position, [])]
            unread = [] if later else [len(sites)]
            next_nan[position] = min(
                [nan for nan in later if nan is not None] + unread, default=None
            )
    return next_nan
