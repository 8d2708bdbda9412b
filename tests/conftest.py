"""Every test starts from the same seeds and leaves the process, and the repository's root, as it found them."""

import random
from collections.abc import Iterator
from typing import Any

import guards
import numpy as np
import pytest
import torch

# What torch.use_deterministic_algorithms imports when it is first called; the import sets TORCHINDUCTOR_CACHE_DIR and a
# warning filter of sympy, which would otherwise be charged to whichever test calls it first.
import torch._inductor.config
from compiling import compiling_anew, opaque_backend

_THINGS = guards.watched_things()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = guards.read_all(_THINGS)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    leaks = guards.put_back_leaks(_THINGS, before)
    if leaks:
        pytest.fail("the test left behind\n" + "\n".join(leaks), pytrace=False)


@pytest.fixture
def compiles_anew() -> Iterator[None]:
    with compiling_anew():
        yield


@pytest.fixture(
    params=[
        pytest.param("boxed", id="opaque"),
        pytest.param("aot_eager", marks=pytest.mark.slow),
        pytest.param("inductor", marks=pytest.mark.slow),
    ]
)
def backend(request: pytest.FixtureRequest) -> Any:
    """A compiler: one of which nothing is known, one that runs op after op, and the one that users use."""
    return opaque_backend() if request.param == "boxed" else request.param
