"""The settings as a value: names, defaults, and what is allowed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from det_callbacks.errors import SettingsError
from det_callbacks.patterns import OpPattern

MAX_SEED = 2**32 - 1  # the bound of NumPy's legacy generator, and so of Lightning's seed_everything

_BOOLS = (True, False)
_WORKSPACES = (":4096:8", ":16:8")  # the two the documentation of torch.use_deterministic_algorithms names
_BACKENDS = ("math", "flash", "mem_efficient", "cudnn")
# Intel oneMKL, developer guide, "Specifying Code Branches".
_BRANCHES = ("AUTO", "COMPATIBLE", "SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_E1")

_ONE_OF: Mapping[str, tuple[Any, ...]] = {
    "deterministic_algorithms": ("error", "warn", "disabled"),
    "fill_uninitialized_memory": _BOOLS,
    "cublas_workspace_config": _WORKSPACES,
    "cudnn_benchmark": _BOOLS,
    "cudnn_deterministic": _BOOLS,
    "cudnn_allow_tf32": _BOOLS,
    "float32_matmul_precision": ("highest", "high", "medium"),
    "fp16_reduced_precision_reduction": _BOOLS,
    "bf16_reduced_precision_reduction": _BOOLS,
    "inductor_deterministic": _BOOLS,
    "inductor_max_autotune": _BOOLS,
    "aten_cpu_capability": ("default", "avx2", "avx512"),
    "flash_attention_deterministic": _BOOLS,
    "nvte_allow_nondeterministic_algo": _BOOLS,
}
_INTEGERS: Mapping[str, tuple[int, int]] = {
    "seed": (0, MAX_SEED),
    "num_threads": (1, 2**31 - 1),
    "num_interop_threads": (1, 2**31 - 1),
    "nccl_min_nchannels": (1, 2**31 - 1),
    "nccl_max_nchannels": (1, 2**31 - 1),
    "python_hash_seed": (0, MAX_SEED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeterminismSettings:
    """What is set so that the same program gives the same bits.

    ``None`` leaves a setting as it is; it is recorded all the same. The defaults enforce what decides between a
    deterministic and a nondeterministic kernel, and choose nothing else: no seed, no precision, no thread count.

    Attributes:
        seed: seeds Python, NumPy and torch on every device, and through Lightning the DataLoader workers and the other
            processes; 0 is a seed, 4294967295 the largest. Comes too late once the model has parameters. No cost.
        deterministic_algorithms: ``torch.use_deterministic_algorithms``: "error" raises at an op that has no
            deterministic implementation, "warn" lets it run, "disabled" allows them. (Not "off", which YAML reads as
            false.) Under "error" and "warn" some ops take a slower algorithm and Inductor does not autotune, and the
            callback tells module and line of such an op, for some 5 microseconds an op where no trace is open.
        allow: ops that may be nondeterministic under "error" all the same, as patterns ``[phase/][module:]op``:
            "aten.kthvalue.default", "decoder.*:aten.index_put_.default". Compared like any other setting.
        fill_uninitialized_memory: whether ``torch.empty`` is filled under deterministic algorithms; costs a write per
            allocation, and hides reads of uninitialised memory instead of letting them differ.
        cublas_workspace_config: ":4096:8" (about 24 MiB of GPU memory) or ":16:8" (less memory, may be slower). cuBLAS
            reads it once, so it must be set before a CUDA context exists. No effect without CUDA.
        cudnn_benchmark: whether cuDNN times its algorithms and keeps the fastest, which may be another one each time.
        cudnn_deterministic: whether cuDNN uses deterministic algorithms only; they can be slower.
        cudnn_allow_tf32: whether convolutions may use TF32: about ten bits less, up to several times faster.
        float32_matmul_precision: "highest" (float32), "high" or "medium" (TF32 or bfloat16 inside: less exact, faster).
        fp16_reduced_precision_reduction: whether matrix products of float16 may add up in float16 (faster, less exact;
            the order of the sum depends on the kernel chosen).
        bf16_reduced_precision_reduction: the same for bfloat16.
        sdpa_backends: the implementations that ``scaled_dot_product_attention`` may choose from on CUDA, among "math",
            "flash", "mem_efficient" and "cudnn"; they give different bits. ("math",) is slowest and needs most memory.
        inductor_deterministic: Inductor makes no choice by timing, so that compiled code is the same each time; some
            kernels are slower. Importing Inductor's configuration takes a second.
        inductor_max_autotune: whether Inductor times kernels and keeps the fastest.
        nccl_algo: NCCL_ALGO, such as "Ring": the algorithm of collectives is the order of their sums. Read when a
            communicator is made; so are the next three. Setting them can cost bandwidth.
        nccl_proto: NCCL_PROTO, such as "Simple".
        nccl_min_nchannels: NCCL_MIN_NCHANNELS.
        nccl_max_nchannels: NCCL_MAX_NCHANNELS.
        num_threads: CPU threads within an op; sums over several threads depend on it.
        num_interop_threads: CPU threads that run ops side by side. Can be set once in a process, before the first use.
        mkl_cbwr: MKL_CBWR, the branch of Intel MKL, such as "COMPATIBLE": the same bits on every x86 CPU, at a third of
            the speed or less. Read at start.
        aten_cpu_capability: ATEN_CPU_CAPABILITY: "default", "avx2" or "avx512", the width of vectors. Read at start.
        python_hash_seed: PYTHONHASHSEED: the order of sets of strings. Read at start; 0 turns randomisation off.
        flash_attention_deterministic: FLASH_ATTENTION_DETERMINISTIC, the backward pass of the flash-attn package;
            slower, more memory.
        nvte_allow_nondeterministic_algo: NVTE_ALLOW_NONDETERMINISTIC_ALGO of Transformer Engine.

    Raises:
        SettingsError: for a value that is not allowed; the message names it and the allowed ones.

    Example:
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
    num_interop_threads: int | None = None
    mkl_cbwr: str | None = None
    aten_cpu_capability: Literal["default", "avx2", "avx512"] | None = None
    python_hash_seed: int | None = None
    flash_attention_deterministic: bool | None = None
    nvte_allow_nondeterministic_algo: bool | None = None

    def __post_init__(self) -> None:
        for name, allowed in _ONE_OF.items():
            _require_one_of(name, getattr(self, name), allowed)
        for name, (least, most) in _INTEGERS.items():
            _require_integer(name, getattr(self, name), least, most)
        for name in ("nccl_algo", "nccl_proto"):
            _require_text(name, getattr(self, name))
        least_channels, most_channels = self.nccl_min_nchannels, self.nccl_max_nchannels
        if least_channels is not None and most_channels is not None and least_channels > most_channels:
            raise SettingsError(
                f"nccl_min_nchannels={least_channels} is more than nccl_max_nchannels={most_channels}; give it at most "
                "that, or leave one of them None."
            )
        if self.mkl_cbwr is not None and str(self.mkl_cbwr).removesuffix(",STRICT") not in _BRANCHES:
            raise SettingsError(
                f"mkl_cbwr={self.mkl_cbwr!r} is not allowed; use one of {', '.join(map(repr, _BRANCHES))}, each also "
                "with ',STRICT' behind it, or None to leave it as it is."
            )
        object.__setattr__(self, "allow", _as_names("allow", self.allow))
        for pattern in self.allow:
            OpPattern.parse(pattern)
        if self.sdpa_backends is not None:
            backends = _as_names("sdpa_backends", self.sdpa_backends)
            if not backends or any(name not in _BACKENDS for name in backends):
                raise SettingsError(
                    f"sdpa_backends={self.sdpa_backends!r} is not allowed; list some of "
                    f"{', '.join(map(repr, _BACKENDS))}, or None to leave them as they are."
                )
            object.__setattr__(self, "sdpa_backends", tuple(name for name in _BACKENDS if name in backends))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "DeterminismSettings":
        """Return the settings a mapping names, such as a node of a Hydra configuration.

        Args:
            mapping: field name -> value; what it does not name keeps its default.

        Raises:
            SettingsError: for an unknown name or a value that is not allowed.
        """
        allowed = tuple(field.name for field in fields(cls))
        unknown = sorted(str(name) for name in mapping if name not in allowed)
        if unknown:
            raise SettingsError(
                f"Unknown determinism setting {', '.join(unknown)}; the settings are {', '.join(allowed)}."
            )
        values = {str(name): value for name, value in mapping.items()}
        if values.get("allow", ()) is None:  # null in a configuration
            del values["allow"]
        return cls(**values)


def _require_one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    # By type as well: 1 and True are equal, and a number here is a mistake.
    if value is not None and not any(type(value) is type(other) and value == other for other in allowed):
        names = ", ".join(repr(other) for other in allowed)
        raise SettingsError(f"{name}={value!r} is not allowed; use one of {names}, or None to leave it as it is.")


def _require_integer(name: str, value: Any, least: int, most: int) -> None:
    if value is None:
        return
    if type(value) is not int or not least <= value <= most:
        raise SettingsError(
            f"{name}={value!r} is not allowed; use an integer from {least} to {most}, or None to leave it as it is."
        )


def _require_text(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise SettingsError(
            f"{name}={value!r} is not allowed; use a text such as 'Ring', or None to leave it as it is."
        )


def _as_names(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise SettingsError(f"{name}={value!r} is not allowed; use a list of texts.")
    return tuple(value)
