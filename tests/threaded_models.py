"""Models that run their branches in a pool of threads, one layer at a time, in an order that a test chooses."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, library, nn

PATIENCE = 60.0  # seconds that a layer waits for its turn


class Turns:
    """Lets the layers of branches run one after the other: "0110" is a layer of 0, two of 1, and the other of 0."""

    def __init__(self, schedule: str) -> None:
        self.schedule, self._at = schedule, 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        self._changed.acquire()

    def wait_for(self, branch: int) -> "Turns":
        with self._changed:
            assert self._changed.wait_for(lambda: self.schedule[self._at] == str(branch), PATIENCE), (
                "its turn did not come"
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._at += 1
        self._changed.notify_all()
        self._changed.release()


@library.custom_op("threaded_models::half", mutates_args=())
def half(values: Tensor) -> Tensor:
    """A kernel that gives something else in the branch that a test chose."""
    result = values / 2
    if Branch.running == Branch.wrong:
        result.view(-1)[0] += 1
    return result


class Half(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, values: Tensor) -> Tensor:
        return half(values)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


class Branch(nn.Module):
    """Two layers, each in its turn, and what a test may do to one of them."""

    running = -1  # the branch whose turn it is
    wrong = -1  # the branch whose kernel computes something else
    overwritten = -1  # the branch whose first result is changed past the dispatcher

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.turns = Turns("")

    def forward(self, inputs: Tensor) -> Tensor:
        with self.turns.wait_for(self.index):
            Branch.running = self.index
            hidden = Half.apply(self.up(inputs).tanh())
            if self.index == Branch.overwritten:
                hidden.detach().numpy()[0, 0] += 1
        with self.turns.wait_for(self.index):
            return self.down(hidden)


class Branches(nn.Module):
    """Branches of one input, in a pool of two threads that lives as long as the model."""

    def __init__(self, num_branches: int, *, has_stem: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4) if has_stem else nn.Identity()
        self.branches = nn.ModuleList(Branch(index) for index in range(num_branches))
        self.head = nn.Linear(4, 3)
        self.pool = ThreadPoolExecutor(2)
        self.schedule = ""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, turns = self.stem(inputs), Turns(self.schedule)
        for branch in self.branches:
            branch.turns = turns
        given = {
            index: self.pool.submit(self.branches[index], hidden) for index in map(int, dict.fromkeys(self.schedule))
        }
        return self.head(torch.stack([given[index].result() for index in range(len(given))]).sum(0))


# all that two threads can do with two or three branches of two layers, but for what is alike
SCHEDULES: dict[int, Sequence[str]] = {
    2: ("0011", "1100", "0101", "1010", "0110", "1001"),
    3: ("001122", "221100", "010122", "101022", "020211", "212100", "100122", "221010"),
}
