"""Settings put in force: as a call, a context manager or a decorator, and the way back."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from det_callbacks.errors import SettingsError
from det_callbacks.rng import RewindPoint
from det_callbacks.settings.catalogue import (
    SETTINGS,
    Setting,
    algorithms_in_force,
    inductor_config,
    load_inductor_config,
    matmul_precision_in_force,
    restart_command,
    sdpa_in_force,
    set_algorithms,
    set_sdpa,
    start_environment,
)
from det_callbacks.settings.check import require_seed
from det_callbacks.settings.model import DeterminismSettings
from det_callbacks.settings.seeding import SEED_VARIABLE, WORKERS_VARIABLE, keep_earlier_parameters, seed_all

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Typed loosely: torch 2.13 declares neither fill_uninitialized_memory nor the matmul of mkldnn.
_deterministic: Any = torch.utils.deterministic
_backends: Any = torch.backends

_VARIABLES = (
    SEED_VARIABLE,
    WORKERS_VARIABLE,
    *(setting.variable for setting in SETTINGS.values() if setting.variable is not None and setting.is_restorable),
)


class EnforcedDeterminism:
    """Settings that were applied, and the way back; made by :func:`enforce_determinism`.

    As a context manager it restores on every exit path. Nested uses must end in the reverse order of their beginnings.
    As a decorator it puts the settings in force for each call of the function.

    Attributes:
        settings: what was applied.
        permanent: names of the settings that were applied and that no running process can put back: the number of
            interop threads. (What only a restart can set is never applied, only found in force or refused.)
    """

    def __init__(self, settings: DeterminismSettings, *, with_generators: bool = True) -> None:
        self.settings = settings
        self.permanent: tuple[str, ...] = tuple(
            name
            for name, setting in SETTINGS.items()
            if setting.when == "once" and getattr(settings, name) not in (None, setting.read())
        )
        self._state: _ProcessState | None = _ProcessState(settings, with_generators=with_generators)

    def __enter__(self) -> "EnforcedDeterminism":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return the function with the settings in force while it runs, and only then.

        Raises:
            TypeError: it is a coroutine or a generator function, which go on running after their call has returned.
        """
        if (
            inspect.iscoroutinefunction(function)
            or inspect.isgeneratorfunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            self.restore()
            raise TypeError(
                f"{getattr(function, '__qualname__', function)} goes on running after its call has returned; use `with "
                "enforce_determinism(settings):` inside it."
            )
        self.restore()

        @functools.wraps(function)
        def enforced(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with enforce_determinism(self.settings):
                return function(*args, **kwargs)

        return enforced

    def restore(self) -> None:
        """Put back generators, flags, threads and environment variables as they were; a second call does nothing.

        The generators go back too when no seed was set: what was drawn meanwhile is drawn again.
        """
        state, self._state = self._state, None
        if state is not None:
            state.restore()


def enforce_determinism(settings: DeterminismSettings | Mapping[str, Any]) -> EnforcedDeterminism:
    """Apply settings at once; the result is also a context manager and a decorator that put everything back.

    Call it before the model is built: weights that exist already were drawn without the seed, and the callback refuses
    to train them. With a seed it costs some 30 milliseconds, else a few microseconds.

    Args:
        settings: what to set, as :class:`DeterminismSettings` or a mapping with its field names.

    Returns:
        The applied settings; ``with`` it, or call its ``restore``, to undo them.

    Raises:
        SettingsError: a value is not allowed, or a setting comes too late. Nothing is changed then. What only a restart
            can set (``mkl_cbwr``, ``aten_cpu_capability``, ``python_hash_seed``) is refused with the command line that
            sets it, unless it is in force already.

    Example:
        >>> with enforce_determinism(DeterminismSettings(seed=0)):
        ...     first = torch.rand(2)
        >>> with enforce_determinism(DeterminismSettings(seed=0)):
        ...     assert torch.equal(first, torch.rand(2))
    """
    if not isinstance(settings, DeterminismSettings):
        settings = DeterminismSettings.from_mapping(settings)
    refuse_late(settings)
    return _enforce(EnforcedDeterminism(settings))


def enforce_around_training(settings: DeterminismSettings, model: nn.Module) -> EnforcedDeterminism:
    """Apply what can still be applied when a model is there and its training is about to begin.

    What has no effect on this machine is not demanded. The result's ``restore`` leaves the generators alone, which the
    training has moved.

    Args:
        settings: what to set.
        model: must not have been there before the seed was set.

    Raises:
        SettingsError: a setting comes too late, and how to make it earlier. Nothing is changed then.
    """
    if settings.mkl_cbwr is not None and not torch.backends.mkl.is_available():
        settings = replace(settings, mkl_cbwr=None)
    if settings.seed is not None:
        require_seed(settings.seed, model)
        settings = replace(settings, seed=None)
    refuse_late(settings)
    return _enforce(EnforcedDeterminism(settings, with_generators=False))


def _enforce(enforced: EnforcedDeterminism) -> EnforcedDeterminism:
    try:
        _apply(enforced.settings)
    except BaseException:  # Ctrl-C too: nobody has anything to restore by
        enforced.restore()
        raise
    return enforced


def refuse_late(settings: DeterminismSettings) -> None:
    """Raise ``SettingsError`` that names every setting that can no longer be made in this process."""
    late: list[str] = []
    variables: dict[str, str] = {}
    start = start_environment()
    for name, setting in SETTINGS.items():
        wanted = getattr(settings, name)
        if wanted is None:
            continue
        reason = too_late(setting, wanted)
        is_at_start = setting.when == "start" and start.get(setting.variable or "") == setting.as_text(wanted)
        if reason is not None and is_at_start:
            raise SettingsError(
                f"{name}={wanted!r} cannot be had here: {setting.how(wanted)} was set when the process started, and "
                f"{setting.read()!r} is in force all the same. Nothing was changed. Ask for what this machine can do, "
                "or for None."
            )
        if reason is not None:
            late.append(f"{name}={wanted!r} comes too late: {reason}")
            if setting.variable is not None:
                variables[setting.variable] = setting.as_text(wanted)
    if late:
        raise SettingsError(
            f"{'; '.join(late)}. Nothing was changed. Start the program with "
            f"{' and '.join(f'{name}={value}' for name, value in variables.items())} set:\n"
            f"    {restart_command(variables)}"
        )


def too_late(setting: Setting, wanted: Any) -> str | None:
    """Return why a setting can no longer be made in this process; None when it can, or is in force."""
    in_force = setting.read()
    if wanted == in_force:
        return None
    if setting.when == "start":
        return f"{setting.variable} is read when the process starts, and {in_force!r} was in force then"
    if setting.when == "before_cuda" and has_cuda_context():
        return f"a CUDA context exists, and cuBLAS may have read {setting.variable}={in_force} already"
    if setting.when == "before_nccl" and has_nccl_communicator():
        return f"an NCCL process group exists, and NCCL has read {setting.variable}={in_force} already"
    return None


def has_cuda_context() -> bool:
    """Return whether this process has used a GPU."""
    return bool(torch.cuda.is_initialized())


def has_nccl_communicator() -> bool:
    """Return whether the default process group is one of NCCL."""
    distributed = torch.distributed
    return (
        distributed.is_available() and distributed.is_initialized() and "nccl" in str(distributed.get_backend()).lower()
    )


def _apply(settings: DeterminismSettings) -> None:
    # what can be set once comes first: it can fail, and then nothing else was done
    for setting in sorted(SETTINGS.values(), key=lambda setting: setting.when != "once"):
        wanted = getattr(settings, setting.name)
        if wanted is None or setting.apply is None or (setting.when == "once" and wanted == setting.read()):
            continue
        try:
            setting.apply(wanted)
        except RuntimeError as error:
            if setting.when != "once":
                raise
            raise SettingsError(
                f"{setting.name}={wanted!r} comes too late: the pool of {setting.read()} threads has been used, or was "
                f"set before ({str(error).splitlines()[0]}). Nothing was changed. Enforce the settings before anything "
                "is computed."
            ) from error
    if settings.seed is not None:
        seed_all(settings.seed)


class _ProcessState:
    """Everything settings or a training can change in a running process, as it was when this was made."""

    def __init__(self, settings: DeterminismSettings, *, with_generators: bool) -> None:
        names = _VARIABLES if with_generators else set(_VARIABLES) - {SEED_VARIABLE, WORKERS_VARIABLE}
        self._variables = {name: os.environ.get(name) for name in names}
        self._undo: list[Callable[[], object]] = []
        if settings.seed is not None:
            self._undo.append(keep_earlier_parameters())
        self._keep_flags(settings)
        if with_generators:
            self._keep_generators()

    def restore(self) -> None:
        for name, value in self._variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for undo in self._undo:
            undo()

    def _keep_flags(self, settings: DeterminismSettings) -> None:
        algorithms = algorithms_in_force()
        self._undo.append(lambda: set_algorithms(algorithms))
        if settings.inductor_deterministic is not None or settings.inductor_max_autotune is not None:
            load_inductor_config()  # here, so that what it starts with is put back
        inductor = inductor_config()
        if inductor is not None:
            # use_deterministic_algorithms overwrites the first one, and it may have been another before.
            for name in ("deterministic", "max_autotune"):
                self._keep_attribute(inductor, name)
        self._keep_attribute(_deterministic, "fill_uninitialized_memory")
        for name in ("benchmark", "deterministic", "allow_tf32"):
            self._keep_attribute(torch.backends.cudnn, name)
        precision = matmul_precision_in_force()
        if precision != "mixed":
            self._undo.append(lambda: torch.set_float32_matmul_precision(precision))
        # The line above writes both of these as well, and knows no "none", which is where they start.
        self._keep_attribute(_backends.cuda.matmul, "fp32_precision")
        self._keep_attribute(_backends.mkldnn.matmul, "fp32_precision")
        for kind in ("fp16", "bf16"):
            self._keep_attribute(_backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction")
        sdpa = sdpa_in_force()
        self._undo.append(lambda: set_sdpa(sdpa))
        num_threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
        self._undo.append(lambda: torch.set_num_threads(num_threads))
        self._undo.append(lambda: torch.set_default_dtype(dtype))

    def _keep_attribute(self, owner: Any, name: str) -> None:
        value = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, value))

    def _keep_generators(self) -> None:
        self._undo.append(functools.partial(RewindPoint().put_back, restarts_new=True))
