"""What is asked of a device: to be waited for, how long its work took, who
waits for it, and its name.
"""

import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch

# c10/cuda/CUDAFunctions.cpp, as of torch 2.13
_SYNCHRONIZES = "called a synchronizing CUDA operation"
# said once a process, by the first change of the mode
_NOTICE = "Synchronization debug mode is a prototype feature"

# Of a stream that is kept busy while work is enqueued behind it:
# more clock ticks a second than any GPU has.
_TICKS_PER_SECOND = 2.5e9


def torch_device(name: str) -> torch.device:
    """Return the device of a name, CUDA's with its index."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given; on the CPU all is done
    when its call returns.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def enqueue_and_busy_seconds(
    device: torch.device, work: Callable[[], object]
) -> tuple[float, float]:
    """Return the seconds that the host takes to enqueue some work,
    and those that the device takes to do it.

    On CUDA the work is done twice. The second time lies between two events, on a stream that is
    first given something to wait for: all is enqueued before the device begins, and waiting for
    launches is not counted as its work. On the CPU both are the time of one call.
    """
    wait_for(device)
    start = time.perf_counter()
    work()
    host_seconds = time.perf_counter() - start
    if device.type != "cuda":
        return host_seconds, host_seconds
    wait_for(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # bounded: the first call may have compiled something
    head_start = min(2 * host_seconds + 1e-4, 0.1)
    torch.cuda._sleep(int(head_start * _TICKS_PER_SECOND))  # torch-private, looked at in torch 2.13
    begin.record()
    work()
    end.record()
    wait_for(device)
    return host_seconds, begin.elapsed_time(end) / 1e3


@contextmanager
def counted_synchronizations() -> Iterator[list[str]]:
    """Collect what waits for a CUDA device inside, one entry each time, as torch warns of it.

    torch 2.13 notices what copies or waits by a stream: ``.item()``, ``.cpu()``, ``nonzero``. It
    does not notice ``torch.cuda.synchronize()`` or the wait for an event. Other warnings are passed
    on when the block ends.
    """
    found: list[str] = []
    others: list[warnings.WarningMessage] = []
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(mode)
    finally:
        for warning in caught:
            text = str(warning.message)
            if _SYNCHRONIZES in text:
                found.append(text)
            elif _NOTICE not in text:
                others.append(warning)
    for warning in others:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def describe(device: torch.device) -> dict[str, Any]:
    """Return what figures of a CUDA device depend on: its name, memory, driver and versions."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "device memory GiB": round(properties.total_memory / 2**30, 1),
        "driver": _driver(),
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "triton": _version_of_triton(),
        "matmul precision": torch.get_float32_matmul_precision(),
    }


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown: there is no nvidia-smi"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    return done.stdout.split("\n")[0].strip() or f"unknown: nvidia-smi ended with {done.returncode}"


def _version_of_triton() -> str:
    for name in ("triton", "pytorch-triton"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"
