"""What is enforced so that a run can repeat, what is in force, and how both are put back.

Three questions, three functions: :func:`enforce_determinism` sets, :func:`settings_in_force` asks torch and the
process (never our own record of what was set), :func:`check_settings` compares the two.
"""

import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from det_callbacks.errors import SettingsError

MAX_SEED = 2**32 - 1  # the bound of NumPy's legacy generator, and so of Lightning's seed_everything

_ALGORITHMS = ("error", "warn", "disabled")
_WORKSPACES = (":4096:8", ":16:8")  # the two the documentation of torch.use_deterministic_algorithms names
_PRECISIONS = ("highest", "high", "medium")
_BOOLS = (True, False)

_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
# What lightning.fabric.utilities.seed.seed_everything(workers=True) leaves behind (read at Lightning 2.6.6): the
# Trainer seeds its other processes from the first and gives DataLoader workers their seeds when the second is "1".
_SEED_VARIABLE = "PL_GLOBAL_SEED"
_WORKERS_VARIABLE = "PL_SEED_WORKERS"
_VARIABLES = (_WORKSPACE_VARIABLE, _SEED_VARIABLE, _WORKERS_VARIABLE)

# Typed loosely: torch 2.13 declares neither fill_uninitialized_memory nor the matmul of mkldnn.
_deterministic: Any = torch.utils.deterministic
_backends: Any = torch.backends

# What a CUDA generator starts from when nobody seeded it (c10::detail default_rng_seed_val, torch 2.13).
_CUDA_DEFAULT_SEED = 67280421310721


@dataclass(frozen=True, slots=True, kw_only=True)
class DeterminismSettings:
    """What is set so that the same program gives the same bits.

    ``None`` leaves a setting as it is; it is recorded all the same. The defaults enforce what decides between a
    deterministic and a nondeterministic kernel, and choose nothing else: no seed, no precision, no thread count.

    Attributes:
        seed: seeds Python, NumPy and torch on every device, and through Lightning the DataLoader workers and the other
            processes; 0 is a seed, 4294967295 the largest.
        deterministic_algorithms: ``torch.use_deterministic_algorithms``: "error" raises at an op that has no
            deterministic implementation, "warn" warns there, "disabled" allows them. (Not "off", which YAML reads as
            false.) Under "error" and "warn" some ops take a slower algorithm and Inductor does not autotune.
        fill_uninitialized_memory: whether ``torch.empty`` is filled under deterministic algorithms; costs a write per
            allocation, and hides reads of uninitialised memory instead of letting them differ.
        cublas_workspace_config: ":4096:8" (about 24 MiB of GPU memory) or ":16:8" (less memory, may be slower). cuBLAS
            reads it once, so it must be set before a CUDA context exists. No effect without CUDA.
        cudnn_benchmark: whether cuDNN times its algorithms and keeps the fastest, which may be another one each time.
        cudnn_deterministic: whether cuDNN uses deterministic algorithms only.
        float32_matmul_precision: "highest" (float32), "high" or "medium" (TF32 or bfloat16 inside, less exact).
        num_threads: CPU threads within an op; sums over several threads depend on it.

    Raises:
        SettingsError: for a value that is not allowed; the message names it and the allowed ones.

    Example:
        >>> DeterminismSettings(seed=0).deterministic_algorithms
        'error'
    """

    seed: int | None = None
    deterministic_algorithms: Literal["error", "warn", "disabled"] | None = "error"
    fill_uninitialized_memory: bool | None = None
    cublas_workspace_config: str | None = ":4096:8"
    cudnn_benchmark: bool | None = False
    cudnn_deterministic: bool | None = True
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None
    num_threads: int | None = None

    def __post_init__(self) -> None:
        _require_integer("seed", self.seed, 0, MAX_SEED)
        _require_one_of("deterministic_algorithms", self.deterministic_algorithms, _ALGORITHMS)
        _require_one_of("fill_uninitialized_memory", self.fill_uninitialized_memory, _BOOLS)
        _require_one_of("cublas_workspace_config", self.cublas_workspace_config, _WORKSPACES)
        _require_one_of("cudnn_benchmark", self.cudnn_benchmark, _BOOLS)
        _require_one_of("cudnn_deterministic", self.cudnn_deterministic, _BOOLS)
        _require_one_of("float32_matmul_precision", self.float32_matmul_precision, _PRECISIONS)
        _require_integer("num_threads", self.num_threads, 1, 2**31 - 1)

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
        return cls(**{str(name): value for name, value in mapping.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingProblem:
    """A setting that is asked for and not in force.

    Attributes:
        name: field of :class:`DeterminismSettings`.
        wanted: its value there.
        in_force: what torch or the process says.
    """

    name: str
    wanted: Any
    in_force: Any


def settings_in_force() -> dict[str, Any]:
    """Return what is in force now, keyed like the fields of :class:`DeterminismSettings`.

    ``seed`` is the seed of torch's CPU generator, and None when that is none that Python, NumPy and Lightning could
    share: an unseeded generator starts from 64 random bits. ``float32_matmul_precision`` is "mixed" when torch's older
    and newer precision interfaces were both used and contradict each other.
    """
    seed = torch.initial_seed()
    return {
        "seed": seed if seed <= MAX_SEED else None,
        "deterministic_algorithms": _algorithms_in_force(),
        "fill_uninitialized_memory": _deterministic.fill_uninitialized_memory,
        "cublas_workspace_config": os.environ.get(_WORKSPACE_VARIABLE),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "float32_matmul_precision": _matmul_precision_in_force(),
        "num_threads": torch.get_num_threads(),
    }


def check_settings(settings: DeterminismSettings) -> tuple[SettingProblem, ...]:
    """Return the settings that are asked for and not in force; empty when all are.

    A seed is in force when torch's generator was seeded with it and Lightning will seed workers and processes with it.
    """
    in_force = settings_in_force()
    problems = []
    for field in fields(settings):
        wanted, found = getattr(settings, field.name), in_force[field.name]
        if wanted is not None and wanted != found:
            problems.append(SettingProblem(name=field.name, wanted=wanted, in_force=found))
    if settings.seed is not None and settings.seed == in_force["seed"]:
        for variable, value in _seed_variables(settings.seed).items():
            if os.environ.get(variable) != value:
                found = f"{variable}={os.environ.get(variable)}"
                problems.append(SettingProblem(name="seed", wanted=f"{variable}={value}", in_force=found))
    return tuple(problems)


def require_in_force(settings: DeterminismSettings) -> None:
    """Raise ``SettingsError`` that names what is asked for and not in force."""
    problems = check_settings(settings)
    if problems:
        shown = "; ".join(f"{item.name} should be {item.wanted!r} and is {item.in_force!r}" for item in problems)
        raise SettingsError(
            f"Determinism settings are not in force: {shown}. Call det_callbacks.enforce_determinism(settings) before "
            "the model is built, or use the Hydra preset, which does."
        )


class EnforcedDeterminism:
    """Settings that were applied, and the way back; made by :func:`enforce_determinism`.

    As a context manager it restores on every exit path. Nested uses must end in the reverse order of their beginnings.
    """

    def __init__(self, settings: DeterminismSettings) -> None:
        self.settings = settings
        self._state: _ProcessState | None = _ProcessState()

    def __enter__(self) -> "EnforcedDeterminism":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Put back generators, flags, threads and environment variables as they were; a second call does nothing.

        The generators go back too when no seed was set: what was drawn meanwhile is drawn again.
        """
        state, self._state = self._state, None
        if state is not None:
            state.restore()


def enforce_determinism(settings: DeterminismSettings | Mapping[str, Any]) -> EnforcedDeterminism:
    """Apply settings at once; the result is also a context manager that puts everything back.

    Call it before the model is built: weights that exist already were drawn without the seed.

    Args:
        settings: what to set, as :class:`DeterminismSettings` or a mapping with its field names.

    Returns:
        The applied settings; ``with`` it, or call its ``restore``, to undo them.

    Raises:
        SettingsError: a value is not allowed, or a setting comes too late. Nothing is changed then.

    Example:
        >>> with enforce_determinism(DeterminismSettings(seed=0)):
        ...     first = torch.rand(2)
        >>> with enforce_determinism(DeterminismSettings(seed=0)):
        ...     assert torch.equal(first, torch.rand(2))
    """
    if not isinstance(settings, DeterminismSettings):
        settings = DeterminismSettings.from_mapping(settings)
    _refuse_late(settings)
    enforced = EnforcedDeterminism(settings)
    try:
        _apply(settings)
    except BaseException:
        enforced.restore()
        raise
    return enforced


def _apply(settings: DeterminismSettings) -> None:
    if settings.cublas_workspace_config is not None:
        os.environ[_WORKSPACE_VARIABLE] = settings.cublas_workspace_config
    if settings.deterministic_algorithms is not None:
        _set_algorithms(settings.deterministic_algorithms)
    if settings.fill_uninitialized_memory is not None:
        _deterministic.fill_uninitialized_memory = settings.fill_uninitialized_memory
    if settings.cudnn_benchmark is not None:
        torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    if settings.cudnn_deterministic is not None:
        torch.backends.cudnn.deterministic = settings.cudnn_deterministic
    if settings.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(settings.float32_matmul_precision)
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    if settings.seed is not None:
        # The same calls as Lightning's seed_everything(seed, workers=True), without importing Lightning.
        os.environ.update(_seed_variables(settings.seed))
        random.seed(settings.seed)
        np.random.seed(settings.seed)
        torch.manual_seed(settings.seed)


def _refuse_late(settings: DeterminismSettings) -> None:
    wanted, in_force = settings.cublas_workspace_config, os.environ.get(_WORKSPACE_VARIABLE)
    if wanted is not None and wanted != in_force and _has_cuda_context():
        raise SettingsError(
            f"cublas_workspace_config={wanted!r} comes too late: a CUDA context exists, cuBLAS may have read "
            f"{_WORKSPACE_VARIABLE}={in_force} already. Nothing was changed. Enforce the settings before anything "
            f"touches the GPU, or start the program with {_WORKSPACE_VARIABLE}={wanted} set."
        )


class _ProcessState:
    """Everything settings or a training can change in a running process, as it was when this was made."""

    def __init__(self) -> None:
        self._variables = {name: os.environ.get(name) for name in _VARIABLES}
        self._undo: list[Callable[[], object]] = []
        self._keep_flags()
        self._keep_generators()

    def restore(self) -> None:
        for name, value in self._variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for undo in self._undo:
            undo()

    def _keep_flags(self) -> None:
        algorithms = _algorithms_in_force()
        self._undo.append(lambda: _set_algorithms(algorithms))
        inductor = sys.modules.get("torch._inductor.config")
        if inductor is not None:
            # use_deterministic_algorithms overwrites this one, and it may have been another before.
            self._keep_attribute(inductor, "deterministic")
        self._keep_attribute(_deterministic, "fill_uninitialized_memory")
        for name in ("benchmark", "deterministic", "allow_tf32"):
            self._keep_attribute(torch.backends.cudnn, name)
        precision = _matmul_precision_in_force()
        if precision != "mixed":
            self._undo.append(lambda: torch.set_float32_matmul_precision(precision))
        # The line above writes both of these as well, and knows no "none", which is where they start.
        self._keep_attribute(_backends.cuda.matmul, "fp32_precision")
        self._keep_attribute(_backends.mkldnn.matmul, "fp32_precision")
        num_threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
        self._undo.append(lambda: torch.set_num_threads(num_threads))
        self._undo.append(lambda: torch.set_default_dtype(dtype))

    def _keep_attribute(self, owner: Any, name: str) -> None:
        value = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, value))

    def _keep_generators(self) -> None:
        python, numpy, seed, cpu = random.getstate(), np.random.get_state(), torch.initial_seed(), torch.get_rng_state()
        self._undo.append(lambda: random.setstate(python))
        self._undo.append(lambda: np.random.set_state(numpy))
        self._undo.append(lambda: torch.set_rng_state(cpu))
        if _has_cuda_context():
            cuda = torch.cuda.get_rng_state_all()
            self._undo.append(lambda: torch.cuda.set_rng_state_all(cuda))
        else:
            # Reading the states would create a CUDA context. A generator that does not exist yet will start from the
            # seed of torch.manual_seed, or from torch's default when that was never called.
            start = seed if seed <= MAX_SEED else _CUDA_DEFAULT_SEED
            self._undo.append(lambda: torch.cuda.manual_seed_all(start))


def _has_cuda_context() -> bool:
    return bool(torch.cuda.is_initialized())


def _algorithms_in_force() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "disabled"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "error"


def _set_algorithms(value: str) -> None:
    torch.use_deterministic_algorithms(value != "disabled", warn_only=value == "warn")


def _matmul_precision_in_force() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to answer when the newer fp32_precision attributes say something else
        return "mixed"


def _seed_variables(seed: int) -> dict[str, str]:
    return {_SEED_VARIABLE: str(seed), _WORKERS_VARIABLE: "1"}


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
