"""What tests of settings and of numerics start from, and must leave."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiling import compiles_anew as compiles_anew  # for tests that are marked with COMPILING
from compiling import opaque_backend
from guards import VARIABLES, process_state


@pytest.fixture
def same_process_afterwards(monkeypatch: Any) -> Iterator[None]:
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


@pytest.fixture(
    params=[pytest.param("boxed", id="opaque"), pytest.param("inductor", marks=pytest.mark.slow)]
)
def backend(request: pytest.FixtureRequest) -> Any:
    """A compiler: one that runs op after op, and the one that users use."""
    return opaque_backend() if request.param == "boxed" else request.param
