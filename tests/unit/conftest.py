"""What tests of settings and of numerics start from, and must leave."""

from collections.abc import Iterator

import pytest
import torch
from process_state import VARIABLES, process_state


@pytest.fixture
def same_process_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = process_state()
    yield
    assert process_state() == before, "a test of settings left something behind"


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Compute in one thread: a second one only waits for its core where tensors are small."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
