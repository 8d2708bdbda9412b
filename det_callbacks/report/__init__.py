"""Everything that a person reads: verdicts, runs and closing lines."""

from det_callbacks.report.closing import count, print_closing_line, recorded_line, verified_line
from det_callbacks.report.doctor_text import render_diagnosis
from det_callbacks.report.op_usage import OpUsage, OpUse, find_op_usage
from det_callbacks.report.ops_json import op_facts_to_dict, op_usage_to_dict
from det_callbacks.report.ops_text import render_op_facts, render_op_usage
from det_callbacks.report.run_json import run_to_dict, step_to_dict
from det_callbacks.report.run_text import render_digest_places, render_ops, render_run, render_step
from det_callbacks.report.verdict_text import render_verdict, verdict_lines

__all__ = [
    "OpUsage",
    "OpUse",
    "count",
    "find_op_usage",
    "op_facts_to_dict",
    "op_usage_to_dict",
    "print_closing_line",
    "recorded_line",
    "render_diagnosis",
    "render_digest_places",
    "render_op_facts",
    "render_op_usage",
    "render_ops",
    "render_run",
    "render_step",
    "render_verdict",
    "run_to_dict",
    "step_to_dict",
    "verdict_lines",
    "verified_line",
]
