"""DeterminismCallback: when Lightning calls us."""

from det_callbacks.callback.determinism import DeterminismCallback
from det_callbacks.callback.fits import runs_finished, take_unfinished

__all__ = ["DeterminismCallback", "runs_finished", "take_unfinished"]
