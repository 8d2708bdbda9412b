"""What is kept of the code and the command that started a run, and what is not."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from det_callbacks.code_state import code_state
from det_callbacks.command_line import command_choice, script_words
from det_callbacks.environment import capture_environment


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A program that was started as a script, whatever runs the tests."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("train.py", ["train.py"]),
        ("src/train.py", ["src/train.py"]),
        ("{start}/src/train.py", ["src/train.py"]),
        ("/home/somebody/train.py", ["train.py"]),
        ("../other/train.py", ["train.py"]),
        ("-c", []),
        ("", []),
    ],
)
def test_the_script_goes_by_its_name_in_the_project(
    main: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script.format(start=tmp_path), "--password", "hunter2"])
    assert script_words(tmp_path) == words
    assert command_choice(start=tmp_path) == {"process": {"argv": words}}


def test_a_module_is_started_as_one(main: ModuleType) -> None:
    main.__spec__ = ModuleSpec("project.train", None)
    assert script_words() == ["-m", "project.train"]
    main.__spec__ = ModuleSpec("project.__main__", None)
    assert script_words() == ["-m", "project"]


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("lr=0.1", "lr=0.1"),
        ("+model/net=large", "+model/net=large"),
        ("~callbacks.stopping", "~callbacks.stopping"),
        ("determinism.settings.seed=0", "determinism.settings.seed=0"),
        ("model.num_tokens=5", "model.num_tokens=5"),
        ("logger.api_key=abc", "logger.api_key=<withheld>"),
        ("+hub@store.token='a=b'", "+hub@store.token=<withheld>"),
        ("logger={name: x, nested: {wandb_token: abc}}", "logger=<withheld>"),
        ("data.dir=/home/somebody/data", "data.dir=<place>"),
        ("data.url=https://somewhere/x", "data.url=<place>"),
        ("determinism.reference=refs/a", None),
        ("+determinism=record", None),
        ("determinism=verify", None),
        ("callbacks.determinism.level=op", None),
        ("determinism_of_mine=1", "determinism_of_mine=1"),
    ],
)
def test_overrides_are_kept_but_for_secrets_places_and_ours(override: str, kept: str | None) -> None:
    entry = capture_environment(choices=command_choice([override])).entries["process.argv"]
    assert entry.value[-1:] == [kept] if kept is not None else override not in entry.value
    assert len(entry.value) == len(script_words()) + (kept is not None)
    assert (entry.is_machine, entry.changes_bits) == (False, False)


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


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@needs_git
def test_commit_of_the_repository_that_the_program_lies_in(repository: Path) -> None:
    def state() -> object:
        found = code_state()
        assert found["code.git_commit"] == git(repository, "rev-parse", "HEAD")
        return found["code.is_dirty"]

    (repository / "notes.txt").write_text("untracked")
    assert state() is False
    (repository / "tools" / "train.py").write_text("print(1)\n")
    assert state() is True
    git(repository, "add", "tools")
    assert state() is True, "staged is not committed"
    git(repository, "commit", "--quiet", "--message", "second")
    assert state() is False
    # the index is not written: another time than it says makes a plain `git status` refresh it
    index = repository / ".git" / "index"
    os.utime(repository / "tools" / "train.py", (1, 1))
    before = index.read_bytes()
    assert state() is False
    assert index.read_bytes() == before
    git(repository, "status")
    assert index.read_bytes() != before, "the test could not have failed"


@needs_git
def test_without_a_script_it_is_the_working_directory(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert code_state() == NOTHING
    monkeypatch.chdir(repository)
    assert code_state()["code.git_commit"] == git(repository, "rev-parse", "HEAD")


@needs_git
def test_no_repository_no_commit_and_no_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.move(repository / ".git", repository / "git")
    assert code_state() == NOTHING
    git(repository, "init", "--quiet")
    assert code_state() == NOTHING, "a repository without a commit"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert code_state() == NOTHING
