"""The settings as a value: what is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from det_callbacks.errors import SettingsError
from det_callbacks.patterns import OpPattern, as_names
from det_callbacks.settings.catalogue import SDPA_BACKENDS, SETTINGS, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DeterminismSettings:
    """What is set so that the same program gives the same bits.

    ``None`` leaves a setting as it is; it is recorded all the same. The defaults enforce what decides between a
    deterministic and a nondeterministic kernel, and choose nothing else: no seed, no precision, no thread count. What
    each one changes and costs is said by ``det-callbacks doctor``.

    Attributes:
        allow: ops that may be nondeterministic under ``deterministic_algorithms="error"`` all the same, as patterns
            ``[phase/][module:]op``: "aten.kthvalue.default", "decoder.*:aten.index_put_.default".

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
                    f"{', '.join(map(repr, SDPA_BACKENDS))}, or None to leave them as they are."
                )
            object.__setattr__(self, "sdpa_backends", tuple(name for name in SDPA_BACKENDS if name in backends))

    @classmethod
    def choose(cls, *, deterministic: bool = False, **chosen: Any) -> "DeterminismSettings":
        """Return the chosen values with the defaults; unless ``deterministic``, leave all others as they are."""
        others: dict[str, Any] = {} if deterministic else dict.fromkeys(field.name for field in fields(cls))
        return cls.from_mapping({**others, **chosen})

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "DeterminismSettings":
        """Return the settings a mapping names, such as a node of a Hydra configuration.

        Args:
            mapping: field name -> value; what it does not name keeps its default.

        Raises:
            SettingsError: for an unknown name or a value that is not allowed.
        """
        known = tuple(field.name for field in fields(cls))
        if unknown := sorted(str(name) for name in mapping if name not in known):
            raise SettingsError(
                f"Unknown determinism setting {', '.join(unknown)}; the settings are {', '.join(known)}."
            )
        # null in a configuration leaves the list empty
        return cls(**{name: value for name, value in mapping.items() if name != "allow" or value is not None})


def _check(setting: Setting, value: Any) -> None:
    allowed = setting.allowed
    if value is None or allowed == ():
        return
    if isinstance(allowed, range):
        is_allowed, told = type(value) is int and value in allowed, f"an integer from {allowed[0]} to {allowed[-1]}"
    elif isinstance(allowed, type):
        is_allowed, told = isinstance(value, str) and bool(value.strip()), "a text such as 'Ring'"
    else:  # by type as well: 1 and True are equal, and a number here is a mistake
        is_allowed = any(type(value) is type(other) and value == other for other in allowed)
        told = f"one of {', '.join(map(repr, allowed))}"
    if not is_allowed:
        raise SettingsError(f"{setting.name}={value!r} is not allowed; use {told}, or None to leave it as it is.")
