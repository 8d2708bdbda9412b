"""Digests of host memory and of files: at the borders, and in threads."""

import threading

import numpy as np
import pytest

from det_callbacks import host_digest as host
from det_callbacks.host_digest import digest_bytes

KIB = 1024
MIB = 1024 * KIB


def random_bytes(num_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def test_a_third_level_is_the_digest_of_the_hashes_below_it() -> None:
    # Three levels need 8 GiB: feed the join with as many leaf hashes as those would have.
    hashes = [value * 0x9E3779B97F4A7C15 % 2**64 for value in range(32769)]
    packed = np.asarray(hashes, dtype="<u8").tobytes()
    assert len(packed) > 256 * KIB
    assert host._join_leaves(hashes) == digest_bytes(packed)


def test_every_contiguous_buffer_is_taken_and_nothing_else() -> None:
    array = np.array([[1, 2], [3, 4]], dtype=np.uint8)
    for buffer in (bytearray(b"\1\2\3\4"), memoryview(b"\0\1\2\3\4")[1:], array, array.reshape(-1).view("<u4")):
        assert digest_bytes(buffer) == digest_bytes(b"\1\2\3\4")
    for buffer in (np.arange(10)[::2], np.zeros((600, 600))[:, 1:]):
        with pytest.raises(ValueError, match="C-contiguous"):
            digest_bytes(buffer)
    for value in ("text", 5, None):
        with pytest.raises(TypeError, match="bytes-like"):
            digest_bytes(value)


def test_many_spans_are_hashed_by_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    both_started = threading.Barrier(2, timeout=60)
    leaf_hashes = host._leaf_hashes

    def noted(piece: tuple[int, int]) -> list[int]:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            both_started.wait()
        return leaf_hashes(piece)

    sizes = [0, 1, 1024, 5 * MIB + 3, 0, 300_000, 12 * MIB, 17]
    arrays = [np.frombuffer(random_bytes(size, seed), dtype=np.uint8) for seed, size in enumerate(sizes)]
    expected, before = [digest_bytes(array.tobytes()) for array in arrays], threading.enumerate()
    monkeypatch.setattr(host, "_leaf_hashes", noted)
    assert host.digest_spans([(array.ctypes.data, array.nbytes) for array in arrays]) == expected
    assert (len(seen), threading.enumerate()) == (2, before), "they have ended"


def test_where_no_thread_can_be_started_the_digest_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    data = random_bytes(17 * MIB)
    expected = digest_bytes(data)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert digest_bytes(data) == expected
