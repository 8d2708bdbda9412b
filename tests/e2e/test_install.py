"""The package as it is installed: the wheel's content, and both kinds of install, used from another directory."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PROGRAM = """
import hydra

@hydra.main(version_base="1.3", config_path=None)
def main(config): ...

main()
"""  # lets Hydra find the presets


@pytest.fixture(scope="module")
def source(tmp_path_factory: Any) -> Path:
    """A copy of what an install is made from; building leaves folders beside the sources."""
    folder = tmp_path_factory.mktemp("source") / "det_callbacks"
    for name in ("det_callbacks", "conf", "tests", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--wheel-dir", str(folder), str(source))
    (found,) = folder.iterdir()
    return found


def pip(command: str, *arguments: str, python: str = sys.executable) -> None:
    begin = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", python, command]
    subprocess.run([*begin, "--no-index", "--no-deps", "--no-build-isolation", *arguments], check=True, timeout=200)


def test_the_wheel_holds_the_package_and_nothing_else(wheel, source):
    places = ("det_callbacks", ("py", "j2", "css", "typed")), ("conf", ("py", "yaml"))
    files = [path for folder, ends in places for end in ends for path in (source / folder).rglob(f"*.{end}")]
    wanted = {path.relative_to(source).as_posix() for path in files}
    wanted = {name if name.startswith("det_callbacks/") else f"det_callbacks/{name}" for name in wanted}
    some = {"py.typed", "runs/store.py", "conf/determinism/record.yaml", "report/report.html.j2"}
    assert {f"det_callbacks/{name}" for name in some} <= wanted
    assert not [name for name in wanted if "default.yaml" in name], "it would hide the user's own"
    with zipfile.ZipFile(wheel) as archive:
        information = f"det_callbacks-{PROJECT['version']}.dist-info/"
        assert {name for name in archive.namelist() if not name.startswith(information)} == wanted
        metadata, entries = (archive.read(information + name).decode() for name in ("METADATA", "entry_points.txt"))
        assert archive.read(f"{information}licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "det-callbacks = det_callbacks.cli:main" in entries
    lines = metadata.splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert {f"Requires-Dist: {name}" for name in PROJECT["dependencies"]} <= {*lines}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_install_works_from_another_directory(tmp_path, wheel, source, kind):
    """In an environment that finds the dependencies where this one has them, and not the package."""
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    venv.create(environment, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # only the folder is added: the .pth files in it, by which an editable install is found, are not read
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = str(environment / "bin" / "python")
    elsewhere.mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        options = {"cwd": elsewhere, "env": clean, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(command, check=False, timeout=200, **options)
        return done.stdout + done.stderr * bool(done.returncode)

    nothing = run(python, "-c", "import det_callbacks")
    assert "No module named 'det_callbacks'" in nothing, "this environment has it already"
    pip("install", *([str(wheel)] if kind == "wheel" else ["--editable", str(source)]), python=python)
    (elsewhere / "train.py").write_text(PROGRAM)
    search = ["hydra.searchpath=[pkg://det_callbacks.conf]", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    options = ["+determinism=record", "determinism.reference=refs/run", "--cfg", "job"]
    assert "mode: record" in run(python, "train.py", *search, *options)
    for command in ([str(environment / "bin" / "det-callbacks")], [python, "-m", "det_callbacks"]):
        assert run(*command, "--version") == f"det-callbacks {PROJECT['version']}\n"
    place = run(python, "-c", "import det_callbacks; print(det_callbacks.__file__)")
    assert Path(place.strip()).is_relative_to(source if kind == "editable" else environment)
