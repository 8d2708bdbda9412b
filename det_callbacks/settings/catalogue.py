"""The one list of settings: of each its default, what is allowed, how it is read and set, what it changes and why."""

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch

Timing = Literal["any", "before_cuda", "before_nccl", "once", "start"]
"""Until when a setting can be made: at any time, before a CUDA context or an NCCL communicator exists, once before
the first use, or only when the process starts."""

MAX_SEED = 2**32 - 1  # the bound of NumPy's legacy generator, and so of Lightning's seed_everything
_POSITIVE = range(1, 2**31)
_SEEDS = range(MAX_SEED + 1)
_BOOLS = (True, False)
# Intel oneMKL, developer guide, "Specifying Code Branches".
_BRANCHES = ("AUTO", "COMPATIBLE", "SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_E1")
SDPA_BACKENDS = ("math", "flash", "mem_efficient", "cudnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a running process.

    Attributes:
        name: field of ``DeterminismSettings``.
        effect: what it changes, and what that costs.
        why: what may happen without it.
        read: returns what is in force, asked of torch or the process.
        apply: puts a value in force; None where only a restart can.
        allowed: the values; a range for integers, ``str`` for any text; empty where ``DeterminismSettings`` looks.
        default: in ``DeterminismSettings``; None leaves it as it is.
        when: until when it can be set.
        variable: the environment variable behind it, if any.
        line: how to set it by hand, with {value!r}.
        is_cuda_only: whether it has no effect without CUDA.
        is_recorded_elsewhere: whether the environment records it under another name, as a machine fact or a variable.
    """

    name: str
    effect: str
    why: str
    read: Callable[[], Any]
    apply: Callable[[Any], object] | None
    allowed: tuple[Any, ...] | range | type[str] = ()
    default: Any = None
    when: Timing = "any"
    variable: str | None = None
    line: str = ""
    is_cuda_only: bool = False
    is_recorded_elsewhere: bool = False

    @property
    def is_restorable(self) -> bool:
        """Whether a running process can put it back."""
        return self.when in ("any", "before_cuda", "before_nccl")

    def as_text(self, value: Any) -> str:
        """Return a value as the text of the variable."""
        return str(int(value)) if isinstance(value, bool) else str(value)

    def how(self, value: Any) -> str:
        """Return the line of code, or the variable, that sets a value."""
        if self.variable is not None:
            return f"{self.variable}={self.as_text(value)}"
        line = self.line or f"det_callbacks.enforce_determinism({{{{'{self.name}': {{value!r}}}}}})"
        return line.format(value=value)


@cache
def start_environment() -> Mapping[str, str]:
    """Return the environment variables as they were when this process started.

    On Linux they are read from /proc/self/environ, which later changes do not reach. Elsewhere they are those of the
    first call: what was set before it cannot be told from what was there at start.
    """
    try:
        content = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    entries = (os.fsdecode(entry).partition("=") for entry in content.split(b"\0") if entry)
    return {name: value for name, _, value in entries}


def restart_command(variables: Mapping[str, str]) -> str:
    """Return the command line that starts this program again with variables set."""
    words = [f"{name}={value}" for name, value in variables.items()]
    return " ".join([*(shlex.quote(word) for word in words), shlex.join(sys.orig_argv)])


def algorithms_in_force() -> str:
    """Return "error", "warn" or "disabled"."""
    if not torch.are_deterministic_algorithms_enabled():
        return "disabled"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "error"


def set_algorithms(value: str) -> None:
    """Call ``torch.use_deterministic_algorithms``."""
    torch.use_deterministic_algorithms(value != "disabled", warn_only=value == "warn")


def matmul_precision_in_force() -> str:
    """Return "highest", "high" or "medium"; "mixed" when torch's two interfaces contradict each other."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to answer when the newer fp32_precision attributes say something else
        return "mixed"


def sdpa_in_force() -> tuple[str, ...]:
    """Return the implementations of scaled_dot_product_attention that are enabled."""
    return tuple(name for name in SDPA_BACKENDS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")())


def set_sdpa(names: tuple[str, ...]) -> None:
    """Enable exactly these implementations of scaled_dot_product_attention."""
    for name in SDPA_BACKENDS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name in names)


def inductor_config() -> Any:
    """Return Inductor's configuration if something imported it, else None."""
    return sys.modules.get("torch._inductor.config")


def load_inductor_config() -> Any:
    """Return Inductor's configuration; importing it takes a second, so only those who set something pay for it."""
    return importlib.import_module("torch._inductor.config")


def _seed_in_force() -> int | None:
    seed = torch.initial_seed()
    return seed if seed <= MAX_SEED else None  # an unseeded generator starts from 64 random bits


def _reduction_in_force(kind: str) -> bool:
    value = getattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction")
    return bool(value[0] if isinstance(value, tuple) else value)  # torch may add whether split-K is allowed


def _inductor(name: str, effect: str, why: str) -> Setting:
    def read() -> bool:
        config = inductor_config()
        if config is None:  # what it will start with (torch/_inductor/config.py, torch 2.13)
            return os.environ.get(f"TORCHINDUCTOR_{name.upper()}") == "1"
        return bool(getattr(config, name))

    return Setting(
        name=f"inductor_{name}",
        effect=effect,
        why=why,
        read=read,
        apply=lambda value: setattr(load_inductor_config(), name, value),
        allowed=_BOOLS,
        line=f"torch._inductor.config.{name} = {{value!r}}",
    )


def _attribute(name: str, path: str, effect: str, why: str, **options: Any) -> Setting:
    owner_path, _, attribute = path.rpartition(".")
    owner = attrgetter(owner_path.removeprefix("torch."))(torch)
    options = {"read": partial(getattr, owner, attribute), "allowed": _BOOLS, **options}
    apply, line = partial(setattr, owner, attribute), f"{path} = {{value!r}}"
    return Setting(name=name, effect=effect, why=why, apply=apply, line=line, **options)


def _variable(name: str, variable: str, effect: str, why: str, **options: Any) -> Setting:
    allowed, is_at_start = options.get("allowed"), options.get("when") == "start"

    def read() -> Any:
        text = start_environment().get(variable) if is_at_start else os.environ.get(variable)
        if text is None:
            return None
        if allowed is _BOOLS:
            return text not in ("0", "")
        return int(text) if isinstance(allowed, range) and text.isdecimal() else text

    def apply(value: Any) -> None:
        os.environ[variable] = str(int(value)) if isinstance(value, bool) else str(value)

    options = {"is_recorded_elsewhere": True, "read": read, "apply": None if is_at_start else apply, **options}
    return Setting(name=name, variable=variable, effect=effect, why=why, **options)


def _hash_seed() -> int | str | None:
    text = start_environment().get("PYTHONHASHSEED")
    if text is None or sys.flags.ignore_environment or text == "random":
        return None
    return int(text) if text.isdecimal() else text


_NCCL: Mapping[str, Any] = {"when": "before_nccl", "is_cuda_only": True}

_ALL = (
    Setting(
        name="seed",
        effect="Python, NumPy, torch on every device, DataLoader workers and other processes; 0 is a seed. "
        "Before the model has parameters",
        why="Without it weights, dropout and shuffling are others in each process.",
        read=_seed_in_force,
        apply=None,  # by enforce_determinism, which keeps what the seed came too late for
        allowed=_SEEDS,
        line="det_callbacks.enforce_determinism({{'seed': {value!r}}})  # before the model is built",
    ),
    Setting(
        name="deterministic_algorithms",
        effect="`error`, `warn` or `disabled`: ops without a deterministic implementation raise or are listed; some "
        "ops get slower, and Inductor does not autotune",
        why="Without it some ops add up in whatever order their threads finish.",
        read=algorithms_in_force,
        apply=set_algorithms,
        allowed=("error", "warn", "disabled"),
        default="error",
    ),
    _attribute(
        "fill_uninitialized_memory",
        "torch.utils.deterministic.fill_uninitialized_memory",
        "`torch.empty` is filled under deterministic algorithms; a write per allocation",
        "Uninitialised memory that is read differs from run to run.",
    ),
    _variable(
        "cublas_workspace_config",
        "CUBLAS_WORKSPACE_CONFIG",
        '24 MiB of GPU memory; `":16:8"` takes less and may be slower. Before the first use of CUDA',
        "Without it cuBLAS may split a matrix product differently each time.",
        allowed=(":4096:8", ":16:8"),  # the two that torch.use_deterministic_algorithms names
        default=":4096:8",
        when="before_cuda",
        is_cuda_only=True,
        is_recorded_elsewhere=False,
    ),
    _attribute(
        "cudnn_benchmark",
        "torch.backends.cudnn.benchmark",
        "whether cuDNN times its algorithms and keeps the fastest; without, convolutions can be slower",
        "Timing decides which convolution algorithm runs, and may decide otherwise next time.",
        default=False,
        is_cuda_only=True,
    ),
    _attribute(
        "cudnn_deterministic",
        "torch.backends.cudnn.deterministic",
        "cuDNN uses deterministic algorithms only; can be slower",
        "Some cuDNN algorithms add up in no fixed order.",
        default=True,
        is_cuda_only=True,
    ),
    _attribute(
        "cudnn_allow_tf32",
        "torch.backends.cudnn.allow_tf32",
        "convolutions in TF32: about ten bits less, up to several times faster",
        "TF32 rounds the inputs of convolutions to ten bits.",
        is_cuda_only=True,
    ),
    Setting(
        name="float32_matmul_precision",
        effect="`highest` (float32), `high` or `medium` (TF32 or bfloat16 inside: less exact, faster)",
        why="It chooses between float32, TF32 and bfloat16 inside matrix products.",
        read=matmul_precision_in_force,
        apply=lambda value: torch.set_float32_matmul_precision(value),
        allowed=("highest", "high", "medium"),
        line="torch.set_float32_matmul_precision({value!r})",
    ),
    *(
        _attribute(
            f"{kind}_reduced_precision_reduction",
            f"torch.backends.cuda.matmul.allow_{kind}_reduced_precision_reduction",
            f"products of {dtype} may add up in that type: faster, less exact",
            f"It lets products of {dtype} add up in {dtype}.",
            read=partial(_reduction_in_force, kind),
            is_cuda_only=True,
        )
        for kind, dtype in (("fp16", "float16"), ("bf16", "bfloat16"))
    ),
    Setting(
        name="sdpa_backends",
        effect="some of `math`, `flash`, `mem_efficient`, `cudnn`, for attention on CUDA; `math` is slowest",
        why="The implementations of attention give different bits.",
        read=sdpa_in_force,
        apply=set_sdpa,
        is_cuda_only=True,
        is_recorded_elsewhere=True,
    ),
    _inductor(
        "deterministic",
        "Inductor chooses nothing by timing; some kernels are slower",
        "Without it Inductor chooses kernels by timing.",
    ),
    _inductor(
        "max_autotune",
        "Inductor times kernels and keeps the fastest",
        "Timing decides which kernels compiled code runs.",
    ),
    _variable(
        "nccl_algo",
        "NCCL_ALGO",
        "such as `Ring`: the order of sums in collectives, at the cost of bandwidth. Before NCCL's first use",
        "The algorithm of a collective is the order of its sum.",
        allowed=str,
        **_NCCL,
    ),
    _variable(
        "nccl_proto",
        "NCCL_PROTO",
        "such as `Simple`; likewise",
        "The protocol of a collective changes the order of its sum.",
        allowed=str,
        **_NCCL,
    ),
    *(
        _variable(
            f"nccl_{side}_nchannels",
            f"NCCL_{side.upper()}_NCHANNELS",
            f"the {word} number of channels; likewise",
            "The number of channels splits a collective's sum.",
            allowed=_POSITIVE,
            **_NCCL,
        )
        for side, word in (("min", "least"), ("max", "largest"))
    ),
    Setting(
        name="num_threads",
        effect="sums on the CPU are split among threads",
        why="Sums are split among threads.",
        read=torch.get_num_threads,
        apply=torch.set_num_threads,
        allowed=_POSITIVE,
        line="torch.set_num_threads({value!r})",
        is_recorded_elsewhere=True,
    ),
    Setting(
        name="num_interop_threads",
        effect="threads that run ops side by side; once in a process, before the first use; cannot be put back",
        why="It runs whole ops side by side, and changes no sum.",
        read=torch.get_num_interop_threads,
        apply=torch.set_num_interop_threads,
        allowed=_POSITIVE,
        when="once",
        line="torch.set_num_interop_threads({value!r})  # before anything is computed",
        is_recorded_elsewhere=True,
    ),
    _variable(
        "mkl_cbwr",
        "MKL_CBWR",
        "the branch of Intel MKL; `COMPATIBLE` gives the same bits on every x86 CPU at a third of the speed. At start",
        "MKL chooses its kernels by the CPU.",
        allowed=(*_BRANCHES, *(f"{branch},STRICT" for branch in _BRANCHES)),
        when="start",
    ),
    _variable(
        "aten_cpu_capability",
        "ATEN_CPU_CAPABILITY",
        "`default`, `avx2` or `avx512`: the width of vectors. At start",
        "The width of vectors is the order of sums.",
        read=lambda: str(torch.backends.cpu.get_cpu_capability()).lower(),
        allowed=("default", "avx2", "avx512"),
        when="start",
    ),
    _variable(
        "python_hash_seed",
        "PYTHONHASHSEED",
        "the order of sets of strings; 0 turns randomisation off. At start",
        "The order of a set of strings is another one in each process.",
        read=_hash_seed,
        allowed=_SEEDS,
        when="start",
    ),
    _variable(
        "flash_attention_deterministic",
        "FLASH_ATTENTION_DETERMINISTIC",
        "the backward pass of the flash-attn package; slower, more memory",
        "The backward pass of flash-attn adds up in no fixed order without it.",
        allowed=_BOOLS,
        is_cuda_only=True,
    ),
    _variable(
        "nvte_allow_nondeterministic_algo",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "Transformer Engine's faster kernels",
        "Transformer Engine takes faster kernels that differ from run to run.",
        allowed=_BOOLS,
        is_cuda_only=True,
    ),
)

SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _ALL}
"""Every setting but ``allow``, which says of ops what ``deterministic_algorithms`` does not hold for."""
