import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from det_callbacks.code_state import code_state

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
NOTHING = {"code.git_commit": None, "code.is_dirty": None}


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, that the running program seems to lie in."""
    folder = tmp_path / "repository"
    (folder / "tools").mkdir(parents=True)
    (folder / "tools" / "train.py").write_text("print()\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    program = ModuleType("__main__")
    program.__file__ = str(folder / "tools" / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", program)
    monkeypatch.chdir(tmp_path)
    return folder


def test_commit_of_the_repository_that_the_program_lies_in(repository: Path) -> None:
    assert code_state() == {"code.git_commit": git(repository, "rev-parse", "HEAD"), "code.is_dirty": False}


def test_a_changed_file_makes_it_dirty_and_an_untracked_one_does_not(repository: Path) -> None:
    (repository / "notes.txt").write_text("untracked")
    assert code_state()["code.is_dirty"] is False
    (repository / "tools" / "train.py").write_text("print(1)\n")
    assert code_state()["code.is_dirty"] is True
    git(repository, "add", "tools")
    assert code_state()["code.is_dirty"] is True, "staged is not committed"
    git(repository, "commit", "--quiet", "--message", "second")
    assert code_state() == {"code.git_commit": git(repository, "rev-parse", "HEAD"), "code.is_dirty": False}


def test_without_a_script_it_is_the_working_directory(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert code_state() == NOTHING
    monkeypatch.chdir(repository)
    assert code_state()["code.git_commit"] == git(repository, "rev-parse", "HEAD")


def test_no_repository_no_commit_and_no_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.move(repository / ".git", repository / "git")
    assert code_state() == NOTHING
    git(repository, "init", "--quiet")
    assert code_state() == NOTHING, "a repository without a commit"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert code_state() == NOTHING


def test_the_index_is_not_written(repository: Path) -> None:
    index = repository / ".git" / "index"
    # Another time than the index says, so that a plain `git status` refreshes it.
    os.utime(repository / "tools" / "train.py", (1, 1))
    before = index.read_bytes()
    assert code_state()["code.is_dirty"] is False
    assert index.read_bytes() == before
    git(repository, "status")
    assert index.read_bytes() != before, "the test could not have failed"
