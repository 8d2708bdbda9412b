"""Which module an op belongs to, told by anomaly mode and the Python stack alone.

Every module's forward gets a stack frame that carries the module's name as its file name. An op of the forward pass,
or of a recomputation, belongs to the innermost such frame on its stack. An op of a backward pass belongs to the
innermost such frame on the stack that anomaly mode kept of the moment when the running node was made; a node that was
made by another node (double backward) belongs where that one does.
"""

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from det_callbacks.runs.program import Site
from det_callbacks.trace.hash_mode import HashMode

_NAMED_FRAME = re.compile(r'File "<module (.*?)>", line')
_ENGINE_FRAME = re.compile(r'torch/autograd/graph\.py", line \d+, in _engine_run_backward')


def standing_in(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind a frame of its own, whose file is called after a module."""
    code = compile("def stand_in(*args, **kwargs):\n    return function(*args, **kwargs)\n", f"<module {name}>", "exec")
    scope: dict[str, Any] = {"function": function}
    exec(code, scope)
    return scope["stand_in"]


def name_frames(model: nn.Module) -> None:
    for name, module in model.named_modules():
        module.forward = standing_in(name, module.forward)


class Truth(NamedTuple):
    """What the oracle knows of an op; ``module`` is None where it cannot tell."""

    module: str | None
    recomputed: bool


class OracleMode(TorchDispatchMode):
    """Notes the truth about each site; to be opened above the HashMode that makes the sites."""

    def __init__(self, mode: HashMode, model: nn.Module) -> None:
        super().__init__()
        self.truths: dict[int, Truth] = {}
        self._recorder = mode.recorder
        self._owners = {id(value): name.rpartition(".")[0] for name, value in reversed([*model.named_parameters()])}

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        truth = self._truth()
        first = self._recorder.num_sites
        out = func(*args, **(kwargs or {}))
        self.truths.update(dict.fromkeys(range(first, self._recorder.num_sites), truth))
        return out

    def _truth(self) -> Truth:
        in_backward = torch._C._current_graph_task_id() != -1
        recomputed = False
        module: str | None = None
        frame = sys._getframe(1)
        while frame is not None:
            filename, function = frame.f_code.co_filename, frame.f_code.co_name
            if filename.startswith("<module ") and module is None:
                module = filename[8:-1]
            if filename.endswith("torch/autograd/graph.py") and function == "_engine_run_backward":
                break
            recomputed |= in_backward and filename.endswith("torch/utils/checkpoint.py")
            frame = frame.f_back
        if not in_backward:
            return Truth(module or "", False)
        node = torch._C._current_autograd_node()
        if module is not None or node is None or recomputed:
            return Truth(module, recomputed)
        return Truth(self._owner(node), False)

    def _owner(self, node: Any) -> str | None:
        if node.name() == "torch::autograd::AccumulateGrad":
            return self._owners.get(id(node.variable))
        for line in reversed(node.metadata["traceback_"]):
            named = _NAMED_FRAME.search(line)
            if named is not None:
                return named[1]
            if _ENGINE_FRAME.search(line):
                parent = node.metadata.get("parent_")
                return None if parent is None else self._owner(parent)
        return ""


class Attributions(NamedTuple):
    """All sites, and those that the oracle has a word on beside that word."""

    sites: tuple[Site, ...]
    judged: list[tuple[Site, Truth]]

    @property
    def wrong(self) -> list[tuple[Site, Truth]]:
        return [
            (site, truth)
            for site, truth in self.judged
            if site.module not in (truth.module, "?") or site.recomputed != truth.recomputed
        ]

    @property
    def unnamed(self) -> list[tuple[Site, Truth]]:
        return [(site, truth) for site, truth in self.judged if site.module == "?"]


def judge(model: nn.Module, step: Callable[[], None]) -> Attributions:
    """Run two steps under the tracer and the oracle; return what both say of the last, which follows the first."""
    mode = HashMode(model)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        for _ in range(2):
            with mode, OracleMode(mode, model) as oracle:
                step()
    sites = mode.trace.program.sites
    judged = [(sites[at], truth) for at, truth in oracle.truths.items() if truth.module is not None]
    return Attributions(sites, [found for found in judged if found[0].role in ("output", "value")])
