"""The parameters that the optimizers of a fit had from its start to its end."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from det_callbacks.findings.facts import FitFacts
from det_callbacks.runs.evidence import NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizedParameters:
    """Names of parameters that were always trainable; none if the recording has no such evidence."""

    by_optimizer: Mapping[str, list[str]]  # "optimizer 0" -> its parameters
    without_optimizer: list[str]  # parameters with a gradient that are never in an optimizer
    with_large_gradient: list[str]  # parameters whose gradient exceeded rounding in one of the first updates


def parameters_of(fit: FitFacts) -> OptimizedParameters:
    always: dict[str, list[str]] = {}
    last: dict[str, list[str]] = {}
    for row in fit.rows:
        if row.kind not in NAMES:
            continue
        names: list[str] = json.loads(row.text or "[]")
        if row.kind in ("trained", "untrained"):
            always[row.of] = [name for name in always.get(row.of, names) if name in {*names}]
        else:
            last[row.kind] = names
    in_none = {*always.pop("", ())}
    return OptimizedParameters(
        by_optimizer={f"optimizer {number}": names for number, names in always.items()},
        without_optimizer=[name for name in last.get("untrained_with_gradient", ()) if name in in_none],
        with_large_gradient=last.get("large_gradient", []),
    )
