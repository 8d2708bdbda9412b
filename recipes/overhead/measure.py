"""Time, memory, disk and synchronisations of training steps: plain,
and with something that watches every op.
"""

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

# DebugMode imports it; here, so that every process has it and memory can be compared
import torch.distributed.tensor
from device import counted_synchronizations, torch_device, wait_for
from fitted import Fitted
from memory import resident_mib
from models import Workload, make_workload, train_once
from ours import Loop, Ours
from torch.utils._debug_mode import DebugMode  # looked at in torch 2.13
from torch.utils._python_dispatch import TorchDispatchMode

LEVELS = ("state", "module", "op")
VARIANTS = ("plain", "empty mode", *LEVELS, "DebugMode hash_tensor", "DebugMode norm")
# What a user writes, with all that a run does besides: a TrainingRun,
# and DeterminismCallback in a Trainer.
LOOPS = {f"loop {level}": level for level in LEVELS}
FITTED: dict[str, str | None] = {
    "trainer": None,
    **{f"callback {level}": level for level in LEVELS},
}
ADAMW = {
    "plain": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OPTIMIZERS = (*ADAMW, "lbfgs")


class EmptyMode(TorchDispatchMode):
    """Does nothing: what it costs is what any dispatch mode in Python costs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


COUNTED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, and where.

    Attributes:
        network: one of ``models.NETWORKS``.
        optimizer: one of OPTIMIZERS.
        compiler: a backend of torch.compile's; None for eager.
        device: "cpu" or "cuda".
        is_tiny: see ``make_workload``.
    """

    network: str
    optimizer: str
    compiler: str | None = None
    device: str = "cpu"
    is_tiny: bool = False

    def workload(self) -> Workload:
        return make_workload(
            self.network, self.compiler, device=torch_device(self.device), is_tiny=self.is_tiny
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step of one variant: what trains, and what is done when it has trained.

    ``open`` and ``close`` come before and after steps in a row, and are not part of what is timed.
    """

    train: Callable[[int], None]
    end: Callable[[], None]
    open: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None

    def __call__(self, number: int) -> None:
        self.train(number)
        self.end()

    def warm_up(self, num_steps: int) -> None:
        self.open()
        for number in range(num_steps):
            self(number)
        self.close()

    def seconds(self, first: int, num_steps: int, device: torch.device) -> float:
        """Return how long a step takes."""
        self.open()
        wait_for(device)
        start = time.perf_counter()
        for number in range(first, first + num_steps):
            self(number)
            wait_for(device)
        taken = time.perf_counter() - start
        self.close()
        return taken / num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds a step of one variant, one entry a round, and those of plain
    steps in the same rounds.
    """

    seconds: list[float]
    plain: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Median over the rounds of the ratio to plain: a noisy moment hits both sides of it."""
        return statistics.median(
            ours / plain for ours, plain in zip(self.seconds, self.plain, strict=True)
        )


def debug_mode(digest: str) -> AbstractContextManager[Any]:
    """Return a DebugMode that digests outputs; a new one a step,
    as it keeps all that it has seen.
    """
    stack = ExitStack()
    stack.enter_context(DebugMode())
    stack.enter_context(DebugMode.log_tensor_hashes(hash_fn=digest))
    return stack


def make_optimizer(workload: Workload, name: str) -> torch.optim.Optimizer:
    """Return one of OPTIMIZERS; L-BFGS evaluates the network some 30 times in an update,
    another number each time.
    """
    if name == "lbfgs":
        return torch.optim.LBFGS(
            workload.model.parameters(), lr=0.1, max_iter=20, line_search_fn="strong_wolfe"
        )
    return torch.optim.AdamW(workload.model.parameters(), lr=1e-4, **ADAMW[name])


def make_steps(
    workload: Workload, optimizer: str, variants: Sequence[str], root: Path
) -> tuple[dict[str, "Step | Fitted"], dict[str, Ours]]:
    """Return for each variant what trains the step of a number, and what records the levels.

    All variants train the same network: none of them changes a bit of it.
    """
    update = make_optimizer(workload, optimizer)
    recorders = {
        variant: Ours(workload, update, variant, root / variant)
        for variant in variants
        if variant in LEVELS
    }
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": nullcontext,
        "empty mode": EmptyMode,
        "DebugMode hash_tensor": lambda: debug_mode("hash_tensor"),
        "DebugMode norm": lambda: debug_mode("norm"),
    }

    def watched(context: Callable[[], AbstractContextManager[Any]]) -> Step:
        def train(number: int) -> None:
            batch = workload.batch(number)
            with context():
                train_once(workload, update, batch)

        return Step(train=train, end=lambda: None)

    def recorded(ours: Ours) -> Step:
        def train(number: int) -> None:
            batch = workload.batch(number)
            ours.start_step(batch)
            train_once(workload, update, batch, ours.note_loss)

        return Step(train=train, end=ours.end_step)

    def step_of(variant: str) -> Step | Fitted:
        if variant in FITTED:
            return Fitted(workload, update, FITTED[variant], root / variant)
        if variant in LOOPS:
            loop = Loop(workload, update, LOOPS[variant], root / variant)
            return Step(train=loop.train, end=lambda: None, open=loop.open, close=loop.close)
        return recorded(recorders[variant]) if variant in LEVELS else watched(contexts[variant])

    steps = {variant: step_of(variant) for variant in variants}
    return steps, recorders


def measure_time(
    case: Case, variants: Sequence[str], *, rounds: int, num_steps: int, warm_up: int = 3
) -> dict[str, Times]:
    """Return the times of each variant, measured in turns; each step ends
    with a wait for the device.

    In each round every variant trains the same steps, one variant after the other, and the next
    round begins with the next variant. The ``warm_up`` steps of each variant come first and do not
    count: the optimizer makes its state in the first of them, Triton compiles, and a recording
    finds its program in the second.
    """
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    workload = case.workload()
    device = workload.device
    with tempfile.TemporaryDirectory() as root:
        steps, recorders = make_steps(workload, case.optimizer, variants, Path(root))
        for step in steps.values():
            step.warm_up(warm_up)
        for turn in range(rounds):
            first = warm_up + turn * num_steps
            shift = turn % len(variants)
            for variant in (*variants[shift:], *variants[:shift]):
                seconds[variant].append(steps[variant].seconds(first, num_steps, device))
        for ours in recorders.values():
            ours.close()
    return {
        variant: Times(seconds=taken, plain=seconds["plain"]) for variant, taken in seconds.items()
    }


def measure_memory(case: Case, variant: str, num_steps: int) -> dict[str, Any]:
    """Return what a process that trains this variant alone takes in memory and on disk,
    and what of it waits.

    ``peak_growth_mib`` is how far the peak of resident memory rises above what the process had with
    the network made and no step trained; ``device_peak_growth_mib`` likewise of what is allocated
    on a CUDA device. ``synchronizations`` are counted there in steps that come after: for each,
    those while it trains and those at its end. ``enqueue_seconds`` are those of the host until a
    step's work is given to the device.
    """
    workload = case.workload()
    is_on_cuda = workload.device.type == "cuda"
    with tempfile.TemporaryDirectory() as root:
        steps, recorders = make_steps(workload, case.optimizer, [variant], Path(root))
        step = steps[variant]
        assert isinstance(step, Step), "a Trainer's memory is not measured"
        before = resident_mib("VmRSS")
        device_before = 0
        if is_on_cuda:
            torch.cuda.reset_peak_memory_stats(workload.device)
            device_before = torch.cuda.memory_allocated(workload.device)
        step.open()
        for number in range(num_steps):
            step(number)
        result: dict[str, Any] = {"peak_growth_mib": resident_mib("VmHWM") - before}
        if is_on_cuda:
            peak = torch.cuda.max_memory_allocated(workload.device)
            result["device_peak_growth_mib"] = (peak - device_before) / 2**20
            result["synchronizations"] = [
                count_synchronizations(step, number)
                for number in range(num_steps, num_steps + COUNTED_STEPS)
            ]
        first = num_steps + COUNTED_STEPS
        result["enqueue_seconds"] = statistics.median(
            enqueue_seconds(step, number, workload.device)
            for number in range(first, first + COUNTED_STEPS)
        )
        for ours in recorders.values():
            ours.close()
            result |= ours.figures()
    return result


def count_synchronizations(step: Step, number: int) -> dict[str, int]:
    """Return how often a step waits for the device while it trains, and at its end."""
    with counted_synchronizations() as inside:
        step.train(number)
    with counted_synchronizations() as at_end:
        step.end()
    return {"inside": len(inside), "at_end": len(at_end)}


def enqueue_seconds(step: Step, number: int, device: torch.device) -> float:
    """Return how long the host takes to train a step, without a wait for
    the device, or for its end.
    """
    wait_for(device)
    start = time.perf_counter()
    step.train(number)
    taken = time.perf_counter() - start
    step.end()
    return taken


def measure_memory_apart(case: Case, variant: str, num_steps: int) -> dict[str, Any]:
    """Return ``measure_memory`` of a new process."""
    # what the timed steps left is given back, for the new process to have it
    if case.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    command = [sys.executable, __file__, json.dumps(asdict(case)), variant, str(num_steps)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    print(
        json.dumps(measure_memory(Case(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
    )
