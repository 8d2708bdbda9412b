"""A plugin that runs every test as on a device that yields digests late: ``PYTHONPATH=tests pytest -p all_late``.

Tests that call programs are not changed by it, nor those that count calls or patch what it patches.
"""

from collections.abc import Iterator

import pytest
from late_device import late_device


@pytest.fixture(autouse=True)
def _all_tensors_on_a_late_device() -> Iterator[None]:
    with late_device():
        yield
