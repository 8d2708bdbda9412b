"""Every test starts from the same seeds and leaves the process, and the
repository's root, as it found them.
"""

import gc
import os
import random
from collections.abc import Iterator

import guards
import numpy as np
import pytest
import replaced_page
import schemas
import torch

# What torch.use_deterministic_algorithms imports when it is first called; the import sets
# TORCHINDUCTOR_CACHE_DIR and a warning filter of sympy, which would otherwise be charged to
# whichever test calls it first.
import torch._inductor.config

from det_callbacks.internals.replaced import ReplacedMethods
from det_callbacks.verdict import Verdict

# Whether the native recorder has been built must not decide what other tests than its own see.
os.environ.setdefault("DET_CALLBACKS_RECORDER", "python")

# What a test writes need not outlive the machine, and waiting for the disk takes as long as a
# training: its files are only asked for, which fails for one that is closed as fsync does. A kill
# of a process loses nothing of them.
os.fsync = os.fstat  # type: ignore[assignment]

# The first backward pass of a process starts a thread for each device, and a fork of a process with
# such threads cannot run one. Without a GPU there is no device yet; once something was compiled, a
# build with CUDA pretends to have eight.
torch.ones(1, requires_grad=True).sum().backward()

# Every verdict that a test turns into JSON has the schema that the package ships.
Verdict.to_dict = schemas.checked(Verdict.to_dict, "verdict")

# Every method that a test's training replaces has a row, with the reason,
# on the page that lists them for users.
ReplacedMethods._set = replaced_page.checked(ReplacedMethods._set)


# What was imported stays for good. Without this each collection walks all of it,
# and so does each seeding.
def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


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
