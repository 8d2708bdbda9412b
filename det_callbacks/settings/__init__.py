"""What is enforced so that a run can repeat, what is in force, and how both are put back.

:func:`enforce_determinism` sets, and :func:`settings_in_force` asks torch and the process, never our own record.
"""

from det_callbacks.settings.catalogue import MAX_SEED, SETTINGS, Setting, settings_in_force
from det_callbacks.settings.enforce import (
    EnforcedDeterminism,
    enforce_around_training,
    enforce_determinism,
    enforced_names,
)
from det_callbacks.settings.model import DeterminismSettings

__all__ = [
    "MAX_SEED",
    "SETTINGS",
    "DeterminismSettings",
    "EnforcedDeterminism",
    "Setting",
    "enforce_around_training",
    "enforce_determinism",
    "enforced_names",
    "settings_in_force",
]
