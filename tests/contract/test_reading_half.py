"""What opens, compares and shows runs loads neither torch nor Lightning nor Hydra;
public names are there anyway.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from stored_runs import record

import det_callbacks

ROOT = Path(__file__).parents[2]
READING_HALF = (
    "runs compare causes findings verify report cli errors verdict audit.result digest.host "
    "digest.numbers"
)
HEAVY = ("torch", "lightning", "lightning_utilities", "hydra", "omegaconf", "safetensors")

# Lightning leaves filters behind
PUBLIC = {name: getattr(det_callbacks, name) for name in det_callbacks.__all__}

# Says which of the packages named first are loaded after all modules were
# imported and all commands run.
SCRIPT = """
import contextlib, importlib, io, json, sys

packages, modules, commands = map(json.loads, sys.argv[1:])
import det_callbacks
assert set(det_callbacks.__all__) <= set(dir(det_callbacks))
for module in modules:
    importlib.import_module(module)
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            status = det_callbacks.cli.main(command)
        except SystemExit as end:
            status = end.code
    assert (status, bool(shown.getvalue())) == (0, True), (command, status)
print([name for name in packages if name in sys.modules])
"""


def test_the_reading_half_loads_nothing_heavy(tmp_path):
    runs = [str(record(tmp_path / name, range(8))) for name in ("reference", "current")]
    paths = [
        path.relative_to(ROOT).with_suffix("").parts
        for path in (ROOT / "det_callbacks").rglob("*.py")
    ]
    rooms = READING_HALF.split()
    paths = [parts for parts in paths if parts[1] in rooms or ".".join(parts[1:]) in rooms]
    modules = [".".join(parts).removesuffix(".__init__") for parts in paths]
    assert len(modules) > 40
    lines = [
        "--help",
        f"show {runs[0]}",
        f"show {runs[0]} --step 1 --json",
        f"diff {' '.join(runs)}",
    ]
    lines += [f"{lines[-1]} --html {tmp_path}/r.html", f"export {runs[0]} --to {tmp_path}/x"]
    words = map(
        json.dumps, ((*HEAVY, "sqlite3"), [*modules, "sqlite3"], [line.split() for line in lines])
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "['sqlite3']\n"), (
        f"what is loaded is found: {done.stderr}"
    )


def test_public_names_are_loaded_on_first_use_and_seen_by_type_checkers():
    assert sorted(det_callbacks.__all__) == sorted(set(det_callbacks.__all__))
    assert callable(PUBLIC["observe"]), "a package of that name would hide the function"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = det_callbacks.nothing
    tree = ast.parse((ROOT / "det_callbacks" / "__init__.py").read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    for_types = {node.module: tuple(name.name for name in node.names) for node in guarded.body}
    assert for_types == det_callbacks._HOMES
