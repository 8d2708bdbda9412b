"""DeterminismCallback and ReplicaAuditCallback: when Lightning calls us."""

from det_callbacks.integrations.lightning.determinism import DeterminismCallback
from det_callbacks.integrations.lightning.proof import prove_resume
from det_callbacks.integrations.lightning.replica_audit import ReplicaAuditCallback

__all__ = ["DeterminismCallback", "ReplicaAuditCallback", "prove_resume"]
