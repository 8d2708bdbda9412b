"""The package as it is installed: the wheel's content, and both kinds of install,
used from another directory.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
REQUIRES = "Requires-Dist: "
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
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "noxfile.py",
    ):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--wheel-dir", str(folder), str(source))
    (found,) = folder.iterdir()
    return found


def pip(command: str, *arguments: str, python: str = sys.executable) -> None:
    begin = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "--python",
        python,
        command,
    ]
    subprocess.run(
        [*begin, "--no-index", "--no-deps", "--no-build-isolation", *arguments],
        check=True,
        timeout=200,
    )


def test_the_wheel_holds_the_package_and_nothing_else(wheel, source):
    places = (
        ("det_callbacks", ("py", "j2", "css", "json", "typed", "cpp", "h")),
        ("conf", ("py", "yaml")),
    )
    files = [
        path
        for folder, ends in places
        for end in ends
        for path in (source / folder).rglob(f"*.{end}")
    ]
    wanted = {path.relative_to(source).as_posix() for path in files}
    wanted = {
        name if name.startswith("det_callbacks/") else f"det_callbacks/{name}" for name in wanted
    }
    some = {
        "py.typed",
        "schemas/verdict.json",
        "runs/store.py",
        "conf/determinism/record.yaml",
        "cli/repro.py.j2",
        "report/report.html.j2",
    }
    assert {f"det_callbacks/{name}" for name in some} <= wanted
    assert not [name for name in wanted if "default.yaml" in name], "it would hide the user's own"
    with zipfile.ZipFile(wheel) as archive:
        information = f"det_callbacks-{PROJECT['version']}.dist-info/"
        assert {name for name in archive.namelist() if not name.startswith(information)} == wanted
        metadata, entries = (
            archive.read(information + name).decode() for name in ("METADATA", "entry_points.txt")
        )
        assert archive.read(f"{information}licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "det-callbacks = det_callbacks.cli:main" in entries
    lines = metadata.splitlines()
    assert "License-Expression: Apache-2.0" in lines
    required = {
        Requirement(line.removeprefix(REQUIRES)) for line in lines if line.startswith(REQUIRES)
    }
    assert {Requirement(name) for name in PROJECT["dependencies"]} <= required
    assert {f"Classifier: {name}" for name in PROJECT["classifiers"]} <= {*lines}
    assert {
        f"Author: {PROJECT['authors'][0]['name']}",
        f"Keywords: {','.join(PROJECT['keywords'])}",
    } <= {*lines}


def test_the_source_distribution_holds_what_builds_the_wheel_and_nothing_else(
    source, wheel, tmp_path
):
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, tmp_path],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=200,
    )
    (made,) = tmp_path.iterdir()
    with tarfile.open(made) as archive:
        files = {
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        }
    with zipfile.ZipFile(wheel) as archive:
        package = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {
        name.removeprefix("det_callbacks/") if "/conf/" in name else name for name in package
    }
    about = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "setup.cfg"}
    assert {
        name for name in files if not name.startswith("det_callbacks.egg-info/")
    } == package | about


def new_environment(folder: Path, elsewhere: Path) -> tuple[Path, Any]:
    """Make an empty environment, and return its packages' folder and what runs a command in it."""
    venv.create(folder, symlinks=True)
    elsewhere.mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: Any, status: int = 0) -> str:
        options = {
            "cwd": elsewhere,
            "env": clean,
            "stdin": subprocess.DEVNULL,
            "capture_output": True,
            "text": True,
        }
        done = subprocess.run(
            [folder / "bin" / command[0], *command[1:]], check=False, timeout=200, **options
        )
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr * bool(status)

    return Path(sysconfig.get_path("purelib", vars={"base": str(folder)})), run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_install_works_from_another_directory(tmp_path, wheel, source, kind):
    """In an environment that finds the dependencies where this one has them,
    and not the package.
    """
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    site, run = new_environment(environment, elsewhere)
    # only the folder is added: the .pth files in it, by which an editable
    # install is found, are not read
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = str(environment / "bin" / "python")
    nothing = run("python", "-c", "import det_callbacks", status=1)
    assert "No module named 'det_callbacks'" in nothing, "this environment has it already"
    pip(
        "install",
        *([str(wheel)] if kind == "wheel" else ["--editable", str(source)]),
        python=python,
    )
    (elsewhere / "train.py").write_text(PROGRAM)
    search = [
        "hydra.searchpath=[pkg://det_callbacks.conf]",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]
    options = ["+determinism=record", "determinism.reference=refs/run", "--cfg", "job"]
    assert "mode: record" in run("python", "train.py", *search, *options)
    for command in (["det-callbacks"], ["python", "-m", "det_callbacks"]):
        assert run(*command, "--version") == f"det-callbacks {PROJECT['version']}\n"
    place = run(
        "python", "-c", "import det_callbacks as d; print(d.__version__, d.__file__)"
    ).split()
    assert place[0] == PROJECT["version"]
    assert Path(place[1]).is_relative_to(source if kind == "editable" else environment)


@pytest.mark.slow
def test_runs_are_read_where_neither_torch_nor_any_framework_is_installed(tmp_path, wheel):
    """With what README.md says, and with what these packages need themselves."""
    site, run = new_environment(tmp_path / "environment", tmp_path / "elsewhere")
    (readers,) = re.findall(
        r"--no-deps [.] && pip install ([\w ]+?) *#", (ROOT / "README.md").read_text()
    )
    for name in (*readers.split(), "markdown-it-py", "markupsafe", "mdurl", "pygments"):
        package = distribution(name)
        for top in {file.parts[0] for file in package.files} - {"..", "__pycache__"}:
            (site / top).symlink_to(package.locate_file(top))
    pip("install", str(wheel), python=str(tmp_path / "environment" / "bin" / "python"))
    missing = run("python", "-c", "import torch", status=1)
    assert "No module named 'torch'" in missing
    frozen = ROOT / "tests" / "frozen" / "format-2"
    shutil.copytree(frozen, tmp_path / "elsewhere" / "runs")
    assert run("det-callbacks", "--version") == f"det-callbacks {PROJECT['version']}\n"
    assert "check-checkpoint" in run("det-callbacks", "--help")
    assert "2 steps" in run("det-callbacks", "show", "runs/reference")
    assert "aten.mul.Tensor" in run("det-callbacks", "show", "runs/reference", "--step", "1")
    told = run(
        "det-callbacks", "diff", "runs/reference", "runs/current", "--html", "report.html", status=1
    )
    assert "aten.mul.Tensor in scale" in told
    assert "aten.mul.Tensor in scale" in (tmp_path / "elsewhere" / "report.html").read_text()
    assert run("det-callbacks", "findings", "runs/reference") == "runs/reference: no findings\n"
    assert "rows" in run("det-callbacks", "export", "runs/reference", "--to", "exported")
    assert "torch not installed" in run("det-callbacks", "doctor", status=2)
    assert "needs torch, which is not installed" in run("det-callbacks", "ops", status=2), (
        "1 would be a divergence"
    )
