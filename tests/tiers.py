"""Which cases of a grid run every day."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def rest_slow(cases: Iterable[Any], *, every: int) -> list[Any]:
    """Return the cases of a parametrised test with all but each ``every``-th, the first included, in the slow tier.

    A case is a value, a sequence of several arguments' values (with ``parametrize(("a", "b"), ...)``), or a
    ``pytest.param``.
    """
    return [case if index % every == 0 else _slow(case) for index, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    values: Sequence[Any] = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
