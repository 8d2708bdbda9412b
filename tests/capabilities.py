"""What the CPU can do here: it is tried, since names of CPUs and of instruction sets do not say."""

from functools import cache

import pytest
import torch
from torch import nn


@cache
def _trains_bfloat16_lstm() -> bool:
    """Return whether oneDNN has a kernel for it: with AVX2 alone it has none (torch 2.13)."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.ones(1, 1, 2))
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        return False
    return True


def require_bfloat16_lstm() -> None:
    """Skip the test that calls this where no LSTM can be trained in bfloat16."""
    if not _trains_bfloat16_lstm():
        pytest.skip("oneDNN trains no LSTM in bfloat16 on this CPU")
