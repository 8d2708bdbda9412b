"""What a step costs, counted and not timed: calls of Python functions of ours,
in steps of recipes/overhead.
"""

import importlib
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from recipe_modules import find_recipe

import det_callbacks
from det_callbacks.trace import modules
from det_callbacks.trace.call_graph import CallGraph
from det_callbacks.trace.hash_mode import HashMode

OVERHEAD = Path(__file__).parents[2] / "recipes" / "overhead"
OURS = str(Path(det_callbacks.__file__).parent)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The recipe's networks."""
    find_recipe(OVERHEAD, monkeypatch)
    return importlib.import_module("models")


class Steps:
    """Steps of a network, recorded; ``num_calls`` of our functions were made in the last one."""

    def __init__(
        self, recipe: ModuleType, network: str, level: str, optimizer: str = "adamw"
    ) -> None:
        self._recipe = recipe
        self._workload = recipe.make_workload(network, is_tiny=True)
        parameters = self._workload.model.parameters()
        if optimizer == "lbfgs":
            self._update: Any = torch.optim.LBFGS(
                parameters, lr=0.1, max_iter=6, line_search_fn="strong_wolfe"
            )
        else:
            self._update = torch.optim.AdamW(parameters, lr=1e-4, foreach=False)
        self.mode = HashMode(self._workload.model, level=level)
        self.mode.optimizers = [self._update]

    def train(self, number: int) -> None:
        self.num_calls = 0
        batch = self._workload.batch(number)
        before = sys.getprofile()
        sys.setprofile(self._count)
        try:
            with self.mode:
                self._recipe.train_once(self._workload, self._update, batch)
        finally:
            sys.setprofile(before)

    @property
    def num_ops(self) -> int:
        trace = self.mode.trace
        assert trace is not None
        return trace.program.ops_digested

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        self.num_calls += event == "call" and frame.f_code.co_filename.startswith(OURS)


# Of a step at level state, of one at level module, and by the op at level op: as counted, with
# torch 2.15. Once Inductor is imported, a mode for each step follows its methods: 15 calls.
CALLS = {
    "mlp": (272, 688, 22.2),
    "blocks": (381, 1411, 17.9),
    "tiny-convolutional": (275, 691, 23.2),
    "tiny-lstm": (284, 529, 19.0),
    "tiny-gru": (284, 497, 24.1),
    "tiny-encoder": (399, 1681, 19.0),
    "tiny-decoder": (399, 1681, 18.8),
    "tiny-translator": (665, 3591, 18.9),
    "tiny-vae": (255, 435, 21.0),
    "tiny-unet": (278, 612, 20.9),
}
SLACK = 1.05  # of other versions of torch


@pytest.mark.parametrize("network", CALLS)
def test_a_step_that_is_like_the_one_before_takes_so_many_calls(recipe, network):
    counted = []
    for level in ("state", "module", "op"):
        steps = Steps(recipe, network, level)
        for number in range(3):
            steps.train(number)
        counted.append(steps.num_calls / (steps.num_ops or 1))
    assert all(now <= SLACK * known for now, known in zip(counted, CALLS[network], strict=True)), (
        counted
    )


@pytest.mark.parametrize(
    ("network", "optimizer", "num_steps", "calls_of_op", "share_built"),
    # what L-BFGS does follows from bits, which are another processor's own
    [("layerdrop", "adamw", 24, 24.8, 0.05), ("blocks", "lbfgs", 6, 62.9, 0.45)],
)
def test_an_op_of_steps_that_vary_takes_hardly_more_calls(
    recipe,
    monkeypatch,
    network,
    optimizer,
    num_steps,
    calls_of_op,
    share_built,
):
    built: list[str] = []
    settle = CallGraph._give_rows
    monkeypatch.setattr(
        CallGraph,
        "_give_rows",
        lambda graph, node: (built.append(str(node.func)), settle(graph, node))[1],
    )
    captured: list[object] = []
    capture = modules.capture_source
    monkeypatch.setattr(
        modules, "capture_source", lambda *frames: (captured.append(0), capture(*frames))[1]
    )
    steps = Steps(recipe, network, "op", optimizer)
    for number in range(num_steps):
        built.clear()
        captured.clear()
        steps.train(number)
    found = steps.num_calls / steps.num_ops, len(built) / steps.num_ops
    assert found[0] <= SLACK * calls_of_op, found
    assert found[1] <= share_built, found
    assert len(captured) <= len(built), "a known call shows the lines that it was built with"
