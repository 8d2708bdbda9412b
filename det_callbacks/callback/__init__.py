"""DeterminismCallback: when Lightning calls us."""

from det_callbacks.callback.determinism import DeterminismCallback, runs_finished

__all__ = ["DeterminismCallback", "runs_finished"]
