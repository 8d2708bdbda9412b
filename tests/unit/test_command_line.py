"""What is kept of the command that started a run, and what is not."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

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
