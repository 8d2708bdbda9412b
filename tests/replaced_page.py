"""The methods that docs/explanation/replaced.md lists; tests/conftest.py checks
each that a test replaces.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).parents[1] / "docs/explanation/replaced.md"


def _names() -> frozenset[str]:
    rows = [line.split(" | ") for line in _PAGE.read_text().splitlines() if line.startswith("| ")]
    listed = " ".join(cell for row in rows for cell in row[:-1])  # the last column is the reason
    return frozenset(name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", listed))


NAMES = _names()


def checked(replace: Callable[..., None]) -> Callable[..., None]:
    """Return ``ReplacedMethods._set``, which then refuses a method that the page does not list."""

    def replace_listed(self: Any, owner: Any, name: str, *methods: Any) -> None:
        assert name in NAMES, (
            f"docs/explanation/replaced.md has no row for {name} of {owner!r}, which is replaced"
        )
        replace(self, owner, name, *methods)

    return replace_listed
