"""What many tests compare with, recorded once, and what they leave as it was."""

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from checking import run_command as run_command  # for scripts
from compiling import compiles_anew as compiles_anew  # for tests that are marked with COMPILING
from faults import Deep, Training
from fits import record
from judged import one_verdict as one_verdict  # for every test


@pytest.fixture(scope="session")
def reference(tmp_path_factory: Any) -> Path:
    return record(tmp_path_factory.mktemp("reference") / "run")


@pytest.fixture(scope="session")
def references(tmp_path_factory: Any) -> Callable[..., Path]:
    @cache
    def recorded(model: Any = Deep, **options: Any) -> Path:
        return Training(model=model).record(tmp_path_factory.mktemp("reference") / "run", **options)

    return recorded


@pytest.fixture
def environment_again() -> Iterator[None]:
    """What ``seed_everything`` sets is as before after a test."""
    with mock.patch.dict(os.environ):
        yield
