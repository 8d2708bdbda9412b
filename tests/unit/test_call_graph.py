"""The program of a step follows from the step alone; what the recorder keeps from
step to step only saves work.
"""

import json
import math
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from types import FrameType
from typing import Any

import pytest
import torch
from numerics_models import Transformer
from torch import Tensor, nn
from tracing import assert_same, position_of, site_of, step_of, traced

from det_callbacks.compare.ranks import compare_steps
from det_callbacks.runs.program import plain_value
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.trace import call_graph
from det_callbacks.trace.call_graph import CallGraph
from det_callbacks.trace.hash_mode import HashMode

X = torch.ones(3)


def steps_of(body, values, **selection):
    mode = HashMode(**selection)
    return [step_of(mode, lambda value=value: body(value)) for value in values]


def numbers_of(trace: StepTrace, op: str) -> dict[str, Any]:
    sites = enumerate(trace.program.sites)
    position, site = next(
        found for found in sites if found[1].role == "argument" and found[1].op == f"aten.{op}"
    )
    bits = int(trace.digests[position])
    if bits in trace.values:
        return dict(zip(site.varying, json.loads(trace.values[bits]), strict=True))
    (name,) = site.varying
    return {name: bits}


def addmm(beta: float, alpha: float) -> Tensor:
    return torch.addmm(X, torch.ones(3, 3), torch.ones(3, 3), beta=beta, alpha=alpha)


def bits(value: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def test_numbers_belong_to_the_step_and_all_else_to_the_program():
    trace = traced(
        lambda: torch.ones(2, 3, dtype=torch.float64, device="cpu").sum(dim=(0, 1), keepdim=True)
    )
    assert json.loads(site_of(trace, "ones.default").arguments) == {
        "dtype": "torch.float64",
        "device": "cpu",
        "pin_memory": False,
        "layout": None,  # a default, which the call left out
    }
    assert json.loads(site_of(trace, "sum.dim_IntList").arguments) == {
        "keepdim": True,
        "dtype": None,
    }
    assert numbers_of(trace, "ones.default") == {"size": [2, 3]}
    assert numbers_of(trace, "sum.dim_IntList") == {"dim": [0, 1]}
    # one number has its own 64 bits, and several have one digest
    assert numbers_of(traced(lambda: torch.mul(X, 0.1)), "mul.Tensor") == {"other": bits(0.1)}
    assert numbers_of(traced(lambda: addmm(0.5, 2)), "addmm.default") == {"beta": 0.5, "alpha": 2}
    assert json.loads(site_of(traced(lambda: torch.add(X, X)), "add.Tensor").arguments) == {
        "alpha": 1
    }
    assert plain_value(torch.device("cuda", 3)) == "cuda", "ranks share programs"


@pytest.mark.parametrize(
    "values",
    [(1, 1.0, True, 1 + 0j), (0.0, -0.0), (0, False, 0.0), (math.nan, math.inf), (2, 2.0)],
    ids=str,
)
def test_equal_numbers_that_are_not_the_same_are_told_apart(values):
    for op, body in (
        ("mul.Tensor", lambda value: torch.mul(X, value)),
        ("_foreach_mul.ScalarList", lambda value: torch._foreach_mul([X, X], [0.5, value])),
    ):
        found = []
        for trace in steps_of(body, values):
            rows = zip(
                trace.program.sites, trace.digests.tolist(), trace.layout.entries, strict=True
            )
            found.append(
                (
                    site_of(trace, op).arguments,
                    [row[1:] for row in rows if row[0].role == "argument"],
                )
            )
        assert all(one != other for one, other in pairwise(found))


@pytest.mark.parametrize(
    "arguments", [[math.nan] * 20, [[math.nan, 1.0]] * 20, [-0.0] * 20, [*range(2, 22)]]
)
def test_other_numbers_and_lengths_are_the_same_program_and_what_is_kept_is_bounded(
    arguments, monkeypatch
):
    monkeypatch.setattr("det_callbacks.trace.call_graph.MAX_TEXT", 40)

    def step(value: float | list[float]) -> None:
        if isinstance(value, list):
            torch._foreach_add([X, X], [float(str(item)) for item in value])
        else:
            torch.add(X, float(str(value)))
            torch.full((2,), value)
            addmm(value, 2)
        if isinstance(value, int):
            torch.arange(value)
            torch.ones(2, value).softmax(value % 2)

    mode = HashMode()
    first = step_of(mode, lambda: step(arguments[0]))
    num_nodes = mode.recorder.step.graph.num_nodes
    traces = [step_of(mode, lambda value=value: step(value)) for value in arguments]
    assert mode.recorder.step.graph.num_nodes == num_nodes
    assert sum(map(len, mode.recorder.step.graph.values.values())) <= 40
    assert_same(first, traces[0])


def test_arguments_by_another_name_are_another_call():
    values = torch.tensor([0.5, 1.0])
    first, second, third = steps_of(
        lambda name: torch.searchsorted(values, values, **{name: True}),
        ["right", "out_int32", "right"],
    )
    shown = [
        json.loads(site_of(trace, "searchsorted.Tensor").arguments) for trace in (first, second)
    ]
    assert [(found["right"], found["out_int32"]) for found in shown] == [
        (True, False),
        (False, True),
    ]
    assert third.program is first.program


def test_numbers_are_shown_and_where_their_text_is_lost_the_op_is_no_origin():
    one, other = (trace.view() for trace in steps_of(lambda value: addmm(value, 2), [0.5, 0.25]))
    assert [*compare_steps(one, other).arguments.values()] == [{"beta": ("0.5", "0.25")}]
    (found,) = compare_steps(replace(one, read_values=dict), other).divergences
    assert (found.kind, found.is_origin) == ("content", None)


# A step has the same program in a process that is new, after other steps, while it
# verifies, and after a resume


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, length: int) -> None:
    torch.manual_seed(length)
    optimizer.param_groups[0]["lr"] = 0.1 / length
    optimizer.zero_grad()
    model(torch.arange(2 * length).reshape(2, length) % 20).flatten(0, 1).logsumexp(
        -1
    ).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_program_is_a_function_of_the_step_alone(optimizer):
    # its inputs may have another length in each step
    model = nn.Sequential(
        Transformer(width=8, layers=1), nn.Dropout(0.5), nn.LeakyReLU(0.3), nn.Softmax(1)
    )
    update = optimizer(model.parameters(), lr=0.1)
    train_step(model, update, 3)  # the optimizer makes its state
    tensors = [
        *model.parameters(),
        *(value for state in update.state.values() for value in state.values()),
    ]
    saved = [tensor.detach().clone() for tensor in tensors]

    def trace_after(lengths: list[int], expected: Expectation | None = None) -> StepTrace:
        mode = HashMode(model)
        mode.optimizers = [update]
        for length in lengths:
            step_of(mode, lambda length=length: train_step(model, update, length))
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)
        torch.manual_seed(5)
        return step_of(mode, lambda: train_step(model, update, 5), expected=expected)

    fresh = trace_after([])
    assert_same(fresh, trace_after([2, 9, 5, 2]))
    assert_same(fresh, trace_after([], Expectation.of(fresh.digests)))
    assert_same(fresh, trace_after([4], Expectation.of(traced(lambda: X.exp()).digests)))


# A detour is found back: what follows it is what followed it before


class SkippingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(self.up(self.norm(inputs)).relu())


class SkippingNet(nn.Module):
    """Blocks of which some are skipped in each step, as in LayerDrop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(SkippingBlock() for _ in range(5)), nn.Linear(4, 2)

    def forward(self, inputs: Tensor, taken: tuple[bool, ...]) -> Tensor:
        for block, is_taken in zip(self.blocks, taken, strict=True):
            if is_taken:
                inputs = block(inputs)
        return self.head(inputs)


def skipping_step(
    model: SkippingNet, optimizer: torch.optim.Optimizer, taken: tuple[bool, ...]
) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 4), taken).logsumexp(-1).mean().backward()
    optimizer.step()


def test_steps_that_skip_blocks_at_random_are_not_built_anew(monkeypatch):
    built: list[str] = []
    settle = CallGraph._give_rows
    monkeypatch.setattr(
        CallGraph,
        "_give_rows",
        lambda graph, node: (built.append(str(node.func)), settle(graph, node))[1],
    )
    model = SkippingNet()
    update = torch.optim.AdamW(model.parameters(), lr=0.01)
    skipping_step(model, update, (True,) * 5)  # the optimizer makes its state
    mode = HashMode(model)
    mode.optimizers = [update]
    every = [*product((True, False), repeat=5)]
    few = [taken for taken in every if sum(taken) <= 2 or sum(taken) == 5]
    for taken in few:  # each pair of blocks that may follow one another is among them
        step_of(mode, lambda taken=taken: skipping_step(model, update, taken))
    programs = {}
    num_built = []
    for taken in every * 2:
        built.clear()
        trace = step_of(mode, lambda taken=taken: skipping_step(model, update, taken))
        assert programs.setdefault(taken, trace.program.id) == trace.program.id
        num_built.append(sum(func.startswith("aten.") for func in built))
    # ops are known by what they are and read, whatever came before them
    assert sum(num_built[:32]) <= 8, (
        "but for sums of gradients that came from other blocks than before"
    )
    assert sum(num_built[32:]) == 0
    assert len(set(programs.values())) == len(every)
    fresh = HashMode(model)
    fresh.optimizers = [update]
    last = step_of(fresh, lambda: skipping_step(model, update, every[5]))
    assert last.program.id == programs[every[5]]


@pytest.mark.parametrize("call", [lambda: torch.zeros(1), lambda: X.exp(), lambda: X.exp().sum(0)])
def test_equal_calls_cost_as_much_as_different_ones(call):
    def num_lines(num_calls: int) -> list[int]:
        """Return how many lines of the graph each step runs; some steps lack an op and a call."""
        mode = HashMode()
        lines: list[int] = []
        for skips in (False, True, False, True, False):
            lines.append(0)

            def count(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
                lines[-1] += event == "line"
                return count if frame.f_code.co_filename == call_graph.__file__ else None

            def body(skips: bool = skips) -> None:
                for number in range(num_calls):
                    if number == num_calls // 2 and not skips:
                        X.sin()
                        call()
                    call()

            before = sys.gettrace()
            sys.settrace(count)
            try:
                step_of(mode, body)
            finally:
                sys.settrace(before)
        return lines

    for few, many in zip(num_lines(100), num_lines(400), strict=True):
        assert many < 5 * few


def test_what_is_read_from_another_call_is_another_program_and_a_divergence():
    def step(number: int) -> None:
        clones = torch.full((3,), 0.5).clone(), torch.full((3,), 0.25).clone()
        clones[number].exp()

    mode = HashMode()
    traces = one, other, again = [
        step_of(mode, lambda number=number: step(number)) for number in (0, 1, 0)
    ]
    assert one.program.id != other.program.id
    assert one.program is again.program
    read = [site_of(trace, "exp.default").inputs for trace in traces]
    assert read == [(position_of(one, "clone.default", number),) for number in (0, 1, 0)]
    (found,) = compare_steps(one.view(), other.view()).divergences
    assert found.op == "aten.exp.default"


@pytest.mark.parametrize("values", [(1, 1.0, True), (0.0, -0.0)], ids=str)
def test_equal_constants_that_are_not_the_same_are_told_apart_behind_a_detour(values):
    def step(number: int) -> None:
        if number % 2:
            torch.sin(X)
        torch._foreach_mul([X, X], [0.5, values[number % len(values)]])

    mode = HashMode()
    for number in range(2 * len(values)):
        trace = step_of(mode, lambda number=number: step(number))
        assert_same(trace, traced(lambda number=number: step(number)))


def test_tensors_that_are_overwritten_are_told_apart_behind_a_detour():
    model = nn.BatchNorm1d(3)  # its buffers have one shape

    def step(skips: bool) -> None:
        if not skips:
            model.running_mean.zero_()
        model.running_var.zero_()

    mode = HashMode(model)
    for skips in (False, True, False):
        trace = step_of(mode, lambda skips=skips: step(skips))
        assert_same(trace, traced(lambda skips=skips: step(skips), model=model))
        written = [site.name for site in trace.program.sites if site.op == "aten.zero_.default"]
        assert written == ["running_mean", "running_var"][skips:]


def test_steps_are_the_same_after_all_calls_were_forgotten(monkeypatch):
    monkeypatch.setattr("det_callbacks.trace.call_graph.MAX_BYTES", 100_000)

    functions = (torch.sin, torch.cos, torch.tan, torch.tanh, torch.abs, torch.neg, torch.sqrt)

    def step(number: int) -> None:
        part = X.exp()
        for _ in range(20):
            part = functions[number % 7](part)
            part = part + X[: number % 2 + 2].sum() if number % 5 else part * number

    mode = HashMode()
    graph = mode.recorder.step.graph
    num_forgotten = 0
    for number in range(60):
        before = graph.num_bytes
        trace = step_of(mode, lambda number=number: step(number))
        num_forgotten += graph.num_bytes < before
        assert graph.num_bytes <= 100_000 + 60 * 2000
        assert_same(trace, traced(lambda number=number: step(number)))
    assert num_forgotten > 5


def test_a_step_that_is_too_much_by_itself_is_known_in_the_next_one(monkeypatch):
    monkeypatch.setattr("det_callbacks.trace.call_graph.MAX_BYTES", 1000)
    mode = HashMode()
    first, second = [step_of(mode, lambda: [X.exp() for _ in range(9)]) for _ in range(2)]
    assert second.program is first.program
    num_nodes = mode.recorder.step.graph.num_nodes
    for function in (
        torch.sin,
        torch.cos,
        torch.tan,
        torch.tanh,
        torch.abs,
        torch.neg,
        torch.sqrt,
        torch.sign,
    ):
        step_of(mode, lambda function=function: [function(X) for _ in range(3)])
    assert mode.recorder.step.graph.num_nodes < 2 * num_nodes
