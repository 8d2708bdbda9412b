"""The commands of recipes/digits/README.md, with the output they promise."""

import re
from pathlib import Path

import pytest
from readme_commands import commands_of, pattern_of, run_readme


@pytest.mark.slow
def test_the_readme_tells_the_truth(tmp_path: Path) -> None:
    assert run_readme("digits", tmp_path) == 10


def test_a_promise_can_be_broken() -> None:
    readme = "```console\n$ do it\nrecorded ... steps\n```\n\n```console\n$ echo $?\n1\n```\n"
    assert commands_of(readme) == [("do it", ["recorded ... steps"]), ("echo $?", ["1"])]
    assert re.search(pattern_of("recorded ... steps"), "recorded 48 steps")
    assert not re.search(pattern_of("recorded ... steps"), "recorded nothing")
