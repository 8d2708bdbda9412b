"""By how much two modules differ that are meant to compute the same: eager and compiled, one and two threads."""

from det_callbacks.numerics.modules import compare_compiled, compare_modules
from det_callbacks.numerics.result import NumericsReport, TensorComparison

__all__ = ["NumericsReport", "TensorComparison", "compare_compiled", "compare_modules"]
