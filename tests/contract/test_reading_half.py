"""What opens, compares and shows runs loads neither torch nor Lightning nor Hydra; public names are there anyway."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from stored_runs import record

import det_callbacks

ROOT = Path(__file__).parents[2]
READING_HALF = "runs compare judge detector report cli errors verdict patterns numbers host_digest export"
HEAVY = ("torch", "lightning", "lightning_utilities", "hydra", "omegaconf", "safetensors")

PUBLIC = {name: getattr(det_callbacks, name) for name in det_callbacks.__all__}  # Lightning leaves filters behind

# Says after each step which of the packages named first are loaded, as JSON lines.
SCRIPT = """
import contextlib, importlib, io, json, sys

packages, modules, commands = map(json.loads, sys.argv[1:])
out = sys.stdout

def tell(step):
    print(json.dumps([step, [name for name in packages if name in sys.modules]]), file=out)

import det_callbacks
assert set(det_callbacks.__all__) <= set(dir(det_callbacks))
tell("import det_callbacks")
from det_callbacks import compare_runs
tell("compare_runs")
for module in modules:
    importlib.import_module(module)
    tell(module)
from det_callbacks.cli import main
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            status = main(command)
        except SystemExit as end:
            status = end.code
    assert (status, bool(shown.getvalue())) == (0, True), (command, status)
    tell(" ".join(command))
"""


def modules_of(*units: str) -> list[str]:
    package = ROOT / "det_callbacks"
    found = []
    for unit in units:
        paths = [package / f"{unit}.py"] if (package / f"{unit}.py").exists() else (package / unit).rglob("*.py")
        parts = (path.relative_to(ROOT).with_suffix("").parts for path in paths)
        found += [".".join(part for part in names if part != "__init__") for names in parts]
    return sorted(found)


def loaded(packages: tuple[str, ...], modules: list[str], commands: list[list[str]]) -> dict[str, list[str]]:
    """Return, for each step of the script, which of the packages were loaded after it."""
    words = map(json.dumps, (packages, modules, commands))
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


def test_the_reading_half_loads_nothing_heavy(tmp_path: Path) -> None:
    runs = [str(record(tmp_path / name, range(8))) for name in ("reference", "current")]
    modules = modules_of(*READING_HALF.split())
    assert len(modules) > 40
    commands = [["--help"], ["show", runs[0]], ["show", runs[0], "--step", "1", "--json"], ["diff", *runs]]
    commands += [["diff", *runs, "--html", str(tmp_path / "r.html")], ["export", runs[0], "--to", str(tmp_path / "x")]]
    found = loaded((*HEAVY, "sqlite3"), [*modules, "sqlite3"], commands)
    assert len(found) == 2 + len(modules) + 1 + len(commands)
    assert found["sqlite3"] == ["sqlite3"], "what is loaded is found"
    assert {name for names in found.values() for name in names} == {"sqlite3"}


def test_public_names_are_loaded_on_first_use_and_seen_by_type_checkers() -> None:
    assert sorted(det_callbacks.__all__) == sorted(set(det_callbacks.__all__))
    assert callable(PUBLIC["observe"]), "a package of that name would hide the function"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = det_callbacks.nothing
    tree = ast.parse((ROOT / "det_callbacks" / "__init__.py").read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    for_types = {node.module: tuple(name.name for name in node.names) for node in guarded.body}
    assert for_types == det_callbacks._HOMES
