"""What is in force now, and what is asked for and is not."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
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
    problems = list(_seed_problems(settings.seed))
    for name, setting in SETTINGS.items():
        wanted, found = getattr(settings, name), setting.read()
        if name != "seed" and wanted is not None and wanted != found:
            problems.append(SettingProblem(name=name, wanted=wanted, in_force=found))
    return tuple(problems)


def _seed_problems(seed: int | None) -> Iterator[SettingProblem]:
    if seed is None:
        return
    if seed != (found := settings_in_force()["seed"]):
        yield SettingProblem(name="seed", wanted=seed, in_force=found)
        return
    for variable, value in seed_variables(seed).items():
        if (text := os.environ.get(variable)) != value:
            yield SettingProblem(name="seed", wanted=f"{variable}={value}", in_force=f"{variable}={text}")


def require_seed(seed: int, model: nn.Module) -> None:
    """Raise ``SettingsError`` unless a seed was set, and before the parameters of a model were there."""
    how = (
        "Seed before the model is built: seed_everything of LightningCLI, lightning.seed_everything(seed, "
        "workers=True), det_callbacks.enforce_determinism(settings), or the Hydra preset, which does."
    )
    for problem in _seed_problems(seed):
        raise SettingsError(
            f"seed={seed} comes too late: the model is there, and the seed should be {problem.wanted!r} and is "
            f"{problem.in_force!r}. {how}"
        )
    if early := drawn_before_seeding(model):
        num_all = sum(1 for _ in model.named_parameters())
        raise SettingsError(
            f"The seed came too late: {len(early)} of the model's {num_all} parameters ({', '.join(early[:3])}"
            f"{', ...' if len(early) > 3 else ''}) existed when it was set, so they were drawn without it. {how}"
        )
