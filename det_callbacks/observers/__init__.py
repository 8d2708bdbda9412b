"""Observations: what a model or a script wants recorded by name, with or without a Trainer."""

from det_callbacks.observers.context import ObserverContext
from det_callbacks.observers.functions import (
    disable_hash_mode,
    enable_hash_mode,
    observe,
    observe_grad,
    observe_non_deterministic,
    observe_non_deterministic_grad,
)
from det_callbacks.observers.observations import Observations, activate, deactivate

__all__ = [
    "Observations",
    "ObserverContext",
    "activate",
    "deactivate",
    "disable_hash_mode",
    "enable_hash_mode",
    "observe",
    "observe_grad",
    "observe_non_deterministic",
    "observe_non_deterministic_grad",
]
