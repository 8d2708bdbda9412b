"""The findings in order: data, generators, parameters, computation, state."""

import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path

from det_callbacks.errors import SelectionError
from det_callbacks.findings.computation import (
    broadcast_loss,
    constant_loss,
    constant_output,
    softmax_twice,
    uninitialised_read,
    unused_precision,
)
from det_callbacks.findings.data import (
    equal_workers,
    recomputation_differs,
    repeated_batch,
    repeated_order,
    reseeded,
)
from det_callbacks.findings.fit_summary import fits_of
from det_callbacks.findings.gradients import (
    clipped_before_unscale,
    frozen_parameter,
    no_gradient,
    not_in_optimizer,
    nothing_updated,
    uncleared_gradient,
)
from det_callbacks.findings.rule import Fits, Found, Rule
from det_callbacks.findings.state import (
    equal_ranks,
    moving_statistics,
    stale_copy,
    stale_state,
    unequal_replicas,
)
from det_callbacks.runs.store import Run
from det_callbacks.text import ranks_text
from det_callbacks.verdict import Finding

RULES: tuple[Rule, ...] = (
    repeated_order,
    repeated_batch,
    equal_workers,
    equal_ranks,
    unequal_replicas,
    reseeded,
    nothing_updated,
    not_in_optimizer,
    no_gradient,
    uncleared_gradient,
    clipped_before_unscale,
    frozen_parameter,
    softmax_twice,
    broadcast_loss,
    unused_precision,
    constant_loss,
    constant_output,
    recomputation_differs,
    uninitialised_read,
    stale_state,
    moving_statistics,
    stale_copy,
)

_OPTION = "ignore_findings"


def find_findings(run: Run, ignored: Collection[str] | None = None) -> tuple[Finding, ...]:
    """Return the findings of a run, without ``ignored`` ones (None: the project's list).

    Reads at most 4,000 steps (256 MiB of digests) and the evidence of 20,000, of at most 8
    processes and 4 fits. A damaged file is a ReferenceFormatError.
    """
    left_out = ignored_findings() if ignored is None else ignored
    fits = fits_of(run)
    findings = (_finding(rule, run, fits) for rule in RULES if rule.name not in left_out)
    return tuple(finding for finding in findings if finding is not None)


def _finding(rule: Rule, run: Run, fits: Sequence[Fits]) -> Finding | None:
    """Return the finding of the first fit that has it."""
    for of_ranks in fits:
        found = rule.find(of_ranks)
        if found is not None:
            return _as_finding(rule, run, found, of_ranks[0].segment)
    return None


def _as_finding(rule: Rule, run: Run, found: Found, segment: int) -> Finding:
    place = f"In segment {segment}: " if segment else ""
    ranks = (
        f", on {ranks_text(found.ranks)}"
        if run.manifest.world_size > 1 and not rule.is_of_ranks
        else ""
    )
    return Finding(
        finding=rule.name,
        explanation=f"{place}{found.explanation}{ranks}. {found.advice}.",
        ranks=found.ranks,
        steps=found.steps,
        names=found.names,
    )


def ignored_findings() -> frozenset[str]:
    """Return ``ignore_findings`` of ``[tool.det_callbacks]`` in the project's pyproject.toml.

    SelectionError if it is not a list of known findings.
    """
    folders = [Path.cwd(), *Path.cwd().parents]
    file = next((path for folder in folders if (path := folder / "pyproject.toml").is_file()), None)
    if file is None:
        return frozenset()
    try:
        chosen = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["det_callbacks"][_OPTION]
    except (ValueError, LookupError, TypeError):  # Python's tools refuse such a file
        return frozenset()
    words = [rule.name for rule in RULES]
    unknown = (
        [word for word in chosen if word not in words] if isinstance(chosen, list) else [chosen]
    )
    if unknown:
        raise SelectionError(
            f"{_OPTION} in [tool.det_callbacks] of {file} has {', '.join(map(repr, unknown))}, but "
            f"must be a list of these findings: {', '.join(words)}."
        )
    return frozenset(chosen)
