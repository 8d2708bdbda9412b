"""Settings of the process that starts the ranks, in the ranks: a spawned process begins with torch's own flags."""

import multiprocessing
import os
from dataclasses import fields
from typing import Any

from torch import nn

from det_callbacks.callback.alerts import conflicts_of_trainer
from det_callbacks.settings import (
    SETTINGS,
    DeterminismSettings,
    enforce_determinism,
    require_in_force,
    require_seeded_before,
    settings_in_force,
)


class InheritedSettings:
    """What was in force in the process that pickled it, such as one that starts ranks with ``ddp_spawn``.

    Environment variables are inherited by themselves. Of the flags, Lightning 2.6.6 hands on the deterministic
    algorithms, the cuDNN benchmark and the generators only (its ``_GlobalStateSnapshot``).
    """

    def __init__(self, in_force: dict[str, Any] | None = None, process: int = -1) -> None:
        self._in_force = in_force or {}
        self._process = process

    def __reduce__(self) -> tuple[type["InheritedSettings"], tuple[dict[str, Any], int]]:
        """Take along what is in force now."""
        return InheritedSettings, (settings_in_force(), os.getpid())

    def require(self, settings: DeterminismSettings, module: nn.Module) -> None:
        """Raise ``SettingsError`` unless settings are in force, here or in the process that started this one.

        Args:
            settings: what is asked for.
            module: must not have been there before the seed was set.
        """
        self._put_in_force(settings)
        require_in_force(settings, suspects=conflicts_of_trainer(settings))
        if settings.seed is not None:
            require_seeded_before(module)

    def _put_in_force(self, settings: DeterminismSettings) -> None:
        """Put what was in force in the process that started this one in force here, for the rest of this one's life.

        What was not stays as it is, to be found missing. Nothing is done where no process of this program started this
        one.
        """
        if multiprocessing.parent_process() is None or self._process in (-1, os.getpid()):
            return
        wanted: dict[str, Any] = {field.name: None for field in fields(settings)} | {"allow": settings.allow}
        for name, setting in SETTINGS.items():
            value = getattr(settings, name)
            if value is not None and setting.apply is not None and self._in_force.get(name) == value:
                wanted[name] = value
        enforce_determinism(DeterminismSettings(**wanted))
