import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_callbacks.digest import digest_memory, digest_rows
from det_callbacks.trace.named import digest_samples

NUM_SAMPLES = 6


@given(
    nbytes=st.sampled_from([1, 3, 8, 255, 1023, 1024, 1025, 3000]), num_rows=st.integers(1, 5), seed=st.integers(0, 99)
)
def test_rows_have_the_digests_of_their_bytes(nbytes, num_rows, seed):
    rows = np.random.default_rng(seed).integers(0, 256, (num_rows, nbytes), dtype=np.uint8)
    assert digest_rows(rows.ctypes.data, num_rows, nbytes) == [digest_memory(row.ctypes.data, nbytes) for row in rows]


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 5), (300,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.complex64], ids=str)
def test_samples_do_not_depend_on_their_order_and_on_nothing_less(dtype, shape):
    samples = (
        torch.arange(1, 1 + NUM_SAMPLES * max(1, torch.Size(shape).numel())).reshape(NUM_SAMPLES, *shape).to(dtype)
    )
    digest = digest_samples(samples)
    assert digest is not None
    assert digest_samples(samples.flip(0)) == digest
    assert digest_samples(samples.repeat(2, *[1] * len(shape))[::2]) != digest
    changed = samples.clone()
    changed.view(-1)[-1] = 0
    assert digest_samples(changed) != digest


def test_repeated_samples_count():
    assert digest_samples(torch.tensor([1, 1, 2])) != digest_samples(torch.tensor([1, 2, 2]))
