"""Scripts started by the command line, each process a fork of this one."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
from forks import fork_process

from det_callbacks.cli import check as checks
from det_callbacks.cli import main


class Ended(NamedTuple):
    """How ``det-callbacks record``, ``verify`` or ``check`` ended."""

    status: int
    text: str
    errors: str

    @property
    def last(self) -> str:
        return self.text.splitlines()[-1]


Run = Callable[..., Ended]


def write_app(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return Path(shutil.copy(Path(__file__).with_name("checked_app.py"), folder / "train.py"))


@pytest.fixture
def run_command(tmp_path: Path, monkeypatch: Any, capfd: Any) -> Run:
    groups = {it.group for it in entry_points(name="det_callbacks")}
    assert {
        "lightning.pytorch.callbacks_factory",
        "pytorch_lightning.callbacks_factory",
    } <= groups, (
        "the package was installed before it had this entry point: pip install --no-deps -e ."
    )
    write_app(tmp_path / "app")
    monkeypatch.chdir(tmp_path / "app")

    def fork(
        words: Sequence[str], *, variables: Mapping[str, str], output: IO[bytes] | None = None
    ) -> int:
        return fork_process(
            words, variables=variables, output=None if output is None else output.fileno()
        )

    monkeypatch.setattr(checks, "run_process", fork)

    def run(*words: str, faults: Sequence[str] = (), script: str = "train.py") -> Ended:
        capfd.readouterr()
        try:
            status = main([*words, "--", sys.executable, script, *faults])
        except SystemExit as ended:  # argparse
            status = int(ended.code or 0)
        return Ended(status, *capfd.readouterr())

    return run
