"""What does recording cost? Run ``python recipes/overhead/measure.py --help``."""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from models import Workload, make_workload
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from det_callbacks import HashMode
from det_callbacks.trace.store import RunWriter

WORKLOADS = ("mlp", "transformer", "resnet", "transformer-random-length")
VARIANTS = ("plain", "empty mode", "state", "module", "op", "DebugMode hash_tensor", "DebugMode norm")
OPTIMIZERS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
STEPS = {"mlp": 30, "transformer": 1, "resnet": 2, "transformer-random-length": 1}


class EmptyMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Recording:
    """Records steps with HashMode and writes them to a run folder, as the callback does."""

    def __init__(self, workload: Workload, level: str, folder: Path) -> None:
        self.mode = HashMode(workload.model, level=level)
        self.writer = RunWriter.create(folder, manifest={"selection": {"level": level}})
        self.step = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.mode:
            yield
        trace = self.mode.trace
        self.writer.put_program(trace.program)
        if not self.writer.has_layout(trace.layout_id):
            self.writer.put_layout(trace.layout)
        self.writer.append(self.step, 0, trace.program.id, trace.layout_id, trace.digests)
        self.step += 1


def make_step(name: str, variant: str, optimizer: str, folder: Path) -> tuple[Callable[[], None], Recording | None]:
    """Return a function that trains one step under a variant, with its own network."""
    workload = make_workload(name)
    update = torch.optim.AdamW(workload.model.parameters(), lr=1e-4, **OPTIMIZERS[optimizer])

    def plain() -> None:
        update.zero_grad()
        workload.loss().backward()
        update.step()

    if variant == "plain":
        return plain, None
    recording = None
    if variant in ("state", "module", "op"):
        recording = Recording(workload, variant, folder)
        enclose: Callable[[], Any] = recording
    elif variant == "empty mode":
        enclose = EmptyMode
    else:

        @contextmanager
        def enclose() -> Iterator[None]:
            with DebugMode(), DebugMode.log_tensor_hashes(hash_fn=variant.split()[-1]):
                yield

    def step() -> None:
        with enclose():
            plain()

    return step, recording


def measure_time(name: str, optimizer: str, rounds: int, variants: list[str]) -> dict[str, dict[str, float]]:
    """Return seconds a step for each variant, measured in turns so that a noisy moment hits all alike."""
    with tempfile.TemporaryDirectory() as root:
        steps = {
            variant: make_step(name, variant, optimizer, Path(root) / str(index))[0]
            for index, variant in enumerate(variants)
        }
        for step in steps.values():
            for _ in range(4):  # the optimizer's state and every program are there from the third step on
                step()
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        for turn in range(rounds):
            order = variants[turn % len(variants) :] + variants[: turn % len(variants)]
            for variant in order:
                start = time.perf_counter()
                for _ in range(STEPS[name]):
                    steps[variant]()
                seconds[variant].append((time.perf_counter() - start) / STEPS[name])
    plain = seconds["plain"]
    return {
        variant: {
            "seconds": statistics.median(taken),
            "ratio": statistics.median(one / other for one, other in zip(taken, plain, strict=True)),
        }
        for variant, taken in seconds.items()
    }


def measure_memory(name: str, variant: str, optimizer: str, steps: int) -> dict[str, float]:
    """Return the peak of resident memory and the bytes on disk of a process that trains this variant only."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "run"
        step, recording = make_step(name, variant, optimizer, folder)
        for _ in range(steps):
            step()
        result: dict[str, float] = {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
        if recording is not None:
            assert recording.mode.trace is not None
            stream = sum(file.stat().st_size for file in folder.glob("rank-*/*"))
            once = sum(file.stat().st_size for file in folder.glob("*/*.parquet"))
            result |= {
                "sites": len(recording.mode.trace.program),
                "ops": recording.mode.trace.program.ops_seen,
                "bytes_a_step": stream / steps,
                "program_and_layout_bytes": once,
                "programs": len(list(folder.glob("programs/*"))),
            }
    return result


def in_process(name: str, variant: str, optimizer: str, steps: int) -> dict[str, float]:
    """Measure memory in a process of its own."""
    command = [sys.executable, __file__, "--child", name, variant, optimizer, str(steps)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=["mlp", "transformer", "resnet"], choices=WORKLOADS)
    parser.add_argument("--optimizer", default="plain", choices=OPTIMIZERS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=7, help="turns of all variants (default 7)")
    parser.add_argument("--memory-steps", type=int, default=5, help="steps for memory and disk; 0 leaves them out")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, variant, optimizer, steps = options.child
        print(json.dumps(measure_memory(name, variant, optimizer, int(steps))))
        return
    variants = ["plain", *(variant for variant in options.variants if variant != "plain")]
    figures: dict[str, Any] = {}
    for name in options.workloads:
        figures[name] = measure_time(name, options.optimizer, options.rounds, variants)
        print(f"\n{name}, AdamW {options.optimizer}, {torch.get_num_threads()} threads, {options.rounds} rounds")
        print(f"{'':24}{'ms a step':>12}{'ratio':>9}{'MB over plain':>15}{'bytes a step':>14}{'sites':>8}")
        base = 0.0
        for variant in variants:
            figure = figures[name][variant]
            if options.memory_steps:
                figure |= in_process(name, variant, options.optimizer, options.memory_steps)
                base = base or figure["peak_mb"]
            print(
                f"{variant:24}{figure['seconds'] * 1e3:12.2f}{figure['ratio']:9.3f}"
                f"{figure.get('peak_mb', base) - base:15.0f}"
                f"{figure.get('bytes_a_step', 0):14,.0f}{figure.get('sites', 0):8,}"
            )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
