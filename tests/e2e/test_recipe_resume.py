"""The commands of recipes/resume/README.md, with the output they promise."""

from pathlib import Path

import pytest
from readme_commands import run_readme


@pytest.mark.slow
def test_the_readme_tells_the_truth(tmp_path: Path) -> None:
    assert run_readme("resume", tmp_path) == 8
