"""Modules that other threads of a step call: counted, not recorded, and no run differs by which came first."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from tracing import assert_same, site_of, step_of, traced, with_role

from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.trace.hash_mode import HashMode

INPUTS = torch.arange(12.0).view(3, 4)  # small integers: the order of a sum changes no bits


class Branches(nn.Module):
    """Two stems, a branch of each and one of both in threads that a test chooses, and a path past the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.head, self.tail = nn.Linear(4, 4), nn.Linear(4, 2)
        self.order: tuple[int, ...] = (0, 1, 2)
        self.threads: list[ThreadPoolExecutor] = []
        self.wrong: int | None = None
        for number, parameter in enumerate(self.parameters()):
            parameter.data = (torch.arange(parameter.numel()) % (3 + number % 3) - 1.0).view_as(parameter)

    def branch(self, number: int, inputs: Tensor) -> Tensor:
        result = self.branches[number](inputs) * 2  # also nodes that no module made
        return result + 1 if number == self.wrong else result

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = self.stems[0](inputs), self.stems[1](inputs)
        given = {0: first, 1: second, 2: first + second}
        done = {
            number: thread.submit(self.branch, number, given[number]).result()
            for number, thread in zip(self.order, self.threads, strict=True)
        }
        joined = torch.stack([done[number] for number in range(3)]).sum(0) + first + second
        return self.tail(self.head(joined))


@pytest.fixture
def threads():
    """Two threads, one of which has made more autograd nodes than any other thread."""
    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(2)]
        pools[1].submit(lambda: [torch.ones(1, requires_grad=True) * 2 for _ in range(3000)]).result()
        yield pools


def step(net: Branches, mode: HashMode, threads: list[ThreadPoolExecutor], **beginning: object) -> StepTrace:
    net.threads = threads
    net.zero_grad(set_to_none=False)
    return step_of(mode, lambda: net(INPUTS).sum().backward(), **beginning)


@pytest.mark.parametrize("level", ["op", "module"])
def test_neither_order_nor_threads_are_recorded(threads, level):
    net = Branches()
    mode = HashMode(net, level=level)
    reference = step(net, mode, [threads[0]] * 3)
    for order, at in product([(0, 1, 2), (2, 1, 0), (1, 2, 0)], product((0, 1), repeat=3)):
        net.order = order
        chosen = [threads[index] for index in at]
        assert_same(reference, step(net, mode, chosen))
        assert_same(reference, step(net, HashMode(net, level=level), chosen))
    assert reference.program.ops_skipped["other_thread"] > 9
    found = {(site.phase, site.module) for site in reference.program.sites if site.phase != "state"}
    own = {(phase, name) for phase in ("forward", "backward") for name in ("head", "tail")}
    assert found >= {*own, ("forward", "stems.0"), ("forward", "stems.1")}
    assert not [module for _, module in found if module.startswith("branches") or module == "?"]


def test_calls_are_counted():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def run() -> None:
        with ThreadPoolExecutor(1) as pool, torch.no_grad():
            pool.submit(net, INPUTS).result()

    program = traced(run, net).program
    assert dict(program.ops_skipped) == {"other_thread": 3}
    assert not [site for site in program.sites if site.phase != "state"]
