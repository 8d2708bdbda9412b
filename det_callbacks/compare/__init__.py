"""Comparing steps and runs: what differs, where it starts, and why."""

from det_callbacks.compare.align import Alignment, align
from det_callbacks.compare.runs import compare_runs
from det_callbacks.compare.step import StepDifference, compare_steps
from det_callbacks.compare.verdict_builder import VerdictBuilder

__all__ = ["Alignment", "StepDifference", "VerdictBuilder", "align", "compare_runs", "compare_steps"]
