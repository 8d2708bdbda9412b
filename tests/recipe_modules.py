"""The modules of a recipe, which a test imports by the names that the recipe uses."""

import sys
from pathlib import Path

import pytest


def find_recipe(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let imports find the modules of a recipe until the test ends; other recipes, and tests,
    use their names too.
    """
    patch.syspath_prepend(folder)
    for path in folder.glob("*.py"):
        # what is imported in its place goes when the test ends
        patch.setitem(sys.modules, path.stem, None)
        del sys.modules[path.stem]
