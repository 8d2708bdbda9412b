"""Which cases of a grid run every day."""

from collections.abc import Iterable
from typing import Any

import pytest


def rest_slow(cases: Iterable[Any], *, every: int) -> list[Any]:
    """Return cases, one value each, with all but each ``every``-th, the first
    included, in the slow tier.
    """
    return [
        case if index % every == 0 else pytest.param(case, marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]
