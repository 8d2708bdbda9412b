"""Applies settings, as a call or a context manager, and restores them."""

import gc
import os
import random
import shlex
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from det_callbacks.errors import SettingsError
from det_callbacks.internals.dynamo import INDUCTOR_CONFIG
from det_callbacks.settings.catalogue import (
    SETTINGS,
    DeterminismSettings,
    attribute_back,
    start_environment,
    variable_back,
)
from det_callbacks.settings.generators import RewindPoint

# written by set_float32_matmul_precision, which cannot restore "none" (torch 2.13)
_WRITTEN_TOO = (
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.mkldnn.matmul.fp32_precision",
)

# settings applied by us, the latest last: they are a choice, not a machine fact
_enforced: list[DeterminismSettings] = []

# the parameters that existed when the seed was set, by identity
_seeded_after: dict[str, Mapping[int, weakref.ref[nn.Parameter]]] = {"parameters": {}}


class EnforcedDeterminism(ExitStack):
    """Applied settings, returned by :func:`enforce_determinism`.

    As a context manager it restores everything on every exit path.
    Nested uses must end in reverse order.
    """

    def __init__(self, settings: DeterminismSettings, *, with_generators: bool = True) -> None:
        _refuse_late(settings)
        super().__init__()
        self.callback(_enforced.remove, settings)
        _enforced.append(settings)
        if with_generators:
            self.callback(RewindPoint().put_back, restarts_new=True)
            for name in _seed_variables(0):
                self.callback(variable_back(name))
        self.callback(torch.set_default_dtype, torch.get_default_dtype())
        for path in _WRITTEN_TOO:
            self.callback(attribute_back(path))
        # the algorithms before inductor's attribute, which they overwrite
        for setting in reversed([*SETTINGS.values()]):
            if setting.when != "start":
                self.callback(setting.way_back())
        self.callback(_seeded_after.update, dict(_seeded_after))
        try:
            for setting in SETTINGS.values():
                if (wanted := getattr(settings, setting.name)) is not None:
                    setting.apply(wanted)
            if settings.seed is not None:
                _seed_all(settings.seed)
        except BaseException:  # including Ctrl-C
            self.close()
            raise

    def restore(self) -> None:
        """Restore generators, flags, threads and environment variables; a second call does nothing.

        Generators are restored even if no seed was set.
        """
        self.close()


def enforced_names() -> set[str]:
    return {
        name for settings in _enforced for name in SETTINGS if getattr(settings, name) is not None
    }


def settings_without_effect() -> list[str]:
    """Return a sentence for each enforced setting, and each variable that the program set,
    that does not act here.

    A machine without CUDA is no such reason. That a setting acts cannot be seen.
    """
    wanted = {
        name: value
        for settings in _enforced
        for name in SETTINGS
        if (value := getattr(settings, name)) is not None
    }
    found = [
        f"{name}={value!r}: only {SETTINGS[name].reader} reads {SETTINGS[name].variable}, and it "
        "was not imported"
        for name, value in wanted.items()
        if SETTINGS[name].reader and SETTINGS[name].reader not in sys.modules
    ]
    if wanted.get("deterministic_algorithms") == "warn" and torch.cuda.is_available():
        found.append(
            "deterministic_algorithms='warn': on CUDA, attention keeps its nondeterministic "
            "backward pass"
        )
    start = start_environment()
    for name, value in sorted(os.environ.items()):
        option = _option_of(name)
        if (
            option is not None
            and start.get(name) != value
            and f"{option[1]}" not in (value, f"{value == '1'}")
        ):
            found.append(
                f"{name}={value}: it was set after the start, and {option[0]} is {option[1]}"
            )
    return found


def _option_of(variable: str) -> tuple[str, Any] | None:
    """Return the option that a variable sets when torch or Inductor starts, and its value."""
    if variable == "OMP_NUM_THREADS":
        return "torch.get_num_threads()", torch.get_num_threads()
    name = variable.removeprefix("TORCHINDUCTOR_").lower()
    options = sys.modules.get(INDUCTOR_CONFIG) if variable.startswith("TORCHINDUCTOR_") else None
    return (f"{INDUCTOR_CONFIG}.{name}", getattr(options, name)) if hasattr(options, name) else None


def enforce_determinism(settings: DeterminismSettings | Mapping[str, Any]) -> EnforcedDeterminism:
    """Apply settings immediately; the result is also a context manager that restores everything.

    Call it before you build the model: the callback refuses weights that were drawn before the
    seed. Setting the seed takes about 30 milliseconds.

    Args:
        settings: a :class:`DeterminismSettings`, or a mapping with its field names.

    Returns:
        The applied settings; use it in ``with``, or call its ``restore``, to undo them.

    Raises:
        SettingsError: a value is not allowed, or can no longer take effect; nothing is changed. If
            the value needs a restart, the message has the command line.

    Examples:
        >>> with enforce_determinism(DeterminismSettings(seed=0)):
        ...     first = torch.rand(2)
        >>> with enforce_determinism(DeterminismSettings(seed=0)):
        ...     assert torch.equal(first, torch.rand(2))
    """
    if not isinstance(settings, DeterminismSettings):
        settings = DeterminismSettings.from_mapping(settings)
    return EnforcedDeterminism(settings)


def enforce_around_training(settings: DeterminismSettings, model: nn.Module) -> EnforcedDeterminism:
    """Apply settings that can be applied after the model is built;
    raise SettingsError if the seed was set later.

    ``restore`` does not restore generators.
    """
    if settings.mkl_cbwr is not None and not torch.backends.mkl.is_available():
        settings = replace(settings, mkl_cbwr=None)
    if settings.seed is not None:
        _require_seed(settings.seed, model)
        settings = replace(settings, seed=None)
    return EnforcedDeterminism(settings, with_generators=False)


def _refuse_late(settings: DeterminismSettings) -> None:
    late, variables = list[str](), list[str]()
    for name, setting in SETTINGS.items():
        wanted = getattr(settings, name)
        if wanted is not None and (reason := setting.too_late(wanted)) is not None:
            late.append(f"{name}={wanted!r} can no longer take effect: {reason}")
            variables.append(setting.how(wanted))
    if late:
        raise SettingsError(
            f"{'; '.join(late)}. Nothing was changed. Start the program with "
            f"{' and '.join(variables)} set:\n"
            f"    {' '.join(map(shlex.quote, variables))} {shlex.join(sys.orig_argv)}"
        )


def _seed_all(seed: int) -> None:
    """Seed like Lightning's ``seed_everything(seed, workers=True)``,
    and note which parameters exist.
    """
    is_parameter: Callable[[type], bool] = cache(lambda kind: issubclass(kind, nn.Parameter))
    found = (one for one in gc.get_objects() if is_parameter(type(one)) and not is_lazy(one))
    # takes 30 milliseconds; weak references
    _seeded_after["parameters"] = {id(one): weakref.ref(one) for one in found}
    os.environ.update(_seed_variables(seed))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _require_seed(seed: int, model: nn.Module) -> None:
    how = (
        "Seed before you build the model, with training_snapshot in a test, "
        "lightning.seed_everything(seed, workers=True), enforce_determinism(settings), "
        "seed_everything of LightningCLI, --seed of the command line, or the Hydra preset."
    )
    states = [("the seed of torch", str(seed), str(torch.initial_seed()))]
    states += [
        (name, value, str(os.environ.get(name))) for name, value in _seed_variables(seed).items()
    ]
    for name, wanted, found in states:
        if wanted != found:
            raise SettingsError(
                f"seed={seed} is not in force: {name} is {found} and should be {wanted}. If the "
                "program seeds itself, omit the seed from the settings, or use the same seed in "
                f"both, with workers=True. {how}"
            )
    parameters, known = dict(model.named_parameters()), _seeded_after["parameters"]
    if early := [
        name for name, one in parameters.items() if known.get(id(one), lambda: None)() is one
    ]:
        raise SettingsError(
            f"The seed was set too late: {len(early)} of the model's {len(parameters)} parameters "
            f"({', '.join(early[:3])}{', ...' if len(early) > 3 else ''}) were already "
            f"initialised. {how}"
        )


def _seed_variables(seed: int) -> dict[str, str]:
    """Return the environment variables that
    seed_everything(workers=True) sets (Lightning 2.6.6).
    """
    return {"PL_GLOBAL_SEED": str(seed), "PL_SEED_WORKERS": "1"}
