"""A script checked in one command: run twice in fresh processes, and again with what must not matter changed."""

from det_callbacks.check.factors import FACTORS, NUM_WORKERS_VARIABLE, Factor
from det_callbacks.check.model import CheckedRun, CheckReport
from det_callbacks.check.runner import check_script

__all__ = ["FACTORS", "NUM_WORKERS_VARIABLE", "CheckReport", "CheckedRun", "Factor", "check_script"]
