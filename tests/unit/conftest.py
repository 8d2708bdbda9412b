"""What tests of settings start from, and must leave."""

from collections.abc import Iterator

import pytest
from process_state import VARIABLES, process_state


@pytest.fixture
def same_process_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = process_state()
    yield
    assert process_state() == before, "a test of settings left something behind"
