"""Program, script and arguments of a check: found, made absolute, or refused."""

import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from det_callbacks.check.command import override, parse_command
from det_callbacks.errors import CheckError

ODD = st.sampled_from("\\'\", =()[]{}:%~$")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    for name in ("python3.12", "torchrun"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o700)
    (tmp_path / "python").symlink_to(tmp_path / "bin" / "python3.12")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{python} train.py a=1", "{python} {here}/train.py a=1"),
        ("./python train.py", "{here}/python {here}/train.py"),
        ("bin/python3.12 -u -X dev -Wignore -W error train.py train.py", None),
        ("{python} --check-hash-based-pycs always train.py", "{python} --check-hash-based-pycs always {here}/train.py"),
        ("{python} -Xdev -OO {here}/train.py", "{python} -Xdev -OO {here}/train.py"),
        ("{python} -m train -c x", "{python} -m train -c x"),
        ("{python} -um train --x", "{python} -um train --x"),
        ("{python} -c code train.py", "{python} -c code {here}/train.py"),
        ("bin/torchrun -m 2 train.py a=1", "{here}/bin/torchrun -m 2 {here}/train.py a=1"),
        ("bin/torchrun other.py", "{here}/bin/torchrun other.py"),
    ],
)
def test_program_and_script_become_absolute(line: str, found: str | None, folder: Path) -> None:
    names = {"python": sys.executable, "here": str(folder)}
    command = parse_command(line.format(**names).split(), folder)
    if found is None:
        found = "{here}/bin/python3.12 -u -X dev -Wignore -W error {here}/train.py train.py"
    assert " ".join(command.words) == found.format(**names)
    assert " ".join(command.given) == line.format(**names)
    assert command.is_module is ("m train" in line)


@pytest.mark.parametrize(("flags", "ignores"), [(["-E"], True), (["-sI"], True), (["-s"], False), (["-XE"], False)])
def test_python_may_ignore_its_variables(flags: list[str], ignores: bool, folder: Path) -> None:
    assert parse_command([sys.executable, *flags, "train.py", "-E"], folder).ignores_variables is ignores


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "No command was given"),
        ("no-such-program train.py", "The program no-such-program was not found"),
        ("train.py a=1", "det-callbacks check -- python train.py"),
        ("{python} tain.py", "The script tain.py was not found in {here}; nothing was run."),
        ("{python}", "names no script"),
        ("{python} -u", "names no script"),
        ("{python} -", "names no script"),
        ("{python} train.py +determinism=record", "leave it out"),
        ("{python} train.py ++determinism=record", "leave it out"),
        ("{python} train.py determinism=verify", "leave it out"),
        ("{python} train.py determinism.reference=x", "leave it out"),
        ("{python} train.py ++determinism.current=x", "leave it out"),
        ("{python} train.py determinism.mode=audit", "leave it out"),
        ("{python} train.py --multirun a=1,2", "--multirun makes several jobs"),
        ("{python} train.py -m a=1,2", "-m makes several jobs"),
        ("bin/torchrun train.py -m", "-m makes several jobs"),
    ],
)
def test_what_cannot_be_checked_is_refused(line: str, says: str, folder: Path) -> None:
    names = {"python": sys.executable, "here": str(folder)}
    with pytest.raises(CheckError) as refused:
        parse_command(line.format(**names).split(), folder)
    assert says.format(**names) in str(refused.value)
    assert refused.value.exit_code == 2


def test_other_options_of_the_presets_are_the_users(folder: Path) -> None:
    words = [sys.executable, "train.py", "determinism.level=state", "model.determinism=1", "determinism.modules=[a]"]
    assert parse_command(words, folder).words[2:] == tuple(words[2:])


@given(
    st.text(ODD | st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=20).filter(
        lambda text: "${" not in text
    )
)
def test_hydra_reads_a_path_as_it_is(path: str) -> None:
    (read,) = OverridesParser.create().parse_overrides([override("determinism.reference", f"/runs/{path}")])
    assert read.value() == f"/runs/{path}"
    assert not read.is_sweep_override()


def test_a_plain_path_stays_plain() -> None:
    assert override("determinism.reference", Path("/refs/run-1")) == "determinism.reference=/refs/run-1"
    assert override("a", 2) == "a=2"
