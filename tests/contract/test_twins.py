"""What is asked of an object of Lightning is asked of ``pytorch_lightning``'s as well:
``isinstance(x, either(X))``.
"""

import ast
from collections.abc import Iterator

import pytest
from test_house import sources

ROOMS = ("lightning", "det_callbacks.internals.lightning")


def one_sided(source: str) -> list[int]:
    """Return the lines that look for a class of ``lightning`` alone."""
    tree = ast.parse(source)
    imported = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and is_of_lightning(node.module)
    ]
    names = {alias.asname or alias.name for node in imported for alias in node.names}
    names |= {"pl"} if "import lightning.pytorch as pl" in source else set()
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in TESTS
    ]
    return [call.lineno for call in calls if names & {*outside_either(call.args[-1])}]


TESTS = ("isinstance", "issubclass")


def is_of_lightning(module: str | None) -> bool:
    return module is not None and (module in ROOMS or module.startswith("lightning."))


def outside_either(node: ast.AST) -> Iterator[str]:
    """Yield the names in an expression, but for what is given to ``either``."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("either", "own_class"):
        return
    if isinstance(node, ast.Name):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from outside_either(child)


def test_no_class_of_lightning_is_looked_for_alone():
    found = {
        path: lines for path, text in sources("det_callbacks").items() if (lines := one_sided(text))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("from lightning.pytorch.callbacks import Timer\nisinstance(x, Timer)", [2]),
        ("from lightning.pytorch.callbacks import A, B\nisinstance(x, A | B)", [2]),
        ("from det_callbacks.internals.lightning import Loop\nisinstance(x, (int, Loop))", [2]),
        ("import lightning.pytorch as pl\nissubclass(x, pl.Trainer)", [2]),
        ("from lightning.pytorch.callbacks import Timer\nisinstance(x, either(Timer))", []),
        ("from det_callbacks.runs import Timer\nisinstance(x, Timer)", []),
    ],
)
def test_the_rule_can_fail_and_pass(source, lines):
    assert one_sided(source) == lines
