"""Modules that run in several threads of one step: what is recorded does not depend on which came first."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from threaded_models import SCHEDULES, Branch, Branches
from torch import nn
from tracing import assert_same, position_of, site_of, step_of, traced

from det_callbacks.runs.steps import MAX_INPUT_CHECKS, Expectation, StepTrace
from det_callbacks.trace.hash_mode import HashMode

INPUTS = torch.linspace(-1, 1, 12).view(3, 4)


def step(mode: HashMode, net: Branches, schedule: str, **beginning: object) -> StepTrace:
    net.schedule = schedule
    net.zero_grad()
    return step_of(mode, lambda: net(INPUTS).square().sum().backward(), **beginning)


@pytest.mark.parametrize("level", ["op", "module"])
@pytest.mark.parametrize(("num_branches", "has_stem"), [(2, True), (3, False)])
def test_the_order_of_threads_is_not_recorded(num_branches, has_stem, level):
    torch.manual_seed(0)
    net = Branches(num_branches, has_stem=has_stem)
    mode = HashMode(net, level=level)
    reference, *others = (step(mode, net, schedule) for schedule in SCHEDULES[num_branches] * 2)
    for other in others:
        assert_same(reference, other)
    modules = [site.module for site in reference.program.sites if site.op == "aten.addmm.default"]
    branches = [f"branches.{index}.{part}" for index in range(num_branches) for part in ("up", "down")]
    assert modules == ([*(["stem"] if has_stem else []), *branches, "head"] if level == "op" else [])
    found = {(site.phase, site.module) for site in reference.program.sites}
    assert {(phase, branch) for phase in ("forward", "backward") for branch in branches} <= found
    # the engine adds what comes back to the stem, and counts that as a part of what ran last
    sums = [site.module for site in reference.program.sites if site.phase == "backward" and "add." in site.op]
    assert sums == (["branches.0.up"] if has_stem and level == "op" else [])


@pytest.mark.parametrize("level", ["op", "module"])
def test_a_site_comes_after_all_that_it_reads_and_in_the_order_of_its_thread(level):
    net = Branches(3)
    for schedule in SCHEDULES[3]:
        program = step(HashMode(net, level=level), net, schedule).program
        assert all(read < position for position, site in enumerate(program.sites) for read in site.inputs)
        outputs = [site.module for site in program.sites if site.role == "named" and site.phase == "forward"]
        assert outputs == [
            "stem",
            *(f"branches.{index}{part}" for index in range(3) for part in (".up", ".down", "")),
            *("head", ""),
        ]


def differing(net: Branches, schedule: str, expected: StepTrace) -> tuple[list[str], list[bool]]:
    trace = step(HashMode(net), net, schedule, expected=Expectation.of(expected.digests))
    at = [at for at, site in enumerate(trace.program.sites) if "half" in site.op or "addmm" in site.op]
    other = [position for position in at if trace.digests[position] != expected.digests[position]]
    return [trace.program.sites[position].module for position in other], [one in trace.unseen_writes for one in other]


def test_a_difference_in_a_thread_is_an_origin_unless_its_input_was_written_unseen(
    monkeypatch,
):
    net = Branches(3)
    expected = step(HashMode(net), net, "001122")
    unchanged = Expectation.of(expected.digests)
    step(HashMode(net), net, "212100", expected=unchanged)
    assert unchanged.checks_left == MAX_INPUT_CHECKS, "what comes in another order only is not looked at"
    assert differing(net, "212100", expected) == ([], [])
    monkeypatch.setattr(Branch, "wrong", 1)
    assert differing(net, "212100", expected) == (["branches.1", "branches.1.down", "head"], [False] * 3)
    monkeypatch.setattr(Branch, "wrong", -1)
    monkeypatch.setattr(Branch, "overwritten", 1)
    assert differing(net, "212100", expected) == (["branches.1.down", "head"], [True, False])


def test_one_module_in_two_threads():
    shared = nn.Linear(4, 4)

    def run(first: int) -> None:
        shared.zero_grad()
        halves = INPUTS[:1], INPUTS[1:2]
        with ThreadPoolExecutor(1) as pool:
            given = {index: pool.submit(shared, halves[index]) for index in (first, 1 - first)}
        (given[0].result() * given[1].result().tanh()).sum().backward()

    assert_same(traced(lambda: run(0), shared), traced(lambda: run(1), shared))


def test_a_result_without_a_reader_has_its_place():
    net = nn.ModuleDict({"left": nn.Linear(4, 4), "right": nn.Linear(4, 4), "last": nn.Linear(4, 4)})

    def run(order: tuple[str, str]) -> None:
        net.zero_grad()
        with ThreadPoolExecutor(1) as pool:
            list(pool.map(lambda name: net[name](INPUTS), order))
        net["last"](INPUTS).sum().backward()

    first, second = (traced(lambda order=order: run(order), net) for order in (("left", "right"), ("right", "left")))
    assert_same(first, second)
    outputs = [site.module for site in first.program.sites if site.op == "aten.addmm.default"]
    assert outputs == ["left", "right", "last"]


def test_what_raises_in_a_thread_leaves_no_mode_there():
    class Raising(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise ValueError(inputs.tanh())

    net = Raising()
    with ThreadPoolExecutor(1) as pool:

        def run() -> None:
            with pytest.raises(ValueError, match="tensor"):
                pool.submit(net, INPUTS).result()
            pool.submit(torch.tanh, INPUTS).result()

        trace = traced(run, net)
        assert pool.submit(torch.utils._python_dispatch._get_current_dispatch_mode_stack).result() == []
    assert site_of(trace, "tanh.default").module == ""
    with pytest.raises(IndexError):
        position_of(trace, "tanh.default", 1)  # outside any module, which no mode sees
