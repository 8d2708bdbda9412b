"""Comparing steps and ranks: what differs, where it starts, and which rule names the cause. The judge stands above."""

from det_callbacks.compare.align import Alignment, align
from det_callbacks.compare.step import StepDifference, compare_steps

__all__ = ["Alignment", "StepDifference", "align", "compare_steps"]
