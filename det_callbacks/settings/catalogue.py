"""The settings: allowed values, how to read and set each, and a selection of values."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch

from det_callbacks.errors import SettingsError
from det_callbacks.internals.dynamo import INDUCTOR_CONFIG
from det_callbacks.runs.selection import OpPattern, as_names

Timing = Literal["any", "before_cuda", "before_nccl", "start"]  # when it can be set

MAX_SEED = 2**32 - 1  # the limit of NumPy's legacy generator
_POSITIVE = range(1, 2**31)
_SEEDS = range(MAX_SEED + 1)
_BOOLS = (True, False)
_BRANCHES = ("AUTO", "COMPATIBLE", "SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_E1")
SDPA_BACKENDS = ("math", "flash", "mem_efficient", "cudnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A field of ``DeterminismSettings``: an attribute of torch, an environment variable,
    or a getter and setter.

    ``allowed`` is a range for integers, ``str`` for any text, and empty if ``DeterminismSettings``
    checks.
    """

    name: str
    allowed: tuple[Any, ...] | range | type[str] = ()
    when: Timing = "any"
    attribute: str = ""
    variable: str = ""
    getter: Callable[[], Any] | None = None
    setter: Callable[[Any], object] | None = None
    is_cuda_only: bool = False
    reader: str = ""  # the package that reads it, if torch does not

    def read(self) -> Any:
        if self.getter is not None:
            return self.getter()
        if self.attribute:
            return getattr(*_owner_of(self.attribute))
        text = (start_environment() if self.when == "start" else os.environ).get(self.variable)
        if text is None:
            return None
        if self.allowed is _BOOLS:
            return text not in ("0", "")
        if isinstance(self.allowed, range):
            return int(text) if text.isdecimal() else None  # PYTHONHASHSEED=random
        return text

    def apply(self, value: Any) -> None:
        """Set a value; does nothing for the seed, and for values that need a restart."""
        if self.setter is not None:
            self.setter(value)
        elif self.attribute:
            setattr(*_owner_of(self.attribute), value)
        elif self.variable and self.when != "start":
            os.environ[self.variable] = self.as_text(value)

    def way_back(self) -> Callable[[], object]:
        """Return a function that restores the current value."""
        if self.variable:
            return variable_back(self.variable)
        return (
            attribute_back(self.attribute) if self.attribute else partial(self.apply, self.read())
        )

    def too_late(self, wanted: Any) -> str | None:
        """Return why a value can no longer be set in this process, or None if it can."""
        in_force = self.read()
        if wanted == in_force:
            return None
        if self.when == "start":
            return f"{self.variable} is read when the process starts, and was {in_force!r} then"
        if self.when == "before_cuda" and torch.cuda.is_initialized():
            return (
                f"a CUDA context exists, and cuBLAS may have read {self.variable}={in_force} "
                "already"
            )
        group = torch.distributed
        is_in_use = self.when == "before_nccl" and group.is_available() and group.is_initialized()
        if is_in_use and "nccl" in str(group.get_backend()).lower():
            return (
                f"an NCCL process group exists, and NCCL has read {self.variable}={in_force} "
                "already"
            )
        return None

    def idle_reason(self) -> str | None:
        """Return why no value can have an effect on this machine, or None."""
        if self.reader and find_spec(self.reader) is None:
            return f"only {self.reader} reads {self.variable}, and it is not installed"
        return (
            "there is no CUDA device"
            if self.is_cuda_only and not torch.cuda.is_available()
            else None
        )

    def as_text(self, value: Any) -> str:
        return str(int(value)) if isinstance(value, bool) else str(value)

    def how(self, value: Any) -> str:
        """Return the line of code, or the variable, that sets the value."""
        if self.variable:
            return f"{self.variable}={self.as_text(value)}"
        return f"det_callbacks.enforce_determinism({{{self.name!r}: {value!r}}})"


def attribute_back(path: str) -> Callable[[], object]:
    owner, name = _owner_of(path)
    return partial(setattr, owner, name, getattr(owner, name))


def variable_back(name: str) -> Callable[[], object]:
    value = os.environ.get(name)
    if value is None:
        return partial(os.environ.pop, name, None)
    return partial(os.environ.__setitem__, name, value)


def _owner_of(path: str) -> tuple[Any, str]:
    owner, _, name = path.rpartition(".")
    if owner == INDUCTOR_CONFIG:  # takes a second to import
        return importlib.import_module(owner), name
    return attrgetter(owner.removeprefix("torch."))(torch), name


@cache
def start_environment() -> Mapping[str, str]:
    """Return the variables that this process started with; without /proc,
    those at the first call.
    """
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
        variables = dict(os.fsdecode(entry).partition("=")[::2] for entry in entries if entry)
    except OSError:
        variables = dict(os.environ)
    is_hiding = sys.flags.ignore_environment  # python -E
    return {
        name: value
        for name, value in variables.items()
        if not (is_hiding and name.startswith("PYTHON"))
    }


def algorithms_in_force() -> str:
    return ("disabled", "warn", "error")[torch.get_deterministic_debug_mode()]


def _precision_in_force() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch raises if fp32_precision disagrees
        return "mixed"


def _set_precision(value: str) -> None:
    if value != "mixed":
        torch.set_float32_matmul_precision(value)


def _set_sdpa(names: tuple[str, ...]) -> None:
    for name in SDPA_BACKENDS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name in names)


def _seed_in_force() -> int | None:
    seed = torch.initial_seed()
    return seed if seed <= MAX_SEED else None  # an unseeded generator has 64 random bits


def _reduction_in_force(kind: str) -> bool:
    value = getattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction")
    # newer versions of torch also return whether split-K is allowed
    return bool(value[0] if isinstance(value, tuple) else value)


def _inductor_in_force(name: str) -> bool:
    # inductor's default (torch/_inductor/config.py, torch 2.13)
    if INDUCTOR_CONFIG not in sys.modules:
        return os.environ.get(f"TORCHINDUCTOR_{name.upper()}") == "1"
    return bool(getattr(sys.modules[INDUCTOR_CONFIG], name))


def _flag(name: str, attribute: str, **options: Any) -> Setting:
    return Setting(name=name, attribute=f"torch.{attribute}", allowed=_BOOLS, **options)


def _variable(name: str, allowed: Any, **options: Any) -> Setting:
    return Setting(name=name, variable=name.upper(), allowed=allowed, **options)


_OF_CUDA: dict[str, Any] = {"is_cuda_only": True}
_OF_NCCL = {"when": "before_nccl", **_OF_CUDA}
_ALL = (
    # enforce_determinism sets the seed itself
    Setting(name="seed", getter=_seed_in_force, allowed=_SEEDS),
    Setting(
        name="deterministic_algorithms",
        getter=algorithms_in_force,
        setter=lambda value: torch.use_deterministic_algorithms(
            value != "disabled", warn_only=value == "warn"
        ),
        allowed=("error", "warn", "disabled"),
    ),
    _flag("fill_uninitialized_memory", "utils.deterministic.fill_uninitialized_memory"),
    # the two values in the docs of torch.use_deterministic_algorithms
    _variable("cublas_workspace_config", (":4096:8", ":16:8"), when="before_cuda", **_OF_CUDA),
    *(
        _flag(f"cudnn_{name}", f"backends.cudnn.{name}", **_OF_CUDA)
        for name in ("benchmark", "deterministic")
    ),
    _flag("cudnn_allow_tf32", "backends.cudnn.allow_tf32", **_OF_CUDA),
    Setting(
        name="float32_matmul_precision",
        getter=_precision_in_force,
        setter=_set_precision,
        allowed=("highest", "high", "medium"),
    ),
    *(
        _flag(
            f"{kind}_reduced_precision_reduction",
            f"backends.cuda.matmul.allow_{kind}_reduced_precision_reduction",
            getter=partial(_reduction_in_force, kind),
            **_OF_CUDA,
        )
        for kind in ("fp16", "bf16")
    ),
    Setting(
        name="sdpa_backends",
        getter=lambda: tuple(
            name for name in SDPA_BACKENDS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
        ),
        setter=_set_sdpa,
    ),
    *(
        _flag(
            f"inductor_{name}",
            f"{INDUCTOR_CONFIG.removeprefix('torch.')}.{name}",
            getter=partial(_inductor_in_force, name),
        )
        for name in ("deterministic", "max_autotune")
    ),
    *(_variable(name, str, **_OF_NCCL) for name in ("nccl_algo", "nccl_proto")),
    *(
        _variable(name, _POSITIVE, **_OF_NCCL)
        for name in ("nccl_min_nchannels", "nccl_max_nchannels")
    ),
    Setting(
        name="num_threads",
        getter=torch.get_num_threads,
        setter=torch.set_num_threads,
        allowed=_POSITIVE,
    ),
    _variable(
        "mkl_cbwr", (*_BRANCHES, *(f"{branch},STRICT" for branch in _BRANCHES)), when="start"
    ),
    _variable(
        "aten_cpu_capability",
        ("default", "avx2", "avx512"),
        getter=lambda: str(torch.backends.cpu.get_cpu_capability()).lower(),
        when="start",
    ),
    Setting(name="python_hash_seed", variable="PYTHONHASHSEED", allowed=_SEEDS, when="start"),
    _variable("flash_attention_deterministic", _BOOLS, reader="transformers", **_OF_CUDA),
    _variable("nvte_allow_nondeterministic_algo", _BOOLS, reader="transformer_engine", **_OF_CUDA),
)

SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _ALL}
"""Every setting except ``allow``, which makes exceptions for ops."""


def settings_in_force() -> dict[str, Any]:
    """Return the values in force for the fields of ``DeterminismSettings`` except
    ``allow``; None means not set.
    """
    return {name: setting.read() for name, setting in SETTINGS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeterminismSettings:
    """The settings that make a program reproducible bit for bit.

    ``None`` leaves a setting unchanged, but still records it. The defaults select deterministic
    kernels and nothing else: no seed, no precision, no thread count. ``docs/reference/settings.md``
    has the effect and cost of each.

    Attributes:
        seed: for Python, NumPy, torch on every device and DataLoader workers, 0 to 2**32 - 1.
        deterministic_algorithms: what happens to ops without a deterministic implementation.
        allow: patterns ``[phase/][module:]op`` for ops that may be nondeterministic even with
            ``deterministic_algorithms="error"``: "aten.kthvalue.default",
            "decoder.*:aten.index_put_.default".
        fill_uninitialized_memory: whether torch fills ``torch.empty`` under
            deterministic algorithms.
        cublas_workspace_config: ":4096:8" or ":16:8" (KiB and number of the buffers).
        cudnn_benchmark: whether cuDNN times its algorithms and keeps the fastest.
        cudnn_deterministic: whether cuDNN uses deterministic algorithms only.
        cudnn_allow_tf32: whether convolutions compute in TF32.
        float32_matmul_precision: of matrix products of float32.
        fp16_reduced_precision_reduction: whether matrix products of float16 may accumulate in it.
        bf16_reduced_precision_reduction: the same for bfloat16.
        sdpa_backends: those allowed for attention, even on a CPU: "math", "flash",
            "mem_efficient", "cudnn".
        inductor_deterministic: whether Inductor chooses kernels without timing them.
        inductor_max_autotune: whether Inductor times kernels and keeps the fastest.
        nccl_algo: NCCL's algorithm, such as "Ring".
        nccl_proto: NCCL's protocol, such as "Simple".
        nccl_min_nchannels: minimum number of NCCL channels.
        nccl_max_nchannels: maximum number of NCCL channels.
        num_threads: number of torch's CPU threads.
        mkl_cbwr: code path of Intel MKL, such as "COMPATIBLE".
        aten_cpu_capability: vector instructions of torch's CPU kernels.
        python_hash_seed: ``PYTHONHASHSEED``, 0 to 2**32 - 1.
        flash_attention_deterministic: whether transformers asks flash-attn for a
            backward pass in a fixed order.
        nvte_allow_nondeterministic_algo: whether Transformer Engine may use
            nondeterministic kernels.

    Raises:
        SettingsError: a value is not allowed; the message names it and the allowed values.

    Examples:
        >>> DeterminismSettings(seed=0).deterministic_algorithms
        'error'
    """

    seed: int | None = None
    deterministic_algorithms: Literal["error", "warn", "disabled"] | None = "error"
    allow: tuple[str, ...] = ()
    fill_uninitialized_memory: bool | None = None
    cublas_workspace_config: str | None = ":4096:8"
    cudnn_benchmark: bool | None = False
    cudnn_deterministic: bool | None = True
    cudnn_allow_tf32: bool | None = None
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None
    fp16_reduced_precision_reduction: bool | None = None
    bf16_reduced_precision_reduction: bool | None = None
    sdpa_backends: tuple[str, ...] | None = None
    inductor_deterministic: bool | None = None
    inductor_max_autotune: bool | None = None
    nccl_algo: str | None = None
    nccl_proto: str | None = None
    nccl_min_nchannels: int | None = None
    nccl_max_nchannels: int | None = None
    num_threads: int | None = None
    mkl_cbwr: str | None = None
    aten_cpu_capability: Literal["default", "avx2", "avx512"] | None = None
    python_hash_seed: int | None = None
    flash_attention_deterministic: bool | None = None
    nvte_allow_nondeterministic_algo: bool | None = None

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            _check(setting, getattr(self, name))
        object.__setattr__(self, "allow", as_names("allow", self.allow, SettingsError))
        for pattern in self.allow:
            OpPattern.parse(pattern)
        if self.sdpa_backends is not None:
            backends = as_names("sdpa_backends", self.sdpa_backends, SettingsError)
            if not backends or not set(backends) <= set(SDPA_BACKENDS):
                raise SettingsError(
                    f"sdpa_backends={self.sdpa_backends!r} is not allowed; list some of "
                    f"{', '.join(map(repr, SDPA_BACKENDS))}, or None to leave them unchanged."
                )
            object.__setattr__(
                self, "sdpa_backends", tuple(name for name in SDPA_BACKENDS if name in backends)
            )

    @classmethod
    def choose(cls, *, deterministic: bool = False, **chosen: Any) -> "DeterminismSettings":
        """Return settings with the chosen values; the others are None,
        or their defaults if ``deterministic``.
        """
        others: dict[str, Any] = (
            {} if deterministic else dict.fromkeys(field.name for field in fields(cls))
        )
        return cls.from_mapping({**others, **chosen})

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "DeterminismSettings":
        """Return settings from a mapping, such as a node of a Hydra configuration,
        with defaults.
        """
        if not isinstance(mapping, Mapping):
            raise SettingsError(
                f"settings must be names with their values, such as seed: 0; got {mapping!r}."
            )
        known = tuple(field.name for field in fields(cls))
        if unknown := sorted(str(name) for name in mapping if name not in known):
            raise SettingsError(
                f"Unknown determinism setting {', '.join(unknown)}; the settings are "
                f"{', '.join(known)}."
            )
        # null in a configuration
        given = {
            name: value for name, value in mapping.items() if name != "allow" or value is not None
        }
        return cls(**given)


def _check(setting: Setting, value: Any) -> None:
    allowed = setting.allowed
    if value is None or allowed == ():
        return
    if isinstance(allowed, range):
        is_allowed = type(value) is int and value in allowed
        told = f"an integer from {allowed[0]} to {allowed[-1]}"
    elif isinstance(allowed, type):
        is_allowed = isinstance(value, str) and bool(value.strip())
        told = "text such as 'Ring'"
    else:  # 1 == True, so compare types too
        is_allowed = any(type(value) is type(other) and value == other for other in allowed)
        told = f"one of {', '.join(map(repr, allowed))}"
    if not is_allowed:
        raise SettingsError(
            f"{setting.name}={value!r} is not allowed; use {told}, or None to leave it unchanged."
        )
