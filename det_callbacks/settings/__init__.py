"""Settings that make a run reproducible: enforces them, and reads those in force."""

from det_callbacks.settings.catalogue import (
    MAX_SEED,
    SETTINGS,
    DeterminismSettings,
    settings_in_force,
)
from det_callbacks.settings.enforce import (
    EnforcedDeterminism,
    enforce_around_training,
    enforce_determinism,
    settings_without_effect,
)

__all__ = [
    "MAX_SEED",
    "SETTINGS",
    "DeterminismSettings",
    "EnforcedDeterminism",
    "enforce_around_training",
    "enforce_determinism",
    "settings_in_force",
    "settings_without_effect",
]
