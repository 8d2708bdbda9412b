"""Finding what is nondeterministic: an op, or a whole step, run again from the same state."""

from det_callbacks.audit.findings import AuditFinding, AuditReport, escape_pattern, replay_list
from det_callbacks.audit.held_state import HeldState
from det_callbacks.audit.op_audit import OpAudit
from det_callbacks.audit.step_audit import StepAudit

__all__ = [
    "AuditFinding",
    "AuditReport",
    "HeldState",
    "OpAudit",
    "StepAudit",
    "escape_pattern",
    "replay_list",
]
