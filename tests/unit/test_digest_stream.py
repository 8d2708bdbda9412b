"""Digests of bytes that come in pieces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from det_callbacks.digest import DigestStream, digest_bytes, format_digest
from det_callbacks.host_digest import LEAF_BYTES


@pytest.mark.parametrize(
    ("content", "digest"),
    [
        (b"", "2d06800538d394c2"),
        (b"det_callbacks", "5b204b2228acc0be"),
        (bytes(range(256)) * 4, "a870f92984398d22"),
        (bytes(range(256)) * 1025, "76cb951e13b3ab59"),
    ],
)
def test_the_bits_are_fixed(content: bytes, digest: str) -> None:
    stream = DigestStream()
    for start in range(0, len(content), 1000):
        stream.update(content[start : start + 1000])
    assert format_digest(stream.value()) == digest


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(0, 3000), st.sampled_from([LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 2 * LEAF_BYTES])),
        max_size=8,
    ),
    st.integers(0, 100),
)
def test_pieces_of_any_size_are_the_whole(sizes: list[int], seed: int) -> None:
    content = np.random.default_rng(seed).bytes(sum(sizes))
    stream, start = DigestStream(), 0
    for size in sizes:
        stream.update(memoryview(content)[start : start + size])
        start += size
        assert stream.value() == digest_bytes(content[:start])  # asking in between changes nothing
    assert stream.num_bytes == len(content)
    assert stream.value() == digest_bytes(content)


def test_buffers_that_are_not_bytes_count_by_their_bytes() -> None:
    numbers = np.arange(1000, dtype=np.int64)
    stream = DigestStream()
    stream.update(numbers)
    assert (stream.value(), stream.num_bytes) == (digest_bytes(numbers), 8000)
    with pytest.raises(TypeError):
        stream.update(numbers[::2])
    with pytest.raises(TypeError):
        stream.update("text")
