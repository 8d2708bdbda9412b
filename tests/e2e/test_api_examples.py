"""The examples in the docstrings of the public names, run as docs/reference/api.md says."""

import dataclasses
import doctest
import inspect
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import det_callbacks

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
(SETUP,) = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text())
OPTIONS = doctest.ELLIPSIS

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*does not have many workers", "ignore:.*dataloader is not resumable"
    ),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.* is deprecated"),
]


def examples_of(name: str) -> list[doctest.DocTest]:
    """Return the examples of a public name and of its methods."""
    found = doctest.DocTestFinder(exclude_empty=True).find(
        getattr(det_callbacks, name), name, globs={}
    )
    return [test for test in found if test.examples]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What the page tells a reader to run first: the folder that it leaves, and the names."""
    folder = tmp_path_factory.mktemp("setup")
    names = {name: getattr(det_callbacks, name) for name in det_callbacks.__all__}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(SETUP, names)
    return folder, names


NAMES = [
    pytest.param(name, marks=[pytest.mark.ddp] if name == "ReplicaAuditCallback" else [])
    for name in det_callbacks.__all__
]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_name_run(
    name,
    setup,
    tmp_path,
    monkeypatch,
    environment_again,
):
    folder, names = setup
    tests = examples_of(name)
    assert tests, f"{name} has no example"
    shutil.copytree(folder, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    said: list[str] = []
    with warnings.catch_warnings():
        for test in tests:
            assert not any(example.options.get(doctest.SKIP) for example in test.examples), (
                f"{name} skips its example"
            )
            test.globs = dict(names)
            doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append)
    assert not said, "".join(said)


def undescribed(value: Any) -> set[str]:
    """Return the arguments, the fields of a dataclass, or the data of an
    error that a docstring lacks.
    """
    text = inspect.getdoc(value) or ""
    if isinstance(value, type) and issubclass(value, BaseException):
        wanted = set(vars(value).get("_data", ()))  # not those of its base
    elif dataclasses.is_dataclass(value):
        bases = [base for base in value.__bases__ if dataclasses.is_dataclass(base)]
        inherited = {field.name for base in bases for field in dataclasses.fields(base)}
        wanted = {field.name for field in dataclasses.fields(value)} - inherited
    else:
        wanted = set(inspect.signature(value).parameters)
        if wanted and "Raises:" not in text:
            wanted.add("Raises")
    return (
        wanted
        - set(re.findall(r"(?m)^ +\*{0,2}(\w+): ", text))
        - set(re.findall(r"``(\w+)``", text))
    )


def test_the_docstrings_describe_each_argument_and_field():
    found = {
        name: missing
        for name in det_callbacks.__all__
        if (missing := undescribed(getattr(det_callbacks, name)))
    }
    assert found == {}


def test_an_argument_without_a_description_is_found():
    def one(first: int, second: int) -> None:
        """Do it.

        Args:
            first: a number.
        """

    assert undescribed(one) == {"second", "Raises"}
