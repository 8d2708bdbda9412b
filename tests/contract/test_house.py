"""House rules that no tool checks: words, banners, lengths and names of files,
and what recipes use.
"""

import ast
import io
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Words that another one stands for everywhere: reference and current, origin, digest.
BANNED_WORDS = frozenset({"golden", "baseline", "snapshot", "actual", "actuals", "gold"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ANY_BANNED = re.compile("|".join(sorted(BANNED_WORDS)), re.IGNORECASE)

# Calls that change the disk, or look into a folder before: ``path.open("wb")``, ``path.iterdir()``,
# ``path.replace(other)`` (text and data take two arguments or names).
_WRITE = re.compile(
    r"""^\.(mkdir|makedirs|write_text|write_bytes|touch|rename|unlink|rmdir|copytree|copyfile|rmtree)\("""
    r"""|^\.(truncate|flock|iterdir|scandir|listdir)\("""
    r"""|^\.open\(['"][rb]*[wax+]|^\.open\((?!os\.devnull).*O_(WRONLY|RDWR|CREAT)|^\.replace\([^,=]*\)$"""
)

# Calls that open a file, and do what a link, a pipe or a device in its place does. ``open_file``,
# ``read_file`` and ``open_to_write`` do not; whatever reads or writes a folder that may come from
# somebody else uses them.
_OPEN = re.compile(
    r"""^(io\.)?open\(|^os\.open\(|\.(read_bytes|read_text)\(|\.open\(['"]|\.(from|to)file\("""
)
OPENS: Mapping[str, str] = {
    "det_callbacks/runs/files.py": (
        "is where files of runs are opened and is where they are opened for writing"
    ),
    "det_callbacks/tensors/files.py": "fromfile reads what open_file has opened",
    "det_callbacks/tensors/replay.py": "reads the patterns that the user wrote",
    "det_callbacks/compare/module_names.py": "reads the names that the user wrote",
    "det_callbacks/findings/table.py": "reads the project's pyproject.toml",
    "det_callbacks/cli/parser.py": "reads the project's pyproject.toml",
    "det_callbacks/cli/check.py": "reads what a script printed into a new folder",
    "det_callbacks/checkpoint/check.py": "loads the file that the user named, which may be a link",
    "det_callbacks/digest/host.py": "digests the file that the user named, which may be a link",
    "det_callbacks/native/build.py": "reads its own sources, and the library that it built",
    "det_callbacks/environment/capture.py": "reads the project's own files",
    "det_callbacks/settings/catalogue.py": "reads /proc",
    "det_callbacks/trace/compiled/kernels.py": "reads the module that inductor has generated",
    "det_callbacks/integrations/command.py": "exchanges messages in a folder that it has made",
}

DRAWERS = ("utils", "util", "common", "helpers", "helper", "misc")

# Recipes use public names; who measures or shows the engine itself says so here.
PRIVATE_IN_RECIPES: Mapping[str, str] = {
    "recipes/overhead/bandwidth.py": "measures the digests themselves",
    "recipes/overhead/ours.py": "measures what a step leaves on disk",
    "recipes/overhead/run.py": "says how the device's digests were computed",
    "recipes/scale/synthetic.py": "writes runs without a training",
}


def sources(*folders: str) -> dict[str, str]:
    """Return the Python files of folders of the repository: path -> source."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def banned_words(source: str) -> list[str]:
    if not _ANY_BANNED.search(source):  # a tokenizer in Python takes a hundred times as long
        return []
    names = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == 1
    ]
    return [name for name in names if BANNED_WORDS & {word.lower() for word in _WORD.findall(name)}]


def banners(source: str) -> list[str]:
    """Return the comments that draw a line; ruff finds those that put something off."""
    return re.findall(r"#.*(?:[-=]{4}|[#*]{4})", source)


def misfits(files: Mapping[str, str]) -> list[str]:
    """Return the files that are longer than the house allows,
    or whose name says that they hold no concept.
    """
    return [
        at
        for at, text in files.items()
        if len(text.splitlines()) > 700 or Path(at).stem.strip("_") in DRAWERS
    ]


def private_imports(source: str) -> list[str]:
    """Return the modules of det_callbacks that are imported other than through its public names."""
    nodes = [*ast.walk(ast.parse(source))]
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return [name for name in names if name.startswith("det_callbacks.")]


def unguarded_writes(source: str) -> list[int]:
    """Return the lines that change the disk outside of ``writing``,
    which makes one error of what can go wrong.
    """
    guarded: set[ast.AST] = set()
    tree, found = ast.parse(source), list[int]()
    for node in ast.walk(tree):
        calls = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
        if any(
            isinstance(call, ast.Call) and ast.unparse(call.func) == "writing" for call in calls
        ):
            guarded.update(ast.walk(node))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node not in guarded
        ):
            text = ast.unparse(node)
            if (
                _WRITE.search(text.removeprefix(ast.unparse(node.func.value)))
                and "ignore_errors=True" not in text
            ):
                found.append(node.lineno)
    return sorted(found)


def opens(source: str) -> list[int]:
    """Return the lines that open a file in a way that a link,
    a pipe or a device in its place can use.
    """
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        call.lineno for call in calls if _OPEN.search(ast.unparse(call.func) + "(" + _first(call))
    ]


def _first(call: ast.Call) -> str:
    return ast.unparse(call.args[0]) if call.args else ""


def test_files_of_a_run_are_opened_in_one_place():
    assert {path for path, text in sources("det_callbacks").items() if opens(text)} == set(OPENS)


def test_each_write_of_the_package_is_one_that_can_fail_well():
    files = sources("det_callbacks")
    assert {path: lines for path, text in files.items() if (lines := unguarded_writes(text))} == {}


def test_one_idea_has_one_word_no_comment_is_a_banner_and_no_file_is_too_long_or_a_drawer():
    files = sources("det_callbacks", "recipes", "tests")
    assert misfits(files) == []
    for path, text in files.items():
        assert banned_words(text) == banners(text) == [], path


def test_recipes_use_public_names():
    assert {path for path, text in sources("recipes").items() if private_imports(text)} == set(
        PRIVATE_IN_RECIPES
    )


def test_each_rule_finds_what_it_forbids_and_nothing_else():
    words = (
        "def read_snapshot(GoldenRun, *, num_actual):\n"
        "    'A snapshot.'\n"
        "    return actually, XMLBaseline"
    )
    imports = (
        "from det_callbacks import HashMode\n"
        "import det_callbacks.trace\n"
        "from det_callbacks.digest import host"
    )
    assert banned_words(words) == ["read_snapshot", "GoldenRun", "num_actual", "XMLBaseline"]
    assert len(banners("? ---- part two ----\n?????\n? x".replace("?", "#"))) == 2
    files = {"fine.py": "\n" * 700, "tests/long.py": "\n" * 701, "_utils.py": ""}
    assert misfits(files) == ["tests/long.py", "_utils.py"]
    writes = (
        "path.mkdir()\n"
        "with writing(path):\n"
        "    path.unlink()\n"
        "    path.open('wb')\n"
        "path.open('rb')\n"
        "x.open('ab')\n"
    )
    writes += "one.replace(other)\ntext.replace('a', 'b')\nrmtree(x)\nshutil.rmtree(x)\n"
    writes += "shutil.rmtree(x, ignore_errors=True)\nRun.open(path)\n"
    writes += (
        "os.open(x, os.O_RDWR)\n"
        "os.open(x, os.O_RDONLY)\n"
        "fcntl.flock(x, 2)\n"
        "any(x.iterdir())\n"
        "os.scandir(x)\n"
    )
    writes += "file.truncate(0)\nos.open(os.devnull, os.O_WRONLY)\n"
    assert unguarded_writes(writes) == [1, 6, 7, 10, 13, 15, 16, 17, 18]
    reads = (
        "open(path)\n"
        "path.open('rb')\n"
        "Run.open(path)\n"
        "path.read_bytes()\n"
        "open_file(path)\n"
        "os.open(path, 0)\n"
    )
    reads += (
        "np.fromfile(path)\n"
        "self.open()\n"
        "path.read_text()\n"
        "modules.open(sees_ops=True)\n"
        "read_text([source])"
    )
    assert opens(reads) == [1, 2, 4, 6, 7, 9]
    assert private_imports(imports) == ["det_callbacks.digest", "det_callbacks.trace"]
