import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from det_callbacks.digest import ulps
from det_callbacks.digest.ulps import count_differing

UNSIGNED_OF = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
NO_NEGATIVE_ZERO = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


def of_bits(bits: Sequence[int], dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        part = {torch.complex64: torch.float32, torch.complex128: torch.float64}[dtype]
        return torch.view_as_complex(of_bits(bits, part).reshape(-1, 2).contiguous())
    data = b"".join(word.to_bytes(dtype.itemsize, "little") for word in bits)
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def place(bits: int, dtype: torch.dtype) -> int:
    """Return where a number stands, by counting: how many numbers lie between it and zero."""
    width = 8 * dtype.itemsize
    sign, magnitude = bits >> (width - 1), bits & ((1 << (width - 1)) - 1)
    if dtype in FLOATS or dtype in NO_NEGATIVE_ZERO:
        if dtype in NO_NEGATIVE_ZERO and sign and not magnitude:
            return 1 << (width - 1)  # its one NaN
        return -magnitude if sign else magnitude
    if dtype in (torch.bool, torch.float8_e8m0fnu) or not dtype.is_signed:
        return bits
    return bits - (1 << width) if sign else bits


def reference(first: Sequence[int], second: Sequence[int], dtype: torch.dtype) -> tuple[int, int]:
    """Return the count and the distance, one element at a time in Python's own integers."""
    part = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    width = 2 if dtype.is_complex else 1
    num, largest = 0, 0
    for start in range(0, len(first), width):
        pairs = [*zip(first[start : start + width], second[start : start + width], strict=True)]
        if any(one != other for one, other in pairs):
            num += 1
            largest = max(largest, *(abs(place(one, part) - place(other, part)) for one, other in pairs))
    return num, largest


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.dtype, list[int], list[int]]:
    dtype = draw(
        st.sampled_from(
            [*FLOATS, *NO_NEGATIVE_ZERO, torch.float8_e8m0fnu, *INTEGERS, torch.complex64, torch.complex128]
        )
    )
    width = 8 * dtype.itemsize // (2 if dtype.is_complex else 1)
    top = 1 << (width - 1)
    words = st.one_of(st.integers(0, (1 << width) - 1), st.sampled_from([0, 1, top - 1, top, top + 1, 2 * top - 1]))
    first = draw(st.lists(words, max_size=12))
    if dtype.is_complex:
        first = first[: len(first) // 2 * 2]
    second = [draw(st.one_of(st.just(word), words, st.just(word ^ 1))) for word in first]
    return dtype, first, second


@settings(max_examples=150, deadline=None)
@given(pairs(), st.sampled_from([1, 3, 1 << 20]))
def test_it_counts_as_the_reference_does(case, chunk):
    dtype, first, second = case
    one, other = of_bits(first, dtype), of_bits(second, dtype)
    before = ulps.CHUNK_ELEMENTS
    ulps.CHUNK_ELEMENTS = chunk
    try:
        assert count_differing(one, other) == reference(first, second, dtype)
    finally:
        ulps.CHUNK_ELEMENTS = before


@settings(max_examples=200, deadline=None)
@given(st.floats(max_value=1e308, allow_nan=False, allow_infinity=False), st.integers(1, 5))
def test_the_distance_counts_steps_to_the_next_number(number, steps):
    other = number
    for _ in range(steps):
        other = math.nextafter(other, math.inf)
    distance = count_differing(*(torch.tensor([x], dtype=torch.float64) for x in (number, other)))
    assert distance == (1, steps)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([0.0], [-0.0], (1, 0)),
        ([1.0, 2.0], [1.0, 2.0], (0, 0)),
        ([math.inf], [3.4028234663852886e38], (1, 1)),
        ([-math.inf], [math.inf], (1, 2 * 0x7F800000)),
    ],
)
def test_zeros_and_infinities(first, second, expected):
    assert count_differing(torch.tensor(first), torch.tensor(second)) == expected


def test_a_nan_with_another_payload_differs():
    one = torch.tensor([0x7FC00000, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00000, 0x7FC00005], dtype=torch.int32).view(torch.float32)
    assert count_differing(one, other) == (1, 5)
    number_or_nan = count_differing(torch.tensor([1.0]), torch.tensor([math.nan]))
    assert number_or_nan == (1, 0x7FC00000 - 0x3F800000)


def test_bools_and_strides_and_views():
    assert count_differing(torch.tensor([True, False]), torch.tensor([False, False])) == (1, 1)
    one = torch.arange(12.0).reshape(3, 4)
    assert count_differing(one.t(), one.t().contiguous()) == (0, 0)
    assert count_differing(one[:, 1], one[:, 1] + 1)[0] == 3
    assert count_differing(torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])) == (0, 0)
    assert count_differing(torch.tensor([1 + 2j]), torch.tensor([1 - 2j])) == (1, 2 * 0x40000000)
    assert count_differing(torch._neg_view(torch.ones(2)), -torch.ones(2)) == (0, 0)
    assert count_differing(torch.tensor(3), torch.tensor(5)) == (1, 2)
    assert count_differing(torch.empty(0, dtype=torch.complex64), torch.empty(0, dtype=torch.complex64)) == (0, 0)


def test_packed_dtypes_have_a_count_but_no_distance():
    bits = torch.tensor([1, 2], dtype=torch.uint8)
    one, other = (x.view(torch.float4_e2m1fn_x2) for x in (bits, bits + torch.tensor([0, 1], dtype=torch.uint8)))
    assert count_differing(one, other) == (1, None)


@pytest.mark.parametrize(
    "other",
    [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2).to_sparse()],
    ids=["shape", "dtype", "layout"],
)
def test_what_has_no_elements_in_common_is_refused(other):
    with pytest.raises(ValueError, match="compare"):
        count_differing(torch.ones(2), other)


def test_gradients_are_not_in_the_way():
    one = torch.ones(2, requires_grad=True)
    assert count_differing(one, one * 1.0) == (0, 0)
