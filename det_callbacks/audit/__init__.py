"""Finding what is nondeterministic: an op, or a whole step, run again from the same state."""

from det_callbacks.audit.findings import AuditFinding, AuditReport, escape_pattern, write_replay_list
from det_callbacks.audit.held_state import HeldState
from det_callbacks.audit.step_audit import StepAudit

__all__ = [
    "AuditFinding",
    "AuditReport",
    "HeldState",
    "StepAudit",
    "escape_pattern",
    "write_replay_list",
]
