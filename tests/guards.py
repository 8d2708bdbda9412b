"""What a test has to leave as it found it: read, compared and put back by
the fixture in conftest.py.

The process is asked, never det_callbacks: a setting that the package forgets to put back is a leak
all the same. ``process_state`` is for tests of settings: what else they can change,
generators included.
"""

import os
import pickle
import random
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

# first use of deterministic algorithms imports it, which sets a variable and a filter
import torch._inductor.config
from torch._dynamo import eval_frame
from torch._dynamo.output_graph import OutputGraph  # looked at in torch 2.13
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.overrides import _get_current_function_mode_stack  # looked at in torch 2.13
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # looked at in torch 2.13

ROOT = Path(__file__).parents[1]

# Written by pytest, its plugins and the tools, not by a test.
_FOREIGN_FILES = frozenset(
    {".git", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache", "__pycache__"}
)


class Watched(NamedTuple):
    """One thing of the process: how to read it, and how to make it again what was read."""

    read: Callable[[], Any]
    put_back: Callable[[Any], object]


def watched_things(root: Path = ROOT) -> dict[str, Watched]:
    dist, cudnn = torch.distributed, torch.backends.cudnn
    return {
        "what compiles a graph": _attribute(OutputGraph, "call_user_compiler"),
        "stance of the compiler": Watched(
            lambda: eval_frame._stance, lambda stance: eval_frame._set_stance(stance)
        ),
        "dispatch modes": _modes(_get_current_dispatch_mode_stack),
        "function modes": _modes(_get_current_function_mode_stack),
        "module hooks": _dictionaries(module_hooks),
        "optimizer hooks": _dictionaries(optimizer_hooks),
        "deterministic algorithms": Watched(
            torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
        ),
        "fill_uninitialized_memory": _attribute(
            torch.utils.deterministic, "fill_uninitialized_memory"
        ),
        **{
            f"cudnn.{name}": _attribute(cudnn, name)
            for name in ("enabled", "benchmark", "deterministic")
        },
        "matmul precision": Watched(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        ),
        "default dtype": Watched(torch.get_default_dtype, torch.set_default_dtype),
        "number of threads": Watched(torch.get_num_threads, torch.set_num_threads),
        "grad mode": Watched(torch.is_grad_enabled, torch.set_grad_enabled),
        "anomaly mode": Watched(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        "process group": Watched(dist.is_initialized, lambda _: dist.destroy_process_group()),
        "environment variables": Watched(_variables, _put_variables_back),
        "warning filters": Watched(lambda: list(warnings.filters), _put_filters_back),
        "working directory": Watched(lambda: str(Path.cwd()), os.chdir),
        # Not deleted: what came into the root at that moment may be someone's work.
        "files in the root": Watched(
            lambda: frozenset(os.listdir(root)) - _FOREIGN_FILES, lambda _: None
        ),
    }


def read_all(things: Mapping[str, Watched]) -> dict[str, Any]:
    return {name: thing.read() for name, thing in things.items()}


def put_back_leaks(things: Mapping[str, Watched], before: Mapping[str, Any]) -> list[str]:
    """Make everything again what it was, so that one leak fails one test;
    return a line for each that was not.
    """
    leaks = []
    for name, thing in things.items():
        now = thing.read()
        if now != before[name]:
            thing.put_back(before[name])
            leaks.append(f"{name}: {_shown(before[name], now)}")
    return leaks


def _shown(before: Any, now: Any) -> str:
    if isinstance(before, dict):
        changed = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
        return "; ".join(
            f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in changed
        )
    if isinstance(before, list | frozenset):
        gone, new = (
            [item for item in before if item not in now],
            [item for item in now if item not in before],
        )
        return f"new {new!r}, gone {gone!r}"
    return f"was {before!r} and is {now!r}"


def _attribute(owner: Any, name: str) -> Watched:
    return Watched(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _modes(stack: Callable[[], list[AbstractContextManager[Any]]]) -> Watched:
    def pop_new(before: list[AbstractContextManager[Any]]) -> None:
        while len(stack()) > len(before):
            stack()[-1].__exit__(None, None, None)

    return Watched(lambda: list(stack()), pop_new)


def _dictionaries(owner: Any) -> Watched:
    """All global hooks of a module of torch."""
    found = [
        hooks
        for name, hooks in vars(owner).items()
        if name.startswith("_global_") and isinstance(hooks, dict)
    ]

    def put_back(before: list[dict[Any, Any]]) -> None:
        for hooks, old in zip(found, before, strict=True):
            hooks.clear()
            hooks.update(old)

    return Watched(lambda: [dict(hooks) for hooks in found], put_back)


def _variables() -> dict[str, str]:
    # pytest's own
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _put_variables_back(before: dict[str, str]) -> None:
    for name in set(_variables()) - set(before):
        del os.environ[name]
    os.environ.update(before)


def _put_filters_back(before: list[Any]) -> None:
    warnings.filters[:] = before
    warnings._filters_mutated()  # what catch_warnings does on leaving (Python 3.11)


VARIABLES = (
    *(
        "CUBLAS_WORKSPACE_CONFIG",
        "FLASH_ATTENTION_DETERMINISTIC",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    ),
    *(
        "NCCL_ALGO",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_PROTO",
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
    ),
)
"""The environment variables that settings write."""

NOTHING: dict[str, Any] = dict.fromkeys(
    (
        "seed",
        "deterministic_algorithms",
        "cublas_workspace_config",
        "cudnn_benchmark",
        "cudnn_deterministic",
    )
)
"""Settings that leave everything as it is."""


def process_state() -> dict[str, Any]:
    cuda: Any = torch.backends.cuda
    others = ("process group", "working directory", "files in the root")
    return {
        **{name: thing.read() for name, thing in watched_things().items() if name not in others},
        "python": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state()),
        "torch": (torch.initial_seed(), torch.get_rng_state().tolist()),
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "precision": (cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision),
        "reductions": (
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ),
        "sdpa": sdpa(),
        "inductor": (torch._inductor.config.deterministic, torch._inductor.config.max_autotune),
        "interop threads": torch.get_num_interop_threads(),
    }


def sdpa() -> tuple[bool, ...]:
    """Return whether math, flash, mem_efficient and cudnn are enabled."""
    cuda = torch.backends.cuda
    enabled = (
        cuda.math_sdp_enabled,
        cuda.flash_sdp_enabled,
        cuda.mem_efficient_sdp_enabled,
        cuda.cudnn_sdp_enabled,
    )
    return tuple(read() for read in enabled)
