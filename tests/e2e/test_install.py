"""The package as it is installed: the wheel's content, and both kinds of install, used from another directory."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Imports every module of the package, or none; lets Hydra find the presets.
PROGRAM = """
import importlib, pkgutil, hydra
import det_callbacks

for module in pkgutil.walk_packages(det_callbacks.__path__, "det_callbacks."):
    if module.name != "det_callbacks.__main__" and not "{prefix}":
        importlib.import_module(module.name)

@hydra.main(version_base="1.3", config_path=None)
def main(config): ...

main()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what an install is made from; building leaves folders beside the sources."""
    folder = tmp_path_factory.mktemp("source") / "det_callbacks"
    for name in ("det_callbacks", "conf", "tests", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--wheel-dir", str(folder), str(source))
    (found,) = folder.iterdir()
    return found


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment without det_callbacks that finds the dependencies where this one has them."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # Only the folder is added: the .pth files in it, by which an editable install is found, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def pip(*arguments: str, python: Path | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    command += ["--python", str(python)] if python else []
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, arguments[0], *offline, *arguments[1:]], check=True, timeout=200)


def run(command: list[str], folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shipped(root: Path) -> Iterator[str]:
    """Yield what has to be in a wheel, by its name there."""
    for path in sorted((root / "det_callbacks").rglob("*")):
        is_page = path.suffix in (".j2", ".css")
        if path.suffix == ".py" or path.name == "py.typed" or is_page:
            yield path.relative_to(root).as_posix()
    for path in sorted((root / "conf").rglob("*")):
        if path.suffix in (".py", ".yaml"):
            yield f"det_callbacks/{path.relative_to(root).as_posix()}"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        information = f"det_callbacks-{PROJECT['version']}.dist-info/"
        assert sorted(name for name in names if not name.startswith(information)) == sorted(shipped(source))
        metadata = archive.read(f"{information}METADATA").decode()
        assert archive.read(f"{information}licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "det-callbacks = det_callbacks.cli:main" in archive.read(f"{information}entry_points.txt").decode()
    assert wheel.name == f"det_callbacks-{PROJECT['version']}-py3-none-any.whl"
    assert "License-Expression: Apache-2.0" in metadata
    needed = {line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-")}
    assert set(PROJECT["dependencies"]) <= needed


def test_it_is_known_what_has_to_be_shipped() -> None:
    names = set(shipped(ROOT))
    assert {"det_callbacks/py.typed", "det_callbacks/runs/store.py", "det_callbacks/conf/__init__.py"} <= names
    assert "det_callbacks/conf/determinism/record.yaml" in names
    assert {f"det_callbacks/report/html/{name}" for name in ("report.html.j2", "report.css")} <= names
    assert not [name for name in names if "default.yaml" in name], "it would hide the user's own"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_install_works_from_another_directory(
    tmp_path: Path, environment: Path, wheel: Path, source: Path, kind: str
) -> None:
    python, elsewhere = environment / "bin" / "python", tmp_path / "elsewhere"
    elsewhere.mkdir()
    # every module is imported once, from the wheel
    (elsewhere / "train.py").write_text(PROGRAM.format(prefix="" if kind == "wheel" else "nothing"))
    nothing = subprocess.run(
        [python, "-c", "import det_callbacks"], cwd=elsewhere, capture_output=True, text=True, check=False
    )
    assert "No module named 'det_callbacks'" in nothing.stderr, "this environment has it already"

    pip("install", *([str(wheel)] if kind == "wheel" else ["--editable", str(source)]), python=python)
    search = ["hydra.searchpath=[pkg://det_callbacks.conf]", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    train = [str(python), "train.py", *search, "+determinism=record", "determinism.reference=refs/run", "--cfg", "job"]
    assert "mode: record" in run(train, elsewhere)
    version = PROJECT["version"]
    assert run([str(environment / "bin" / "det-callbacks"), "--version"], elsewhere) == f"det-callbacks {version}\n"
    assert run([str(python), "-m", "det_callbacks", "--version"], elsewhere) == f"det-callbacks {version}\n"
    home = source if kind == "editable" else environment
    place = run([str(python), "-c", "import det_callbacks; print(det_callbacks.__file__)"], elsewhere)
    assert Path(place.strip()).is_relative_to(home)
