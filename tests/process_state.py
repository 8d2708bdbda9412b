"""What settings can change in this process, asked of torch, NumPy, Python and the environment themselves."""

import os
import pickle
import random
import warnings
from typing import Any

import numpy as np
import torch
import torch._inductor.config as inductor

NOTHING: dict[str, Any] = {
    "seed": None,
    "deterministic_algorithms": None,
    "cublas_workspace_config": None,
    "cudnn_benchmark": None,
    "cudnn_deterministic": None,
}
"""Settings that leave everything as it is."""

VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "FLASH_ATTENTION_DETERMINISTIC",
    "NCCL_ALGO",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_PROTO",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
)
"""The environment variables that settings write."""


def process_state() -> dict[str, Any]:
    """Return all of it, not through the module under test."""
    cuda: Any = torch.backends.cuda
    return {
        "python": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state()),
        "torch": (torch.initial_seed(), torch.get_rng_state().tolist()),
        "algorithms": (torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32),
        "precision": (
            torch.get_float32_matmul_precision(),
            cuda.matmul.fp32_precision,
            torch.backends.mkldnn.matmul.fp32_precision,
        ),
        "reductions": (
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ),
        "sdpa": sdpa(),
        "inductor": (inductor.deterministic, inductor.max_autotune),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "variables": {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"},
        "filters": list(warnings.filters),
    }


def sdpa() -> tuple[bool, bool, bool, bool]:
    """Return whether math, flash, mem_efficient and cudnn are enabled."""
    cuda = torch.backends.cuda
    return (
        cuda.math_sdp_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )
