"""Everything that a person reads: verdicts, runs and closing lines."""

from det_callbacks.report.audit_text import audit_line, audit_lines
from det_callbacks.report.check_text import announce_run, render_check
from det_callbacks.report.checkpoint_text import (
    mismatch_text,
    missing_sidecar_line,
    remote_save_line,
    render_checkpoint,
    unfinished_save_line,
    unrestored_line,
)
from det_callbacks.report.closing import (
    count,
    level_words,
    no_metrics_text,
    no_prediction_line,
    no_report_line,
    nothing_recorded_text,
    print_closing_line,
    progress_word,
    recorded_call_line,
    recorded_line,
    unfinished_text,
    verified_line,
    waiting_line,
)
from det_callbacks.report.doctor_text import render_diagnosis
from det_callbacks.report.export_text import render_export
from det_callbacks.report.html import write_report
from det_callbacks.report.leaving import end_process, print_error
from det_callbacks.report.numerics_text import numerics_text
from det_callbacks.report.op_usage import OpUsage, OpUse, find_op_usage
from det_callbacks.report.ops_json import op_facts_to_dict, op_usage_to_dict
from det_callbacks.report.ops_text import render_op_facts, render_op_usage
from det_callbacks.report.replica_text import no_replicas_line, replicas_line, replicas_text
from det_callbacks.report.run_json import run_to_dict, step_to_dict
from det_callbacks.report.run_text import render_digest_places, render_ops, render_run, render_step
from det_callbacks.report.verdict_text import disagreement_text, render_verdict, verdict_lines, verdict_of_rank

__all__ = [
    "OpUsage",
    "OpUse",
    "announce_run",
    "audit_line",
    "audit_lines",
    "count",
    "disagreement_text",
    "end_process",
    "find_op_usage",
    "level_words",
    "mismatch_text",
    "missing_sidecar_line",
    "no_metrics_text",
    "no_prediction_line",
    "no_replicas_line",
    "no_report_line",
    "nothing_recorded_text",
    "numerics_text",
    "op_facts_to_dict",
    "op_usage_to_dict",
    "print_closing_line",
    "print_error",
    "progress_word",
    "recorded_call_line",
    "recorded_line",
    "remote_save_line",
    "render_check",
    "render_checkpoint",
    "render_diagnosis",
    "render_digest_places",
    "render_export",
    "render_op_facts",
    "render_op_usage",
    "render_ops",
    "render_run",
    "render_step",
    "render_verdict",
    "replicas_line",
    "replicas_text",
    "run_to_dict",
    "step_to_dict",
    "unfinished_save_line",
    "unfinished_text",
    "unrestored_line",
    "verdict_lines",
    "verdict_of_rank",
    "verified_line",
    "waiting_line",
    "write_report",
]
