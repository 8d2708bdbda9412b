"""Source lines are read where a run names a Python file below the working directory, and nowhere else."""

from pathlib import Path

import pytest

from det_callbacks.report.html.source_text import read_sources

TEXT = "import torch\n\n\ndef step(x):\n    y = x * 2\n    return y\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "train.py").write_text(TEXT)
    (folder / "notes.txt").write_text(TEXT)
    (tmp_path / "secret.py").write_text("KEY = 1\n")
    (folder / "link.py").symlink_to(tmp_path / "secret.py")
    (folder / "loop.py").symlink_to(folder / "loop.py")
    return folder


def test_a_line_is_shown_with_those_around_it(root: Path) -> None:
    (found,) = read_sources(["pkg/train.py:5 in step"], root)
    assert [(line.number, line.text, line.is_named) for line in found.lines] == [
        (3, "", False),
        (4, "def step(x):", False),
        (5, "    y = x * 2", True),
        (6, "    return y", False),
    ]


@pytest.mark.parametrize(
    "place",
    [
        "pkg/train.py:0 in step",
        "pkg/train.py:7 in step",
        "pkg/gone.py:1 in step",
        "../secret.py:1 in x",
        "pkg/../../secret.py:1 in x",
        "pkg/../pkg/train.py:5 in step",
        "/etc/hosts:1 in x",
        "link.py:1 in x",
        "loop.py:1 in x",
        "notes.txt:1 in x",
        "pkg:1 in x",
        "pkg/\0.py:1 in x",
        "no place at all",
        "",
    ],
)
def test_what_is_not_a_python_file_below_the_root_is_named_and_not_read(place: str, root: Path) -> None:
    (found,) = read_sources([place], root)
    assert found.place == place
    assert found.lines == ()


def test_an_absolute_name_is_not_followed_into_the_root_either(root: Path) -> None:
    (found,) = read_sources([f"{root}/pkg/train.py:5 in step"], root)
    assert found.lines == ()
