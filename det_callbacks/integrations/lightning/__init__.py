"""Lightning's callbacks: DeterminismCallback and ReplicaAuditCallback."""

from det_callbacks.integrations.lightning.determinism import DeterminismCallback
from det_callbacks.integrations.lightning.proof import prove_resume
from det_callbacks.integrations.lightning.replica_audit import ReplicaAuditCallback

__all__ = ["DeterminismCallback", "ReplicaAuditCallback", "prove_resume"]
