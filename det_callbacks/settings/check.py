"""What is in force now, and what is asked for and is not."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from det_callbacks.errors import SettingsError
from det_callbacks.settings.catalogue import SETTINGS
from det_callbacks.settings.model import DeterminismSettings
from det_callbacks.settings.seeding import drawn_before_seeding, seed_variables


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
    """Return what is in force now, keyed like the fields of :class:`DeterminismSettings` but ``allow``.

    ``seed`` is the seed of torch's CPU generator, and None when that is none that Python, NumPy and Lightning could
    share: an unseeded generator starts from 64 random bits. ``float32_matmul_precision`` is "mixed" when torch's older
    and newer precision interfaces were both used and contradict each other. A variable that is not set is None.
    """
    return {name: setting.read() for name, setting in SETTINGS.items()}


def check_settings(settings: DeterminismSettings) -> tuple[SettingProblem, ...]:
    """Return the settings that are asked for and not in force; empty when all are.

    A seed is in force when torch's generator was seeded with it and Lightning will seed workers and processes with it.
    """
    in_force = settings_in_force()
    problems = []
    for name, found in in_force.items():
        wanted = getattr(settings, name)
        if wanted is not None and wanted != found:
            problems.append(SettingProblem(name=name, wanted=wanted, in_force=found))
    if settings.seed is not None and settings.seed == in_force["seed"]:
        for variable, value in seed_variables(settings.seed).items():
            if os.environ.get(variable) != value:
                found = f"{variable}={os.environ.get(variable)}"
                problems.append(SettingProblem(name="seed", wanted=f"{variable}={value}", in_force=found))
    return tuple(problems)


def require_in_force(settings: DeterminismSettings, *, suspects: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise ``SettingsError`` that names what is asked for and not in force.

    Args:
        settings: what is asked for.
        suspects: setting -> what leaves it as it is, if it was used ("Trainer(deterministic=False)").
    """
    problems = check_settings(settings)
    if problems:
        shown = "; ".join(
            f"{item.name} should be {item.wanted!r} and is {item.in_force!r}"
            + (f" (as {suspects[item.name]} leaves it)" if item.name in suspects else "")
            for item in problems
        )
        raise SettingsError(
            f"Determinism settings are not in force: {shown}. Call det_callbacks.enforce_determinism(settings) before "
            "the model is built, or use the Hydra preset, which does."
            + (" Those arguments of the Trainer overwrite what is in force: leave them out." if suspects else "")
        )


def require_seeded_before(model: nn.Module) -> None:
    """Raise ``SettingsError`` when parameters of a model were there before the seed was set."""
    early = drawn_before_seeding(model)
    if early:
        num_all = sum(1 for _ in model.named_parameters())
        raise SettingsError(
            f"The seed came too late: {len(early)} of the model's {num_all} parameters ({', '.join(early[:3])}"
            f"{', ...' if len(early) > 3 else ''}) existed when it was set, so they were drawn without it. Call "
            "det_callbacks.enforce_determinism(settings) before the model is built."
        )
