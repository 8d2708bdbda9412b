"""The hook that waits for an import: it acts once, after the module was executed,
whatever came before.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from det_callbacks.integrations.launch import _after_import

NAME = "awaited_module"


def look_up() -> None:
    assert importlib.util.find_spec(NAME) is not None
    assert importlib.util.find_spec(NAME) is not None
    importlib.import_module(NAME)


def load_lazily() -> None:
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.value == 1


def fail_and_try_again() -> None:
    path = Path(sys.path[0], f"{NAME}.py")
    source = path.read_text()
    path.write_text("raise ImportError('half-way')")
    with pytest.raises(ImportError, match="half-way"):
        importlib.import_module(NAME)
    path.write_text(source + "# of another size, so that no cached bytecode is used")
    importlib.import_module(NAME)


def import_in_a_thread() -> None:
    thread = threading.Thread(target=importlib.import_module, args=(NAME,))
    thread.start()
    thread.join()


def reload() -> None:
    importlib.reload(importlib.import_module(NAME))


def execute_a_spec_twice() -> None:
    """As a tool does that runs a module under another name."""
    spec = importlib.util.find_spec(NAME)
    importlib.import_module(NAME)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: Any) -> Iterator[list[Any]]:
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders, found = [*sys.meta_path], list[Any]()

    def note(module: ModuleType) -> None:
        found.append(vars(module).get("value"))

    _after_import(NAME, note)
    yield found
    assert sys.meta_path == finders, "it leaves once it has acted"
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize(
    "way",
    [look_up, load_lazily, fail_and_try_again, import_in_a_thread, reload, execute_a_spec_twice],
)
def test_an_import_is_seen_once_and_after_the_module_was_executed(
    way: Callable[[], None], seen: list[Any]
) -> None:
    way()
    assert seen == [1]
    loader = sys.modules[NAME].__spec__.loader  # type: ignore[union-attr]
    assert "exec_module" not in vars(loader)


def test_a_module_that_is_imported_already_is_seen_at_once() -> None:
    seen = list[ModuleType]()
    _after_import("json", seen.append)
    assert [module.__name__ for module in seen] == ["json"]
