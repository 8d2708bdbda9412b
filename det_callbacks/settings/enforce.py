"""Settings put in force: as a call, or as a context manager, and the way back."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

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

# Typed loosely: torch 2.13 declares neither fill_uninitialized_memory nor the matmul of mkldnn.
_deterministic: Any = torch.utils.deterministic
_backends: Any = torch.backends

_VARIABLES = (
    SEED_VARIABLE,
    WORKERS_VARIABLE,
    *(setting.variable for setting in SETTINGS.values() if setting.variable is not None and setting.is_restorable),
)


class EnforcedDeterminism:
    """The way back from settings that were applied; made by :func:`enforce_determinism`.

    As a context manager it restores on every exit path. Nested uses must end in the reverse order of their beginnings.

    Attributes:
        settings: what was applied.
    """

    def __init__(self, settings: DeterminismSettings, *, with_generators: bool = True) -> None:
        self.settings = settings
        self._undo: list[Callable[[], object]] = []
        self._keep(settings, with_generators=with_generators)

    def __enter__(self) -> "EnforcedDeterminism":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Put back generators, flags, threads and environment variables as they were; a second call does nothing.

        The generators go back too when no seed was set: what was drawn meanwhile is drawn again. The number of interop
        threads stays, which no running process can put back.
        """
        undo, self._undo = self._undo, []
        for step in undo:
            step()

    def _keep(self, settings: DeterminismSettings, *, with_generators: bool) -> None:
        """Note everything that settings or a training can change in a running process."""
        names = _VARIABLES if with_generators else set(_VARIABLES) - {SEED_VARIABLE, WORKERS_VARIABLE}
        self._undo.append(partial(_set_variables, {name: os.environ.get(name) for name in names}))
        if settings.seed is not None:
            self._undo.append(keep_earlier_parameters())
        self._undo.append(partial(set_algorithms, algorithms_in_force()))
        if settings.inductor_deterministic is not None or settings.inductor_max_autotune is not None:
            load_inductor_config()  # here, so that what it starts with is put back
        inductor = inductor_config()
        if inductor is not None:
            # use_deterministic_algorithms overwrites the first one, and it may have been another before.
            self._keep_attributes(inductor, "deterministic", "max_autotune")
        self._keep_attributes(_deterministic, "fill_uninitialized_memory")
        self._keep_attributes(torch.backends.cudnn, "benchmark", "deterministic", "allow_tf32")
        precision = matmul_precision_in_force()
        if precision != "mixed":
            self._undo.append(lambda: torch.set_float32_matmul_precision(precision))
        # The line above writes both of these as well, and knows no "none", which is where they start.
        self._keep_attributes(_backends.cuda.matmul, "fp32_precision")
        self._keep_attributes(_backends.mkldnn.matmul, "fp32_precision")
        for kind in ("fp16", "bf16"):
            self._keep_attributes(_backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction")
        self._undo += [
            partial(set_sdpa, sdpa_in_force()),
            partial(torch.set_num_threads, torch.get_num_threads()),
            partial(torch.set_default_dtype, torch.get_default_dtype()),
        ]
        if with_generators:
            self._undo.append(partial(RewindPoint().put_back, restarts_new=True))

    def _keep_attributes(self, owner: Any, *names: str) -> None:
        self._undo += [partial(setattr, owner, name, getattr(owner, name)) for name in names]


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def enforce_determinism(settings: DeterminismSettings | Mapping[str, Any]) -> EnforcedDeterminism:
    """Apply settings at once; the result is also a context manager that puts everything back.

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
