"""Distinguishes rounding from a real change, by the differences of tensors that both runs kept."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from det_callbacks.compare.module_names import ModuleNames, modules_of
from det_callbacks.compare.rounding import Place, Rounding, place_of
from det_callbacks.compare.step_numerics import compare_step, or_inf
from det_callbacks.errors import NothingComparedError, SelectionError
from det_callbacks.runs.program import StepView
from det_callbacks.runs.store import Run
from det_callbacks.tensors.files import KEPT, SavedStep
from det_callbacks.verdict import Numerics, SiteNumerics


def compare_numerics(
    reference: Run,
    current: Run,
    *,
    tolerance: Rounding | None = None,
    names: ModuleNames | None = None,
) -> Numerics:
    """Compare the tensors that two runs kept of the same steps.

    Raises:
        SelectionError: a run is a verification or kept nothing; the message says how to keep
            tensors. Or a pattern of ``names`` matches no module.
        NothingComparedError: the runs have no step and site in common of which both kept a tensor.
        ReferenceFormatError: a file of kept tensors is damaged.
    """
    for run in (reference, current):
        _require_tensors(run)
    sites, starts_before = list[SiteNumerics](), dict[Place, SiteNumerics]()
    not_compared, num_default = Counter[str](), 0
    modules: tuple[set[str], set[str]] = set(), set()
    for views, saved in _common_steps(reference, current):
        for of_run, view in zip(modules, views, strict=True):
            of_run |= modules_of(view)
        step = compare_step(views, saved, tolerance, names)
        sites += step.sites
        starts_before |= step.starts_before
        not_compared += step.not_compared
        num_default += step.num_default
    if names is not None:
        names.check(*modules)
    if not sites:
        reasons = "".join(f"; {num:,} sites: {reason}" for reason, num in not_compared.items())
        raise NothingComparedError(
            f"{reference.path} and {current.path} kept no tensor that both have, of a step that "
            f"both have{reasons}. Record both with the same only_steps and keep_tensors."
        )
    # keep equal samples, since other elements may differ; drop tensors that differ
    # only in the signs of zeros
    differing = [
        site
        for site in sites
        if site.kind != "equal"
        and (site.absolute != 0 or site.num_elements < prod(site.shape or ()))
    ]
    beyond = [site for site in sites if not site.within]
    starts = [site for site in beyond if site.is_start]
    jumps = _first_jumps(starts, starts_before)
    return Numerics(
        conclusion="change" if starts else "rounding" if differing else "none",
        tolerance=str(tolerance.path) if tolerance is not None else "torch.testing",
        first_jump=jumps[0] if jumps else None,
        worst=max(differing, key=lambda site: or_inf(site.excess), default=None),
        num_differing=len(differing),
        num_beyond=len(beyond),
        num_default=num_default,
        not_compared=dict(not_compared),
        jumps=jumps,
        sites=tuple(sites),
    )


def _require_tensors(run: Run) -> None:
    """Raise SelectionError unless a run kept the tensors of all its steps."""
    is_verification = run.keeps != "all"
    if is_verification or not run.manifest.keep_tensors:
        problem = (
            "is a verification, which keeps only steps that differ"
            if is_verification
            else "kept no tensors"
        )
        raise SelectionError(
            f"{run.path} {problem}, so it cannot be measured. Record that training with "
            "tensors, into another folder, with the same steps and ops as the other run: "
            "det-callbacks record RUN --only-steps 0 --keep '*' -- python train.py"
        )


def _first_jumps(
    starts: Sequence[SiteNumerics], starts_before: Mapping[Place, SiteNumerics]
) -> tuple[SiteNumerics, ...]:
    """Return the jumps of the first step that has one, the largest first; an op that only one run
    has comes directly before the first jump behind it.
    """
    jumps = [site for site in starts if site.reads is not None]
    first = min(((site.segment, site.step) for site in jumps), default=None)
    jumps = [site for site in jumps if (site.segment, site.step) == first]
    jumps.sort(key=lambda site: or_inf(site.growth), reverse=True)
    with_ops = (site for jump in jumps for site in (starts_before.get(place_of(jump)), jump))
    return tuple(dict.fromkeys(site for site in with_ops if site is not None))


def _common_steps(reference: Run, current: Run) -> Iterator[tuple[list[StepView], list[SavedStep]]]:
    """Yield the steps of which both runs kept tensors."""
    for rank in sorted({*reference.ranks} & {*current.ranks}):
        reference_rank, current_rank = reference.rank(rank), current.rank(rank)
        for segment in sorted({*reference_rank.segments} & {*current_rank.segments}):
            for step in np.intersect1d(
                reference_rank.steps(segment), current_rank.steps(segment)
            ).tolist():
                place: dict[str, Any] = {"rank": rank, "segment": segment, "step": step}
                kept = [SavedStep.of(run, **place, kind=KEPT) for run in (reference, current)]
                if all(saved.exists for saved in kept):
                    yield [run.view(**place) for run in (reference, current)], kept
