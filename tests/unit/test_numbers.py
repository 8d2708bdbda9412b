"""By how much two tensors differ: against a count of one element at a time
in Python's own numbers.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._comparison import default_tolerances

from det_callbacks.digest import numbers
from det_callbacks.digest.components import measure_tensors

FLOATS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
ALL = (*FLOATS, *INTEGERS)


def of_bits(bits: Sequence[int], dtype: torch.dtype) -> Tensor:
    data = b"".join(word.to_bytes(dtype.itemsize, "little") for word in bits)
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def bytes_of(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), dtype=np.uint8)


def measured(one: Tensor, other: Tensor, **options: Any) -> numbers.Measure:
    names = str(one.dtype).removeprefix("torch."), str(other.dtype).removeprefix("torch.")
    return numbers.measure(bytes_of(one), bytes_of(other), names, **options)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.dtype, list[int], list[int]]:
    dtype = draw(st.sampled_from(ALL))
    top = 1 << (8 * dtype.itemsize - 1)
    words = st.one_of(
        st.integers(0, 2 * top - 1), st.sampled_from([0, 1, top - 1, top, top + 1, 2 * top - 1])
    )
    first = draw(st.lists(words, max_size=12))
    second = [draw(st.one_of(st.just(word), words, st.just(word ^ 1))) for word in first]
    return dtype, first, second


def unit(size: float, dtype: torch.dtype) -> float:
    """Return the distance from a number of a dtype to the next larger one."""
    info = torch.finfo(dtype)
    return max(math.ldexp(info.eps, math.frexp(size)[1] - 1), info.smallest_normal * info.eps)


@settings(max_examples=150, deadline=None)
@given(pairs(), st.sampled_from([3, 1 << 20]))
def test_it_measures_what_a_loop_over_the_elements_finds(case, chunk):
    dtype, first, second = case
    one, other = of_bits(first, dtype), of_bits(second, dtype)
    with mock.patch.object(numbers, "CHUNK_ELEMENTS", chunk):
        found = measured(one, other)
    differing = [
        index
        for index, (left, right) in enumerate(zip(first, second, strict=True))
        if left != right
    ]
    assert (found.num_elements, found.num_differing) == (len(first), len(differing))
    assert (found.first or [None])[0] == min(differing, default=None)
    values = [*zip(one.double().tolist(), other.double().tolist(), strict=True)]
    finite = [at for at in differing if all(map(math.isfinite, values[at]))]
    nan = [at for at in differing if any(map(math.isnan, values[at]))]
    assert (found.num_nan, found.num_inf) == (len(nan), len(differing) - len(finite) - len(nan))
    apart = {at: abs(values[at][0] - values[at][1]) for at in finite}
    if dtype in INTEGERS:
        apart = {at: abs(one[at].item() - other[at].item()) for at in finite}
    whole = [left for left, _ in values if math.isfinite(left)]
    size = math.sqrt(
        min(sum(value * value for value in whole), sys.float_info.max) / max(len(first), 1)
    )
    scales = {at: max(abs(values[at][0]), size) or abs(values[at][1]) for at in finite}
    ulps: dict[int, float] = {
        at: apart[at] if dtype in INTEGERS else apart[at] / unit(scales[at], dtype) for at in finite
    }
    known = [at for at in finite if math.isfinite(apart[at]) and math.isfinite(ulps[at])]
    relative = {at: apart[at] / scales[at] if apart[at] else 0 for at in finite}
    for largest, sizes in (
        (found.max_ulps, ulps),
        (found.max_absolute, apart),
        (found.max_relative, relative),
    ):
        most = max(sizes.values(), default=math.inf)
        exactly = (
            math.ceil(most) if sizes is ulps and most < math.inf else pytest.approx(most, rel=1e-9)
        )
        assert largest == (None if most == math.inf else exactly)
    bins = Counter(
        min(math.ceil(ulps[at]).bit_length(), 64) if ulps[at] < math.inf else 64 for at in finite
    )
    bins[0] += len(first) - len(differing)
    assert Counter(dict(enumerate(found.histogram))) == bins
    both_nan = [at for at in nan if all(map(math.isnan, values[at]))]
    assert found.num_unknown == len(differing) - len(known) - len(both_nan)
    if found.num_unknown:
        assert (found.ulp, found.relative, found.absolute, found.excess) == (
            None,
            None,
            None,
            math.inf,
        )
    else:
        assert (found.ulp, found.absolute) == (found.max_ulps or 0, found.max_absolute or 0)
        rtol, atol = default_tolerances(dtype)
        is_within = all(
            not apart[at] or apart[at] <= atol + rtol * abs(values[at][0]) for at in known
        )
        assert (found.excess <= 1 + 1e-12) >= is_within >= (found.excess <= 1 - 1e-12)
    if found.worst is None:
        return
    _, worst, texts = found.worst
    infinite = [at for at in differing if at not in finite]
    assert worst == (nan or infinite or [at for at in finite if ulps[at] == max(ulps.values())])[0]
    for text, side in zip(texts, (one, other), strict=True):
        again = torch.tensor(float(text), dtype=torch.float64).to(dtype).to(torch.float64)
        assert math.isnan(float(text)) or dtype in INTEGERS or float(again) == float(side[worst])


@pytest.mark.parametrize("dtype", [dtype for dtype in ALL if dtype.itemsize <= 2], ids=str)
def test_every_number_of_the_narrow_dtypes_is_read_as_torch_reads_it(dtype):
    bits = torch.arange(1 << 8 * dtype.itemsize).to(
        {1: torch.uint8, 2: torch.uint16}[dtype.itemsize]
    )
    found = numbers._values(bits.numpy(), str(dtype).removeprefix("torch."))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        found = found.astype(np.float64)
    np.testing.assert_array_equal(found, bits.view(dtype).to(torch.float64).numpy())


def test_places_are_row_major_whatever_the_strides():
    one = torch.arange(12.0).reshape(3, 4)
    other = one.clone()
    other[2, 1] = 90
    other[1, 3] = torch.nextafter(other[1, 3], torch.tensor(math.inf))
    for left, right in (
        (one, other),
        (one.t().contiguous().t(), other),
        (one, other.t().contiguous().t()),
    ):
        found = measure_tensors(left, right)
        assert (found.first, found.worst[1:]) == ((7, ("7.0", "7.0000005")), (9, ("9.0", "90.0")))
        assert (found.max_absolute, found.max_relative, found.histogram[:2]) == (81.0, 9.0, (10, 1))


BYTES = torch.tensor([1, 2], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), (0, None)),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]), (1, 2 << 23)),
        (torch._neg_view(torch.ones(2)), -torch.ones(2), (0, None)),
        (torch.ones(2, requires_grad=True), torch.ones(2), (0, None)),
        (torch.arange(12.0).reshape(3, 4)[:1, 1], torch.tensor([2.0]), (1, 1 << 23)),
        (torch.empty(0, 3), torch.empty(0, 3), (0, None)),
        (BYTES.view(torch.float4_e2m1fn_x2), (BYTES * 2).view(torch.float4_e2m1fn_x2), (2, None)),
    ],
)
def test_views_and_gradients_and_packed_elements(one, other, expected):
    found = measure_tensors(one, other)
    assert (found.num_differing, found.max_ulps) == expected
    assert found.excess > 1 or not found.num_differing, (
        "different bits without a distance are not within a tolerance"
    )


def test_what_float64_does_not_hold_is_neither_equal_nor_given(monkeypatch):
    monkeypatch.setattr(numbers, "CHUNK_ELEMENTS", 3)
    found = measure_tensors(torch.tensor([2**62]), torch.tensor([2**62 + 1]))
    assert (found.num_differing, found.max_ulps, found.max_absolute) == (1, 1, 1.0)
    assert found.first == (0, (str(2**62), str(2**62 + 1)))
    largest = torch.finfo(torch.float64).max
    one, other = torch.tensor([[largest, 1.0], [-largest, 2.0]], dtype=torch.float64)
    for left, right in ((one, other), (one.flip(0), other.flip(0))):
        found = measure_tensors(left, right)
        assert (found.num_differing, found.num_inf) == (2, 0)
        assert (found.max_absolute, found.max_relative) == (None, None)


def test_what_has_no_elements_in_common_is_refused():
    for one, other in (
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2).double()),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
    ):
        with pytest.raises(ValueError, match=r"in common|ordinary strided"):
            measure_tensors(one, other)


def test_an_ulp_is_one_of_the_element_or_of_the_size_of_its_tensor():
    one = torch.tensor([4.0, 1e-9, 3.0, -4.0])
    other = torch.tensor([4.0, -1e-9, 3.0, -4.0])
    found = measured(one, other)
    assert (found.ulp, found.absolute) == (1, 2 * one[1].double())
    assert found.relative == pytest.approx(2e-9 / (41 / 4) ** 0.5, rel=1e-6)
    other[2:3] += 5 * 2**-22
    assert measured(one, other).ulp == 5
    sample = measured(one[1:2], other[1:2], root_mean_square=(41 / 4) ** 0.5)
    assert (sample.ulp, sample.num_elements) == (1, 1)


def test_two_dtypes_are_compared_by_their_numbers_in_those_of_the_coarser():
    one = torch.randn(1000)
    found = measured(one, one.bfloat16())
    assert found.ulp == 1
    assert found.relative < 2**-8
    assert not measured(one.bfloat16(), one.bfloat16().float()).num_differing
    assert measured(one.bfloat16(), (one * 1.1).float()).ulp > 10
    with pytest.raises(ValueError, match="have no partners"):
        measured(one, one[1:])


@pytest.mark.parametrize(
    "dtype", [*ALL, torch.bool, torch.complex64, torch.complex32, torch.complex128], ids=str
)
def test_the_tolerances_are_those_of_torch_testing(dtype):
    assert tuple(
        numbers.default_tolerance(str(dtype).removeprefix("torch."))
    ) == default_tolerances(dtype)
    if dtype.is_floating_point:
        assert numbers.epsilon(str(dtype).removeprefix("torch.")) == torch.finfo(dtype).eps
