"""Private names of torch and Lightning stand in one room and exist; a lack of one is refused."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from packaging.requirements import Requirement
from test_house import sources
from trainers import quiet_trainer

import det_callbacks
from det_callbacks import DeterminismCallback, TrainingRun, UnsupportedVersionError
from det_callbacks.integrations import launch

# Dynamo's names are torch's, too
from det_callbacks.internals import dynamo, lightning, torch, versions  # noqa: F401
from det_callbacks.internals.private_names import PrivateNames

ROOM = "det_callbacks/internals/"
TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
TORCH, LIGHTNING = torch.TORCH, lightning.LIGHTNING
REFERENCE = TESTS / "frozen" / "format-2" / "reference"

# Of the standard library, which documents them or has nothing else.
OF_PYTHON = frozenset({"_exit", "_fields", "_getframe"})
FOREIGN = ("torch", "lightning")
# In recipes: dispatch modes, which plant faults (torch's notes on extending it write them so); what
# the costs are measured with, and compared with; torch's own database of ops,
# and the structures of its samples.
IN_RECIPES = {"_python_dispatch", "_mode_utils", "_sleep", "_debug_mode", "_internal", "_pytree"}
OF_THE_ROOM = {path.rpartition(".")[2] for path in (*TORCH.known, *LIGHTNING.known)}
LOOKS_UP = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller")


def is_private(name: str) -> bool:
    return (
        name.startswith("_") and not name.startswith("__") and name != "_" and name not in OF_PYTHON
    )


def own_names(trees: Iterable[ast.AST]) -> set[str]:
    own = set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.id if isinstance(node, ast.Name) else node.attr)
    return own


def private_names(tree: ast.AST, own: set[str]) -> list[str]:
    """Return the private names that a source takes from elsewhere, with their lines;
    ops of torch have public ones.

    An own name counts as one on ``self``, ``cls`` and ``super()`` alone:
    torch may have it on any other object.
    """
    found: list[tuple[str, int]] = []
    foreign = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base = ast.unparse(node.value)
            is_own = (
                base.partition(".")[0] not in foreign
                and base in ("self", "cls", "super()")
                and node.attr in own
            )
            if not base.startswith("torch.ops") and not is_own:
                found.append((node.attr, node.lineno))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(".")
            is_path = parts[0] in FOREIGN and " " not in node.value
            found += [
                (part, node.lineno)
                for part in parts
                if is_path or (part == node.value and part in OF_THE_ROOM)
            ]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            parts = [
                *module.split("."),
                *(part for alias in node.names for part in alias.name.split(".")),
            ]
            found += [
                (part, node.lineno)
                for part in parts
                if module.partition(".")[0] in FOREIGN or part not in own
            ]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOOKS_UP:
            texts = [
                one.value
                for one in node.args
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            found += [(part, node.lineno) for text in texts for part in text.split(".")]
    return [f"{name}:{line}" for name, line in found if is_private(name)]


def imported(tree: ast.AST) -> set[str]:
    """Return what the imports from torch and Lightning are called in a source."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FOREIGN:
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            parts = [(alias.asname or alias.name, alias.name) for alias in node.names]
            names |= {
                name.partition(".")[0]
                for name, module in parts
                if module.partition(".")[0] in FOREIGN
            }
    return names


def offenders(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the private names of others that files outside the room use, by file."""
    trees = {path: ast.parse(text) for path, text in files.items() if not path.startswith(ROOM)}
    own = own_names(trees.values())
    found = {path: private_names(tree, own) for path, tree in trees.items()}
    return {path: lines for path, lines in found.items() if lines}


def test_private_names_of_others_stand_in_the_room_alone():
    files = sources("det_callbacks")
    assert any(path.startswith(ROOM) for path in files)
    assert offenders(files) == {}


def test_recipes_use_public_names():
    found = {
        name.partition(":")[0] for lines in offenders(sources("recipes")).values() for name in lines
    }
    assert found == IN_RECIPES


@pytest.mark.parametrize(
    "source",
    [
        "from torch._dynamo import config",
        "import torch._inductor.config as config",
        "from torch.utils._pytree import tree_flatten",
        "from torch.nn import _reduction",
        "import torch\nkeys = torch._C.DispatchKey",
        "def state(trainer):\n    return trainer._results",
        "def cached(module):\n    return getattr(module, '_parameters', None)",
        (
            "from torch.distributed import distributed_c10d\n"
            "_group = distributed_c10d._group\n"
            "_group()"
        ),
        "class A:\n    def __init__(self, loop):\n        self._restarting = loop._restarting",
        "class A:\n    _modules = None\n\ndef children(module):\n    return module._modules",
        "def children(value):\n    return vars(value).pop('_modules', {})",
        "config = 'torch._inductor.config'",
        "from operator import attrgetter\nread = attrgetter('fit_loop._data_fetcher')",
    ],
)
def test_the_rule_finds_a_private_name(source):
    assert offenders({"det_callbacks/trace/new.py": source})
    assert not offenders({f"{ROOM}new.py": source})


def test_the_rule_lets_names_of_our_own_and_of_ops_be():
    source = (
        "import torch\n"
        "class A:\n"
        "    def _go(self):\n"
        "        self._x = torch.ops._c10d.all_reduce\n"
        "        self._go()"
    )
    assert offenders({"det_callbacks/trace/new.py": source}) == {}


def test_every_name_is_there_and_says_what_it_is_for():
    assert [*TORCH.all_missing(), *lightning.all_missing()] == []
    known = [*TORCH.known.values(), *LIGHTNING.known.values()]
    assert len(known) > 80
    assert all(one.purpose for one in known)


LACKING = """
import contextlib, io, json, sys
from importlib import import_module
from pkgutil import walk_packages
from det_callbacks.internals import private_names
private_names.find = lambda path, *example: private_names.MISSING
package = import_module("det_callbacks")
for module in walk_packages(package.__path__, "det_callbacks."):
    # the last is for transformers, which the package does not bring
    if not module.name.endswith(("__main__", "sitecustomize", "huggingface")):
        import_module(module.name)
from det_callbacks.cli import main
ended = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(words)
    ended.append((status, " ".join(said.getvalue().split())))
print(json.dumps(ended))
"""
LACKS = "torch {} has no torch._C._current_graph_task_id ("
ENDS = (
    (f"diff {REFERENCE} {REFERENCE}", 0, "0 differing"),
    ("doctor", 2, f"Missing: {LACKS}"),
    ("ops", 2, f"Not supported: {LACKS}"),
)


def test_without_any_name_everything_is_imported_and_runs_are_read():
    words = json.dumps([command.split() for command, *_ in ENDS])
    done = subprocess.run(
        [sys.executable, "-c", LACKING, words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    for (command, status, line), (ended, said) in zip(ENDS, json.loads(done.stdout), strict=True):
        assert (ended, line.format(torch.torch.__version__) in said) == (status, True), (
            f"{command}: {said}"
        )


def make_gone(kind: str, path: str) -> tuple[PrivateNames, Any]:
    names = PrivateNames("torch")
    return names, getattr(names, kind)(path, "what it does")


@pytest.mark.parametrize("kind", ["needed", "attribute", "name_of", "later"])
def test_a_missing_name_is_refused_with_the_version_and_what_to_do(kind):
    names, found = make_gone(kind, "torch.Tensor._gone")
    sentence = (
        f"torch {torch.torch.__version__} has no torch.Tensor._gone (what it does), which "
        "det_callbacks needs: install torch 2.11 to 2.15"
    )
    assert names.all_missing() == [sentence]
    with pytest.raises(
        UnsupportedVersionError, match=rf"^Not supported: {re.escape(sentence)}[.]$"
    ):
        names.require()
    if kind != "name_of":
        with pytest.raises(UnsupportedVersionError, match="_gone"):
            found(*[1] * (kind != "later"))


def test_a_missing_class_has_no_instances():
    _, missing = make_gone("needed", "torch.Gone")
    assert not isinstance(1, missing)
    with pytest.raises(UnsupportedVersionError, match="Gone"):
        type("Mode", (missing,), {})()
    with pytest.raises(UnsupportedVersionError, match="Gone"):
        missing.CPU  # noqa: B018  # reading it raises


@pytest.fixture
def lacks(monkeypatch):
    monkeypatch.setattr(TORCH, "missing", [TORCH.known["torch._C._current_graph_task_id"]])
    version = re.escape(torch.torch.__version__)
    return rf"^Not supported: torch {version} has no torch._C._current_graph_task_id "


@pytest.mark.parametrize("level", ["op", "state"])
def test_a_torch_that_lacks_a_name_refuses_to_record(lacks, level, tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.torch.optim.SGD(model.parameters())
    options = {"mode": "record", "level": level}
    with pytest.raises(UnsupportedVersionError, match=lacks):
        quiet_trainer(DeterminismCallback(tmp_path, **options)).fit(BoringModel())
    with pytest.raises(UnsupportedVersionError, match=lacks):
        TrainingRun(tmp_path, model=model, optimizers=optimizer, **options).__enter__()
    assert [*tmp_path.iterdir()] == []


def test_a_script_ends_with_status_2_when_it_imports_a_torch_that_lacks_a_name(lacks, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        launch._begin_with_torch(json.dumps({"settings": {}}), {})
    sentence = lacks.replace("^", "UnsupportedVersionError: ") + r".+\n"
    assert re.fullmatch(sentence, capsys.readouterr().err)


OF_OTHERS = ("lightning.pytorch.strategies.", "lightning.pytorch.utilities.")
OF_A_TRAINER = [path for path in LIGHTNING.readers if not path.startswith(OF_OTHERS)]


@pytest.mark.parametrize("path", OF_A_TRAINER)
def test_a_trainer_that_lacks_a_name_is_refused(path):
    trainer = quiet_trainer()
    lightning.require(trainer)
    name = path.rpartition(".")[2]
    before = list(LIGHTNING.missing)
    try:
        with pytest.raises(UnsupportedVersionError, match=rf"has no [\w.]+[.]{name} [(]"):
            lightning.require(Without(trainer, name))
    finally:
        LIGHTNING.missing[:] = before


class Without:
    """An object, and what can be reached from it, without one attribute."""

    def __init__(self, whole: Any, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return Without(getattr(self._whole, name), self._name)


def test_an_import_that_fails_says_why(monkeypatch):
    def fail(name: str) -> Any:
        raise AttributeError("type object 'torch._C.Tag' has no attribute 'out'")

    monkeypatch.delitem(vars(det_callbacks), "digest_tensor", raising=False)
    monkeypatch.setattr(det_callbacks, "import_module", fail)
    with pytest.raises(
        ImportError,
        match=r"det_callbacks\.digest\.components cannot be imported: type object 'torch",
    ):
        from det_callbacks import digest_tensor  # noqa: F401


WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from det_callbacks.cli import main
sys.exit(main(["doctor", "--json"]))
"""


def test_the_doctor_starts_where_the_packages_are_missing_that_other_commands_load():
    lost = "torch,lightning,numpy,pyarrow,msgspec"
    command = [sys.executable, "-c", WITHOUT, lost]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (2, "")
    broken = json.loads(done.stdout)["installation"]["broken"]
    said = {
        name
        for name in lost.split(",")
        if any(f"ModuleNotFoundError: import of {name} " in one for one in broken)
    }
    assert {"torch", "numpy"} <= said
    assert any("DeterminismCallback" in one for one in broken)


@pytest.mark.parametrize(
    ("found", "is_newer"),
    [
        ("2.16.0.dev20270101+cu130", True),
        ("2.17rc1", True),
        ("3", True),
        ("2.15.0a0+git1", False),
        ("2.9.1", False),
    ],
)
def test_any_version_that_a_package_may_have_is_compared(monkeypatch, found, is_newer):
    monkeypatch.setattr(
        versions, "version", lambda package: {"torch": found, "lightning": "2.6.6"}[package]
    )
    assert [line.partition(" is newer")[0] for line in versions.newer_than_tested()] == [
        f"torch {found}"
    ] * is_newer


def test_a_package_without_metadata_stops_no_run(monkeypatch):
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(versions, "version", version)
    assert versions.newer_than_tested() == []


def test_a_newer_version_than_any_that_was_tested_is_a_line(monkeypatch, capsys, tmp_path):
    assert versions.newer_than_tested() == []
    monkeypatch.setitem(versions.TESTED, "lightning", ("2.5", "2.4"))
    line = "is newer than any version that det_callbacks was tested with (2.4)"
    with det_callbacks.ObserverContext(tmp_path, "run"):
        det_callbacks.observe("x", 1)
    assert capsys.readouterr().out.count(line) == 1


def test_readme_docs_metadata_and_the_pairs_that_are_tested_say_the_same_versions():
    read = {
        name: (ROOT / name).read_text()
        for name in ("README.md", "pyproject.toml", "noxfile.py", "constraints.txt")
    }
    versions_page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    pairs = re.findall(r'nox[.]param\("([\d.]+)", "([\d.]+)"', read["noxfile.py"])
    for index, (package, title) in enumerate({"torch": "torch", "lightning": "Lightning"}.items()):
        oldest, newest = versions.TESTED[package]
        tested = sorted(
            (pair[index] for pair in pairs), key=lambda text: [*map(int, text.split("."))]
        )
        assert (minor(tested[0]), minor(tested[-1])) == (oldest, newest)
        assert f"{title} {oldest} to {newest}" in read["README.md"]
        assert f"| {title} | {oldest} to {newest}" in versions_page
        assert f'"{package}>={oldest}' in read["pyproject.toml"]
        assert f"\n{package}=={tested[-1]}\n" in read["constraints.txt"]
    pythons = re.findall(r"Python :: (3[.]\d+)", read["pyproject.toml"])
    assert f'requires-python = ">={pythons[0]}"' in read["pyproject.toml"]
    assert f"NEWEST_PYTHON := {pythons[-1]}\n" in (ROOT / "Makefile").read_text()
    assert f"Python {pythons[0]} to {pythons[-1]}" in read["README.md"]
    assert f"| Python | {pythons[0]} to {pythons[-1]} |" in versions_page
    matrix = re.search(r"python: (\[.*\])", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert matrix is not None, "CI runs no Python by name"
    assert json.loads(matrix[1]) == pythons


def test_the_page_of_versions_has_each_dependency_with_its_lowest_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = re.findall(
        r"^[|] (.+?) [|] (.+?) [|] \d+ [|]", (ROOT / "docs/reference/versions.md").read_text(), re.M
    )
    told = {
        name: lowest
        for names, versions_of in table
        for name, lowest in zip(names.split(", "), _versions(versions_of), strict=True)
    }
    bounds = {
        one.name: min(part.version for part in one.specifier if part.operator == ">=")
        for one in map(Requirement, project["dependencies"])
    }
    assert told == bounds


def _versions(cell: str) -> list[str]:
    return cell.partition(", not ")[0].split(", ")


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
