"""The digest's kernels on a GPU: the host's bits, and other streams."""

import device_cases
import pytest
import torch
from beta_tensors import BETA_DTYPES
from test_digest_device import add

from det_callbacks.digest.components import digest_output, digest_tensor, digest_tensors
from det_callbacks.digest.deferred import DigestQueue
from det_callbacks.digest.triton_digest import TritonDigest, device_choice

pytestmark = [pytest.mark.gpu, BETA_DTYPES]

MIB = 1 << 20
BUSY_CYCLES = 200_000_000
"""Some tenth of a second in which a stream gets no further."""


@pytest.fixture
def method() -> TritonDigest:
    choice = device_choice(torch.device("cuda", torch.cuda.current_device()))
    assert isinstance(choice.method, TritonDigest), choice
    return choice.method


def test_ten_thousand_random_tensors(method):
    for seed in range(10):
        there = device_cases.tensors(1000, largest=8 * MIB, seed=seed, device=torch.device("cuda"))
        here = device_cases.tensors(1000, largest=8 * MIB, seed=seed)
        assert digest_tensors(there) == digest_tensors(here)
        for one, other in zip(there[:50], here, strict=False):
            assert (digest_tensor(one), digest_output(one)) == (
                digest_tensor(other),
                digest_output(other),
            )


@pytest.mark.parametrize(
    "num_bytes", [(512 << 20) + 1, (3 << 30) + 5, (8 << 30) + 1], ids=lambda size: f"{size} bytes"
)
def test_tensors_whose_sums_do_not_fit(num_bytes, method):
    if torch.cuda.mem_get_info()[0] < 2 * num_bytes:
        pytest.skip("needs a GPU with twice as much free memory")
    value = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    assert digest_tensors([value[1:], value]) == digest_tensors([(host := value.cpu())[1:], host])


def test_memory_of_another_stream_is_not_given_away_before_it_was_read(method):
    """The digests' stream is behind, the memory is dropped,
    and its own stream would have it again at once.
    """
    side = torch.cuda.Stream()
    expected = [
        digest_tensor(torch.full((MIB,), number, dtype=torch.uint8)) for number in range(20)
    ]
    queue = DigestQueue(method)
    for number in range(20):
        value = torch.full((MIB,), number, dtype=torch.uint8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY_CYCLES // 20)
            add(queue, value)
            queue.flush()
        del value
        for _ in range(3):
            torch.full((MIB,), 255, dtype=torch.uint8, device="cuda")
    assert queue.finish() == expected


@pytest.mark.parametrize("is_flushed", [True, False], ids=["flushed", "pending"])
def test_a_write_on_another_stream_comes_after_the_reading(is_flushed, method):
    side = torch.cuda.Stream()
    value = torch.full((MIB,), 1, dtype=torch.uint8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    queue = DigestQueue(method)
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY_CYCLES)
        add(queue, value)
        if is_flushed:
            queue.flush()
    queue.before_write(value.untyped_storage())
    value.fill_(2)
    assert queue.finish() == [digest_tensor(torch.full((MIB,), 1, dtype=torch.uint8))]
