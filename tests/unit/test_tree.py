import json
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from tracing import assert_same, site_of, step_of, traced, with_role

from det_callbacks.runs.program import plain_value, scalar_bits
from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.arguments import comparable
from det_callbacks.trace.hash_mode import HashMode


def steps_of(body, values, **selection):
    """Return the traces of one step for each value, all in one mode."""
    mode = HashMode(**selection)
    return [step_of(mode, lambda value=value: body(value)) for value in values]


def argument_digests(trace: StepTrace) -> list[int]:
    sites = zip(trace.program.sites, trace.digests, strict=True)
    return [int(digest) for site, digest in sites if site.role == "argument"]


def bits(value: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", value))[0]


X = torch.ones(3)


def test_constant_arguments_stand_in_the_site():
    trace = traced(lambda: torch.addmm(torch.ones(2), torch.ones(2, 2), torch.ones(2, 2), beta=0.5, alpha=2))
    assert json.loads(site_of(trace, "addmm.default").arguments) == {"beta": 0.5, "alpha": 2}
    trace = traced(lambda: torch.ones(2, 3, dtype=torch.float64, device="cpu").sum(dim=(0, 1), keepdim=True))
    assert json.loads(site_of(trace, "ones.default").arguments) == {
        "size": [2, 3],
        "dtype": "torch.float64",
        "device": "cpu",
        "pin_memory": False,
        "layout": None,  # a default, which the call left out
    }
    assert json.loads(site_of(trace, "sum.dim_IntList").arguments) == {"dim": [0, 1], "keepdim": True, "dtype": None}


def test_no_device_index_in_the_arguments():
    assert plain_value(torch.device("cuda", 3)) == "cuda"
    assert plain_value(torch.device("cpu", 0)) == "cpu"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 1e308, 2**62, True])
def test_any_number_stands_in_the_site(value):
    trace = traced(lambda: torch.mul(X, value))
    arguments = json.loads(site_of(trace, "mul.Tensor").arguments)
    known = arguments["other"]
    if isinstance(value, float) and not math.isfinite(value):
        assert known == repr(value)
    else:
        assert (type(known), repr(known)) == (type(value), repr(value))


def test_a_changing_number_becomes_a_site_with_its_own_bits():
    values = [0.1, 0.2, 0.3, 0.4]
    traces = steps_of(lambda value: torch.mul(X, value), values)
    assert [len(with_role(trace, "argument")) for trace in traces] == [0, 1, 1, 1]
    assert [argument_digests(trace) for trace in traces[1:]] == [[bits(value)] for value in values[1:]]
    assert len({trace.program.id for trace in traces}) == 2
    row = with_role(traces[3], "argument")[0]
    assert (row.op, row.varying) == ("aten.mul.Tensor", ("other",))
    assert site_of(traces[3], "mul.Tensor").varying == ("other",)
    assert json.loads(site_of(traces[3], "mul.Tensor").arguments) == {}


def test_arguments_settle_after_two_more_programs():
    def step(number: int) -> None:
        torch.mul(X, number)
        torch.arange(number + 2)
        torch.add(X, X, alpha=1 / (number + 1))
        torch.full((2,), number % 2)

    traces = steps_of(step, range(10))
    assert len({trace.program.id for trace in traces}) <= 3
    assert len({trace.program.id for trace in traces[3:]}) == 1


def test_several_changing_arguments_make_one_digest():
    def step(values: tuple[float, float]) -> None:
        torch.addmm(X, torch.ones(3, 3), torch.ones(3, 3), beta=values[0], alpha=values[1])

    traces = steps_of(step, [(3, 1.5), (5, 2.5), (5, 3.5)])
    assert [len(with_role(trace, "argument")) for trace in traces] == [0, 1, 1]
    assert with_role(traces[2], "argument")[0].varying == ("beta", "alpha")
    assert len({argument_digests(trace)[0] for trace in traces[1:]}) == 2


@pytest.mark.parametrize(
    "values",
    [(1, 1.0, True, 1 + 0j), (0.0, -0.0), (0, False, 0.0), (math.nan, math.inf), (2, 2.0)],
    ids=str,
)
def test_equal_numbers_that_are_not_the_same_are_told_apart(values):
    forms = {site_of(traced(lambda value=value: torch.mul(X, value)), "mul.Tensor").arguments for value in values}
    assert len(forms) == len(values)
    traces = steps_of(lambda value: torch.mul(X, value), values)
    assert argument_digests(traces[1]), "the second value was taken for the first"
    lists = steps_of(lambda value: torch._foreach_mul([X, X], [0.5, value]), values)
    seen = [(site_of(trace, "_foreach_mul.ScalarList").arguments, *argument_digests(trace)) for trace in lists]
    assert seen[0] != seen[1]


def test_a_signed_zero_is_told_apart_where_only_floats_are_taken():
    traces = steps_of(lambda value: torch.nan_to_num(X, nan=value), [0.0, -0.0])
    assert argument_digests(traces[1]) == [bits(-0.0)]


def test_a_changed_argument_beside_one_that_varies_is_seen():
    def step(values: tuple[float, float]) -> None:
        torch.addmm(X, torch.ones(3, 3), torch.ones(3, 3), beta=values[0], alpha=values[1])

    traces = steps_of(step, [(0.1, 2), (0.2, 2), (0.3, 2), (0.4, 2.0)])
    assert with_role(traces[2], "argument")[0].varying == ("beta",)
    assert with_role(traces[3], "argument")[0].varying == ("beta", "alpha")


@pytest.mark.parametrize("arguments", [[math.nan] * 20, [[math.nan, 1.0]] * 20, [math.inf] * 20, [-0.0] * 20])
def test_constant_odd_numbers_do_not_grow_the_tree(arguments):
    def step(value: float | list[float]) -> None:
        if isinstance(value, list):
            torch._foreach_add([X, X], [float(str(item)) for item in value])
        else:
            torch.add(X, float(str(value)))

    mode = HashMode()
    traces = []
    for value in arguments:
        traces.append(step_of(mode, lambda value=value: step(value)))
        if len(traces) == 1:
            num_events = mode.recorder.trie.num_nodes
    assert mode.recorder.trie.num_nodes == num_events
    assert_same(traces[0], traces[-1])


def test_arguments_by_another_name_are_another_call():
    values = torch.tensor([0.5, 1.0])
    mode = HashMode()
    first = step_of(mode, lambda: torch.searchsorted(values, values, right=True))
    second = step_of(mode, lambda: torch.searchsorted(values, values, out_int32=True))
    op = "searchsorted.Tensor"
    assert json.loads(site_of(first, op).arguments)["right"] is True
    assert "out_int32" in site_of(second, op).arguments + str(site_of(second, op).varying)
    third = step_of(mode, lambda: torch.searchsorted(values, values, right=True))
    assert third.program.id == first.program.id


def test_alternating_steps_find_their_programs_again():
    def step(number: int) -> None:
        torch.exp(X)
        if number % 2:
            torch.sin(X)
        torch.cos(X)

    mode = HashMode()
    traces = [step_of(mode, lambda number=number: step(number)) for number in range(8)]
    num_events = mode.recorder.trie.num_nodes
    assert len({trace.program.id for trace in traces}) == 2
    for number in range(8):
        again = step_of(mode, lambda number=number: step(number))
        assert again.program is traces[number].program
    assert mode.recorder.trie.num_nodes == num_events


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        places = torch.arange(tokens.shape[1], dtype=torch.float32) / tokens.shape[1]
        return self.head(self.attention(self.table(tokens) + places[:, None], src_mask=causal))


def test_random_lengths_keep_few_programs():
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mode = HashMode(model)
    lengths = torch.randint(2, 12, (16,)).tolist()

    def step(length: int) -> None:
        tokens = torch.arange(2 * length).reshape(2, length) % 20
        loss = model(tokens).flatten(0, 1).logsumexp(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    traces = [step_of(mode, lambda length=length: step(length)) for length in lengths]
    assert len({trace.program.id for trace in traces}) <= 5
    assert len({trace.program.id for trace in traces[4:]}) == 1
    assert len({trace.layout_id for trace in traces[4:]}) == len(set(lengths[4:]))


def test_the_tree_is_bounded(monkeypatch):
    monkeypatch.setattr("det_callbacks.trace.program_trie.MAX_NODES", 200)
    mode = HashMode()

    def step(number: int) -> None:
        for _ in range(number % 37):
            torch.exp(X)
        torch.sin(X)

    first = step_of(mode, lambda: step(5))
    for number in range(100):
        step_of(mode, lambda number=number: step(number))
        assert mode.recorder.trie.num_nodes <= 200 + 40
    assert_same(first, step_of(mode, lambda: step(5)))


@settings(max_examples=100, deadline=None)
@given(st.floats(allow_nan=True) | st.integers(-(2**70), 2**70) | st.booleans() | st.complex_numbers())
def test_every_number_has_a_form(value):
    word, tag = scalar_bits(value)
    assert 0 <= word < 2**64
    if tag == "float":
        assert struct.pack("<Q", word) == struct.pack("<d", value)
    elif tag == "int":
        assert word == value % 2**64
    json.dumps(plain_value(value), allow_nan=False)
    equal = comparable(value)
    assert equal == value or value != value
    assert equal == comparable(value)


def test_occurrences_are_counted_per_place():
    trace = traced(lambda: [torch.exp(X), torch.sin(X), torch.exp(X), torch.exp(X)])
    assert [site_of(trace, "exp.default", number).occurrence for number in range(3)] == [0, 1, 2]
    assert site_of(trace, "sin.default").occurrence == 0
