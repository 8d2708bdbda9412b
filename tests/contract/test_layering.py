"""The package's layers: imports go downwards only, and each heavy dependency has its few places."""

import ast
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

import pytest
from test_house import sources

PACKAGE = "det_callbacks"

# Lowest first; a module may import what stands in its own layer or below it.
# A cycle of modules cannot be imported.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "internals", "text", "verdict"),
    ("digest",),
    ("runs",),
    ("environment", "environment.hydra", "settings"),
    ("native",),
    ("trace",),
    ("tensors", "audit", "compare"),
    ("causes", "findings", "report", "checkpoint", "ranks", "numerics", "observers", "verify"),
    ("training",),
    ("integrations.command", "integrations.loop", "integrations.seen", "cli"),
    ("integrations.followed", "integrations.torch_steps"),
    ("integrations", "integrations.huggingface", "integrations.lightning", "integrations.hydra"),
    ("huggingface", "integrations.launch", "integrations.pytest_runs"),
    ("integrations.pytest_plugin",),
    ("integrations.startup",),
    ("__init__", "__main__"),
)

_OF_TORCH = (
    "audit checkpoint digest environment internals native numerics observers ranks settings "
    "tensors trace training integrations.huggingface integrations.lightning integrations.loop "
    "integrations.followed integrations.torch_steps"
)
# Who may import a dependency, by the first part of its name.
ONLY_IN: Mapping[str, Sequence[str]] = {
    "torch": _OF_TORCH.split(),
    "lightning": ("integrations.lightning", "internals"),
    "pytorch_lightning": (),
    "transformers": ("integrations.huggingface",),
    "hydra": ("integrations.hydra", "environment.hydra"),
    "rich": ("report", "cli"),
}


def imports(source: str, *, with_types: bool = False) -> list[tuple[str, int]]:
    """Return what a module imports, wherever in it, with the lines;
    what only types need is left out by default.

    ruff wants absolute names.
    """
    tree = ast.parse(source)
    for node in [] if with_types else [*ast.walk(tree)]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    nodes = [*ast.walk(tree)]
    found = [
        (alias.name, node.lineno)
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    return found + [
        (str(node.module), node.lineno) for node in nodes if isinstance(node, ast.ImportFrom)
    ]


def package_sources() -> dict[str, str]:
    """Return the source of each module by dotted name; a package goes by its own name."""
    paths = {
        path.removesuffix(".py").removesuffix("/__init__"): text
        for path, text in sources(PACKAGE).items()
    }
    return {path.replace("/", "."): text for path, text in paths.items()}


def package_imports() -> dict[str, list[tuple[str, int]]]:
    return {module: imports(source) for module, source in package_sources().items()}


def circle(modules: Mapping[str, str]) -> list[str]:
    """Return modules each of which imports the next, and the last the first,
    be it for types alone; [] if none do.
    """
    needs = {
        name: {target for target, _ in imports(source, with_types=True)}
        for name, source in modules.items()
    }
    # ``from package import module`` names the package, and needs the module
    for name, source in modules.items():
        froms = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        needs[name] |= {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
    try:
        TopologicalSorter(
            {name: targets & modules.keys() - {name} for name, targets in needs.items()}
        ).prepare()
    except CycleError as error:
        return list(error.args[1][::-1])
    return []


def unit(module: str) -> str:
    """Return the part of the package that a module belongs to: the name that LAYERS uses."""
    if "." not in module:
        return "__init__"
    _, room, *inner = module.split(".")
    part = ".".join((room, *inner[:1]))
    # each way in is a part of its own: it may import its own framework, and no other
    return part if room == "integrations" or part == "environment.hydra" else room


def violations(modules: Mapping[str, Sequence[tuple[str, int]]]) -> list[str]:
    level = {name: index for index, layer in enumerate(LAYERS) for name in layer}
    found = [f"{name}: {unit(name)} is in no layer" for name in modules if unit(name) not in level]
    for name, (target, line) in ((name, item) for name, items in modules.items() for item in items):
        where, top = f"{name}:{line} imports {target}", target.split(".")[0]
        if top in ONLY_IN and unit(name) not in ONLY_IN[top]:
            found.append(f"{where}: only {', '.join(ONLY_IN[top]) or 'nobody'} may")
        if top == PACKAGE and level.get(unit(target), -1) > level.get(unit(name), -1):
            found.append(f"{where}: upwards")
    return found


def test_imports_go_downwards_only():
    modules = package_imports()
    assert len(modules) > 20
    assert violations(modules) == []


TAKES_APART = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "rpartition",
    "split",
}
READERS = ("compare", "causes", "findings", "report", "verify", "cli")


def test_what_a_row_is_of_is_taken_apart_only_where_rows_are_written_and_read():
    """The fields of a row say what it is of: ``Site.subject``, ``of`` and ``part``,
    ``EvidenceRow.kind`` and so on.
    """
    found = []
    for module, source in package_sources().items():
        if module.split(".")[1:2] not in [[room] for room in READERS]:
            continue
        for node in ast.walk(ast.parse(source)):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if (
                is_call
                and node.func.attr in TAKES_APART
                and isinstance(node.func.value, ast.Attribute)
            ):
                owner = node.func.value
                is_row = isinstance(owner.value, ast.Name) and owner.value.id in (
                    "site",
                    "row",
                    "one",
                    "divergence",
                )
                if is_row and owner.attr in ("name", "of", "part", "moment", "detail"):
                    found.append(f"{module}:{node.lineno}")
    assert found == []


def test_no_modules_import_each_other_in_a_circle_not_even_for_types():
    assert circle(package_sources()) == []


def test_no_rooms_import_each_other_in_a_circle():
    """The layers allow it within one of them; ``__init__`` and the ways in
    are parts of one room each.
    """
    rooms: dict[str, set[str]] = {}
    for module, found in package_imports().items():
        _, room, *_ = (*module.split("."), "__init__")
        targets = {target.split(".")[1] for target, _ in found if target.startswith(f"{PACKAGE}.")}
        rooms.setdefault(room, set()).update(targets - {room})
    TopologicalSorter(rooms).prepare()  # raises CycleError with the rooms


FOR_TYPES = "if TYPE_CHECKING:\n    from a.x import X"


@pytest.mark.parametrize("back", ["import a.x", "from a.x import X", "from a import x", FOR_TYPES])
def test_a_circle_of_modules_is_found(back):
    modules = {"a": "", "a.x": "from a import y", "a.y": "import a.z\nimport json", "a.z": back}
    first, second, third, again = circle(modules)
    assert first == again
    assert {(first, second), (second, third), (third, first)} == {
        ("a.x", "a.y"),
        ("a.y", "a.z"),
        ("a.z", "a.x"),
    }
    assert circle({**modules, "a.z": ""}) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("runs.store", "from det_callbacks.compare.align import align", "upwards"),
        ("digest.lanes", "import det_callbacks.trace.recorder", "upwards"),
        ("runs.store", "try:\n    import det_callbacks\nexcept ImportError:\n    pass", "upwards"),
        (
            "runs.store",
            "if TYPE_CHECKING:\n    pass\nelse:\n    from det_callbacks.cli import main",
            "upwards",
        ),
        (
            "runs.store",
            "import lightning.pytorch as pl",
            "only integrations.lightning, internals may",
        ),
        ("integrations.lightning", "import pytorch_lightning", "only nobody may"),
        (
            "runs.store",
            "class Run:\n    async def read(self):\n        import torch",
            "only audit, checkpoint",
        ),
        (
            "integrations.huggingface",
            "import lightning",
            "only integrations.lightning, internals may",
        ),
        ("training.arguments", "from det_callbacks.environment.hydra import job_choices", ""),
        (
            "training.arguments",
            "from det_callbacks.integrations.hydra import determinism_callback",
            "upwards",
        ),
        ("environment.hydra", "from det_callbacks.integrations.hydra.job import Job", "upwards"),
        ("helper.things", "", "in no layer"),
        ("trace.reads", "if TYPE_CHECKING:\n    from det_callbacks.cli import main", ""),
    ],
)
def test_the_rule_can_fail_and_pass(module, source, complaint):
    found = violations({f"{PACKAGE}.{module}": imports(source)})
    assert bool(found) is bool(complaint)
    assert all(complaint in line for line in found)


# Imports modules without any framework, by a module of None, which cannot be imported; then the
# others as well. Names those whose import draws from a generator of the host,
# which a training may share.
IMPORTING = """
import importlib, json, random, sys
import numpy as np

FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", "transformers", "hydra")

def states():
    return random.getstate(), str(np.random.get_state())

drawing = []
sys.modules.update(dict.fromkeys(FRAMEWORKS))
for modules in map(json.loads, sys.argv[1:]):
    for module in modules:
        before = states()
        importlib.import_module(module)
        drawing += [module] * (states() != before)
    for name in FRAMEWORKS:
        sys.modules.pop(name, None)
print(drawing)
"""


def test_what_a_run_is_needs_no_framework_and_no_import_draws_from_a_generator():
    without = [
        module for module in package_imports() if unit(module) in ("training", "integrations.loop")
    ]
    assert len(without) > 10
    needs_transformers = ("det_callbacks.huggingface", "det_callbacks.integrations.huggingface")
    others = [
        name
        for name in package_sources()
        if name not in needs_transformers and "startup" not in name
    ]
    assert "det_callbacks.report.console" in others
    command = [sys.executable, "-c", IMPORTING, json.dumps(without), json.dumps(others)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
