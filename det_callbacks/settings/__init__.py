"""What is enforced so that a run can repeat, what is in force, and how both are put back.

Three questions, three functions: :func:`enforce_determinism` sets, :func:`settings_in_force` asks torch and the
process (never our own record of what was set), :func:`check_settings` compares the two.
"""

from det_callbacks.settings.catalogue import MAX_SEED, SETTINGS, Setting
from det_callbacks.settings.check import (
    SettingProblem,
    check_settings,
    settings_in_force,
)
from det_callbacks.settings.enforce import EnforcedDeterminism, enforce_around_training, enforce_determinism
from det_callbacks.settings.model import DeterminismSettings

__all__ = [
    "MAX_SEED",
    "SETTINGS",
    "DeterminismSettings",
    "EnforcedDeterminism",
    "Setting",
    "SettingProblem",
    "check_settings",
    "enforce_around_training",
    "enforce_determinism",
    "settings_in_force",
]
