"""The table of torch's ops: a sample of them is examined again,
and the page is made of what was found.
"""

import importlib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from recipe_modules import find_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "ops_table"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    find_recipe(RECIPE, monkeypatch)
    return importlib.import_module("run")


def examined(table: ModuleType, *words: str) -> dict[str, Any]:
    """Return the results of the recipe in another process: torch's database of ops
    forbids to set backend flags.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        results: dict[str, Any] = pool.submit(table.main, ["--device", "cpu", *words]).result()
    return results


def test_the_page_is_made_of_the_results_that_are_there(table):
    assert table.PAGE.read_text() == table.page(table.stored())
    found = {"run": ["forward"], "threads": ["forward", "backward"]}
    devices = {
        "cpu": {
            "machine": "one",
            "date": "today",
            "torch": "2",
            "ops": {"one": {"samples": 1, "problem": "", "found": found}},
        }
    }
    page = table.page(devices)
    assert "| `one` | run (forward); threads (forward, backward) |" in page
    assert "| cpu | one | today | 2 | 1 | 1 | 1 |" in page
    assert len(table.machine("cpu").split(", ")) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sample_of_the_ops_says_what_the_page_says(table):
    results = examined(table, "--sample", "60")
    assert sum(bool(one["samples"]) for one in results.values()) >= 50
    assert not any("run" in one["found"] for one in results.values()), (
        "an op on one thread did not repeat itself"
    )
    stored = table.stored()["cpu"]
    if stored["torch"] == torch.__version__:
        # threads take their turns by chance, and addresses are the allocator's
        for name, one in results.items():
            assert ("memory" in one["found"]) == ("memory" in stored["ops"][name]["found"]), name


@pytest.mark.slow
def test_each_condition_is_seen(table):
    results = examined(table, "--only", "empty", "sum")
    assert results["empty"]["found"]["memory"] == ["forward"]
    assert results["sum"]["found"] == {"threads": ["forward"]}
