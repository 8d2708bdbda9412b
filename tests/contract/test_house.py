"""House rules that no tool checks: words, banners, broad excepts, and what recipes use."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# Words that another one stands for everywhere: reference and current, origin, digest.
BANNED_WORDS = frozenset({"golden", "baseline", "snapshot", "actual", "actuals", "gold"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ANY_BANNED = re.compile("|".join(sorted(BANNED_WORDS)), re.IGNORECASE)

# Handlers of everything that do not end in raise, by file and function: each says why nothing is lost by it.
BROAD_HANDLERS: Mapping[str, str] = {
    "callback/verifying.py _report": "a page that cannot be made must not hide the divergence that is raised next",
    "equivalence.py _copied_twice": "a check that cannot be made must not stop the program; it is counted",
    "equivalence.py _run_again": "what only another run raises is not the program's; it is counted",
    "ranks/group.py gather": "what one rank raises is told to the others, and then raised",
}

# Recipes use public names; who measures or shows the engine itself says so here.
PRIVATE_IN_RECIPES: Mapping[str, str] = {
    "overhead/bandwidth.py digest": "measures the digests themselves",
    "overhead/bandwidth.py digest.device.deferred": "likewise, without the wait for them",
    "overhead/ours.py runs.writer": "measures what a step leaves on disk",
    "overhead/run.py digest": "says how the device's digests were computed",
    "scale/synthetic.py runs.peers": "likewise",
    "scale/synthetic.py runs.program": "writes runs without a training",
    "scale/synthetic.py runs.manifest": "likewise",
    "scale/synthetic.py runs.writer": "likewise",
}


def sources(*folders: str) -> dict[str, str]:
    """Return the Python files of folders of the repository: path -> source."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def banned_words(source: str) -> list[str]:
    """Return the identifiers of a source that hold a banned word."""
    if not _ANY_BANNED.search(source):  # a tokenizer in Python takes a hundred times as long
        return []
    names = [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == 1]
    return [name for name in names if BANNED_WORDS & {word.lower() for word in _WORD.findall(name)}]


def _is_broad(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_is_broad(item) for item in kind.elts)
    return kind is None or ast.unparse(kind).rpartition(".")[2] in ("Exception", "BaseException")


def _goes_on(body: list[ast.stmt]) -> bool:
    last = body[-1]
    if isinstance(last, ast.If):
        return not last.orelse or _goes_on(last.body) or _goes_on(last.orelse)
    return not isinstance(last, ast.Raise)


def silent_handlers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield function and line of each handler of every exception that does not end in raise."""

    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and _goes_on(node.body):
            yield function, node.lineno
        if isinstance(node, ast.With | ast.AsyncWith):
            for call in (item.context_expr for item in node.items):
                is_suppress = isinstance(call, ast.Call) and ast.unparse(call.func).endswith("suppress")
                if is_suppress and any(_is_broad(argument) for argument in call.args):
                    yield function, node.lineno
        if not isinstance(node, ast.expr):  # none holds a statement
            waiting += [(child, function) for child in ast.iter_child_nodes(node)]


def banners(source: str) -> list[str]:
    """Return the comments that draw a line; ruff finds those that put something off."""
    return re.findall(r"#.*(?:[-=]{4}|[#*]{4})", source)


def private_imports(tree: ast.Module) -> list[str]:
    """Return the modules of det_callbacks that are imported other than through its public names."""
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return [name for name in names if name.startswith("det_callbacks.")]


def test_one_idea_has_one_word_and_no_comment_is_a_banner() -> None:
    for path, text in sources("det_callbacks", "recipes", "tests").items():
        assert banned_words(text) == banners(text) == [], path


def test_nothing_catches_everything_and_goes_on_and_recipes_use_public_names() -> None:
    trees = {path: ast.parse(text) for path, text in sources("det_callbacks", "recipes").items()}
    found = {f"{path} {function}": line for path, tree in trees.items() for function, line in silent_handlers(tree)}
    assert {place.removeprefix("det_callbacks/") for place in found} == set(BROAD_HANDLERS), found
    used = {f"{path} {name}" for path, tree in trees.items() for name in private_imports(tree)}
    private = {use.removeprefix("recipes/").replace(" det_callbacks.", " ") for use in used if "recipes/" in use}
    assert private == set(PRIVATE_IN_RECIPES)


def silent(source: str) -> list[tuple[str, int]]:
    return list(silent_handlers(ast.parse(source)))


def private(source: str) -> list[str]:
    return private_imports(ast.parse(source))


TRY = "try:\n    f()\n"
RAISES = "    if g():\n        raise\n"
OTHER_WORDS = "def read_snapshot(GoldenRun, *, num_actual):\n    'A snapshot.'\n    return actually, XMLBaseline"
IMPORTS = "from det_callbacks import HashMode\nimport det_callbacks.trace\nfrom det_callbacks.digest import host"


@pytest.mark.parametrize(
    ("rule", "source", "num_found"),
    [
        (banned_words, OTHER_WORDS, 4),
        (silent, f"{TRY}except Exception:\n    pass", 1),
        (silent, f"{TRY}except:\n    log()", 1),
        (silent, f"{TRY}except (ValueError, BaseException) as error:\n    return_value = error", 1),
        (silent, f"{TRY}except builtins.Exception:\n{RAISES}", 1),
        (silent, "with contextlib.suppress(Exception):\n    f()", 1),
        (silent, f"{TRY}except BaseException:\n    undo()\n    raise", 0),
        (silent, f"{TRY}except Exception:\n{RAISES}    else:\n        raise OSError from None", 0),
        (silent, f"{TRY}except ValueError:\n    pass", 0),
        (banners, "? ---- part two ----\n?????\n? x".replace("?", "#"), 2),
        (private, IMPORTS, 2),
    ],
)
def test_each_rule_finds_what_it_forbids_and_nothing_else(rule: Any, source: str, num_found: int) -> None:
    assert len(rule(source)) == num_found
