"""Modules that other threads of a step call: counted, not recorded,
and no run differs by which came first.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from threading import Event

import pytest
import torch
from compiling import opaque_backend
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from tracing import assert_same, site_of, step_of, traced

from det_callbacks import CoverageWarning, ObserverContext, observe
from det_callbacks.compare.ranks import compare_steps
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.trace.hash_mode import HashMode

INPUTS = torch.arange(12.0).view(3, 4)  # small integers: the order of a sum changes no bits


class Branches(nn.Module):
    """Two stems, a branch of each and one of both in threads that a test chooses,
    and a path past the branches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.head, self.tail = nn.Linear(4, 4), nn.Linear(4, 2)
        self.order: tuple[int, ...] = (0, 1, 2)
        self.has_checkpoints = False
        self.threads: list[ThreadPoolExecutor] = []
        self.wrong: tuple[int, str] | None = None
        for number, parameter in enumerate(self.parameters()):
            parameter.data = (torch.arange(parameter.numel()) % (3 + number % 3) - 1.0).view_as(
                parameter
            )
            parameter.grad = torch.zeros_like(parameter)

    def branch(self, number: int, inputs: Tensor) -> Tensor:
        branch = self.branches[number]
        result = (
            checkpoint(branch, inputs, use_reentrant=False)
            if self.has_checkpoints
            else branch(inputs)
        )
        result = result * 2  # a node that no module made
        if (number, "forward") == self.wrong:
            return result + 1
        if (number, "backward") == self.wrong:
            result.register_hook(lambda gradient: gradient * 2)
        return result

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = self.stems[0](inputs), self.stems[1](inputs)
        double = first * 2  # its node comes before or after those of the branches
        given = {0: first, 1: second, 2: first + second}
        done = {
            number: thread.submit(self.branch, number, given[number]).result()
            for number, thread in zip(self.order, self.threads, strict=True)
        }
        joined = done[0] * 2 + torch.stack([done[1], done[2]]).sum(0)
        return self.tail(self.head(joined + first + second + double))


@pytest.fixture
def threads():
    """Two threads, one of which has made more autograd nodes than any other thread."""
    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(2)]
        pools[1].submit(
            lambda: [torch.ones(1, requires_grad=True) * 2 for _ in range(3000)]
        ).result()
        yield pools


def step(
    net: Branches, mode: HashMode, threads: list[ThreadPoolExecutor], **beginning: object
) -> StepTrace:
    net.threads = threads
    net.zero_grad(set_to_none=False)

    def body() -> None:
        net(INPUTS).sum().backward()
        SGD(net.parameters(), lr=1.0).step()

    weights = {name: value.clone() for name, value in net.state_dict().items()}
    trace = step_of(mode, body, **beginning)
    net.load_state_dict(weights)
    return trace


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
    num_modules = 9
    assert (reference.program.ops_skipped["other_thread"] > num_modules) == (level == "op")
    found = {(site.phase, site.module) for site in reference.program.sites}
    own = {(phase, name) for phase in ("forward", "backward") for name in ("", "head", "tail")}
    expected = {*own, ("forward", "stems.0"), ("forward", "stems.1")}
    assert {
        (phase, module) for phase, module in found if phase in ("forward", "backward")
    } == expected


@pytest.mark.usefixtures("compiles_anew")
# see COMPILING
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_compiled_regions_of_threads_are_not_recorded(threads, has_checkpoints):
    net = Branches()
    net.has_checkpoints = has_checkpoints
    for branch in net.branches:
        branch.compile(backend=opaque_backend())
    mode = HashMode(net)
    reference = step(net, mode, [threads[0]] * 3)
    net.order = (2, 1, 0)
    assert_same(reference, step(net, mode, [threads[1], threads[0], threads[1]]))
    assert reference.program.opaque_regions == ()


def test_calls_are_counted():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def run() -> None:
        with ThreadPoolExecutor(1) as pool, torch.no_grad():
            pool.submit(net, INPUTS).result()

    program = traced(run, net).program
    assert dict(program.ops_skipped) == {"other_thread": 3}
    assert {site.phase for site in program.sites} == {"rng", "state"}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_difference_of_a_thread_is_seen_and_has_no_origin(threads, phase):
    net = Branches()
    reference = step(net, HashMode(net), [threads[0]] * 3)
    net.wrong = 1, phase
    current = step(
        net, HashMode(net), threads + threads[:1], expected=Expectation.of(reference.digests)
    )
    difference = compare_steps(reference.view(), current.view())
    first = difference.divergences[0]
    assert difference.origins == ()
    place = (
        ("input", "", "", None)
        if phase == "forward"
        else ("gradient", "", "stems.1", "grad of stems.1.weight")
    )
    assert (first.phase, first.op, first.module, first.name) == place
    changed = {one.module for one in difference.divergences if one.phase == "state"}
    assert changed == ({"head", "tail"} if phase == "forward" else {"stems.1", "branches.1.0"})


def test_a_backward_pass_of_another_thread_recomputes_there():
    begun, goes_on = Event(), Event()

    class Waiting(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() != -1:
                begun.set()
                assert goes_on.wait(60)
            return inputs.exp()

    net = nn.ModuleDict({"own": nn.ReLU(), "other": Waiting()})
    inputs = INPUTS.clone().requires_grad_()

    def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            loss = pool.submit(
                lambda: checkpoint(net["other"], inputs, use_reentrant=False).sum()
            ).result()
            done = pool.submit(loss.backward)
            assert begun.wait(60)
            net["own"](INPUTS)
            INPUTS.tanh()
            goes_on.set()
            done.result()

    trace = traced(run, net)
    assert (site_of(trace, "relu.default").module, site_of(trace, "tanh.default").module) == (
        "own",
        "",
    )


def test_what_raises_in_a_thread_leaves_nothing_there():
    class Raising(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            raise ValueError(inputs.tanh())

    with ThreadPoolExecutor(1) as pool:

        def run() -> None:
            with pytest.raises(ValueError, match="tensor"):
                pool.submit(net, INPUTS).result()

        net = Raising()
        trace = traced(run, net)
        assert (
            pool.submit(torch.utils._python_dispatch._get_current_dispatch_mode_stack).result()
            == []
        )
    assert dict(trace.program.ops_skipped) == {"other_thread": 1}


def test_an_observation_in_another_thread_is_refused(tmp_path):
    def elsewhere() -> None:
        with pytest.warns(CoverageWarning, match="a thread other than the step's"):
            observe("inside", INPUTS)

    with ObserverContext(tmp_path, "run"), ThreadPoolExecutor(1) as pool:
        pool.submit(elsewhere).result()
        observe("outside", INPUTS)
    names = [site.name for site in Run.open(tmp_path / "run").view(0, 0, 0).program.sites]
    assert "outside" in names
    assert "inside" not in names
