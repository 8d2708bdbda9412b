"""By how much two tensors differ: against a count of one element at a time in Python's own numbers."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from det_callbacks.digest import ulps
from det_callbacks.digest.numbers import tensor_numbers
from det_callbacks.digest.ulps import count_differing
from det_callbacks.verdict import TensorNumbers

LABEL = TensorNumbers(tensor="output 0", name="net.weight")
FLOATS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def bits_of(tensor: Tensor) -> list[int]:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]).tolist()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    dtype = draw(st.sampled_from(list(FLOATS)))
    width = dtype.itemsize * 8
    words = st.integers(-(1 << (width - 1)), (1 << (width - 1)) - 1)
    special = [torch.tensor(value, dtype=dtype) for value in (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0)]
    words = st.one_of(words, st.sampled_from([int(one.view(FLOATS[dtype])) for one in special]))
    first = draw(st.lists(words, min_size=1, max_size=12))
    second = [draw(st.one_of(st.just(word), st.just(word ^ 1), words)) for word in first]
    return tuple(torch.tensor(side, dtype=FLOATS[dtype]).view(dtype) for side in (first, second))


@settings(max_examples=80, deadline=None)
@given(pairs(), st.sampled_from([1, 3, 1 << 20]))
def test_it_counts_what_a_loop_over_the_elements_counts(pair: tuple[Tensor, Tensor], chunk: int) -> None:
    one, other = pair
    before, ulps.CHUNK_ELEMENTS = ulps.CHUNK_ELEMENTS, chunk
    try:
        found = tensor_numbers(LABEL, one, other)
    finally:
        ulps.CHUNK_ELEMENTS = before
    differing = [index for index, (a, b) in enumerate(zip(bits_of(one), bits_of(other), strict=True)) if a != b]
    assert found.num_differing == len(differing)
    values = [(float(a), float(b)) for a, b in zip(one.tolist(), other.tolist(), strict=True)]
    nans = [index for index in differing if any(math.isnan(side) for side in values[index])]
    infinities = [index for index in differing if index not in nans and any(math.isinf(side) for side in values[index])]
    assert (found.num_nan, found.num_inf) == (len(nans), len(infinities))
    finite = [index for index in differing if index not in nans and index not in infinities]
    distance = {index: count_differing(one[index : index + 1], other[index : index + 1])[1] or 0 for index in finite}
    bins = Counter(value.bit_length() for value in distance.values())
    bins[0] += len(values) - len(differing)
    assert Counter({index: number for index, number in enumerate(found.ulps) if number}) == +bins
    assert sum(found.ulps) + found.num_nan + found.num_inf == one.numel() == found.num_elements
    assert found.max_ulps == max(distance.values(), default=None)
    assert found.max_absolute == max((abs(values[index][0] - values[index][1]) for index in finite), default=None)
    relative = [abs(values[i][0] - values[i][1]) / abs(values[i][0]) for i in finite if values[i][0]]
    assert found.max_relative == max(relative, default=None)
    if not differing:
        assert found.first is found.worst is None
        return
    assert found.first == (differing[0],)
    worst = nans[0] if nans else infinities[0] if infinities else max(distance, key=lambda index: distance[index])
    assert found.worst == (worst,)
    assert found.worst_values is not None
    for text, side in zip(found.worst_values, (one, other), strict=True):
        again = torch.tensor(float(text), dtype=one.dtype)
        assert torch.equal(again, side[worst]) or (math.isnan(float(text)) and bool(side[worst].isnan()))


def test_indices_are_those_of_the_tensor_whatever_its_strides() -> None:
    one = torch.arange(12.0).reshape(3, 4)
    other = one.clone()
    other[2, 1] = 90
    other[1, 3] = torch.nextafter(other[1, 3], torch.tensor(math.inf))
    for left, right in ((one, other), (one.t().contiguous().t(), other), (one, other.t().contiguous().t())):
        found = tensor_numbers(LABEL, left, right)
        assert (found.tensor, found.name, found.shape, found.dtype) == ("output 0", "net.weight", (3, 4), "float32")
        assert (found.first, found.worst) == ((1, 3), (2, 1))
        assert found.first_values == ("7.0", "7.0000005")
        assert found.max_absolute == 81.0
        assert found.max_relative == 9.0
        assert found.ulps[:2] == (10, 1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.bool, torch.int8])
def test_whole_numbers_count_by_their_difference(dtype: torch.dtype) -> None:
    one, other = torch.tensor([0, 1], dtype=dtype), torch.tensor([1, 1], dtype=dtype)
    found = tensor_numbers(LABEL, one, other)
    assert (found.num_differing, found.max_ulps, found.max_absolute, found.max_relative) == (1, 1, 1.0, None)


def test_whole_numbers_beyond_float64_do_not_become_equal() -> None:
    one, other = torch.tensor([2**62]), torch.tensor([2**62 + 1])
    found = tensor_numbers(LABEL, one, other)
    assert (found.num_differing, found.max_ulps, found.max_absolute) == (1, 1, 1.0)
    assert found.first_values == (str(2**62), str(2**62 + 1))


def test_a_difference_beyond_float64_is_not_given() -> None:
    largest = torch.finfo(torch.float64).max
    one = torch.tensor([largest, 1.0], dtype=torch.float64)
    other = torch.tensor([-largest, 2.0], dtype=torch.float64)
    for chunk in (1, 2):
        before, ulps.CHUNK_ELEMENTS = ulps.CHUNK_ELEMENTS, chunk
        try:
            for left, right in ((one, other), (one.flip(0), other.flip(0))):
                found = tensor_numbers(LABEL, left, right)
                assert (found.num_differing, found.num_inf) == (2, 0)
                assert (found.max_absolute, found.max_relative) == (None, None)
        finally:
            ulps.CHUNK_ELEMENTS = before


def test_complex_and_narrow_numbers() -> None:
    found = tensor_numbers(LABEL, torch.tensor([1 + 2j]), torch.tensor([1 + complex(0, math.nan)]))
    assert (found.num_differing, found.num_nan, found.ulps) == (1, 1, ())
    narrow = torch.tensor([0.25, 0.5]).to(torch.float8_e4m3fn)
    other = torch.tensor([0.25, 0.5625]).to(torch.float8_e4m3fn)
    found = tensor_numbers(LABEL, narrow, other)
    assert (found.num_differing, found.max_ulps, found.first, found.max_absolute) == (1, 1, (1,), 0.0625)
    scalar = tensor_numbers(LABEL, torch.tensor(1.0), torch.tensor(2.0))
    assert (scalar.first, scalar.shape) == ((), ())
    assert tensor_numbers(LABEL, torch.empty(0, 3), torch.empty(0, 3)).num_differing == 0


def test_what_has_no_elements_in_common_is_refused() -> None:
    for one, other in (
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2).double()),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
    ):
        with pytest.raises(ValueError, match=r"in common|ordinary strided"):
            tensor_numbers(LABEL, one, other)


def test_they_survive_json() -> None:
    found = tensor_numbers(LABEL, torch.tensor([1.0, math.nan]), torch.tensor([2.0, 1.0]))
    assert TensorNumbers.from_dict(found.to_dict()) == found
    assert hash(TensorNumbers.from_dict(found.to_dict())) == hash(found)
