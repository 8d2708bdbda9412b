"""DeterminismCallback and ReplicaAuditCallback: when Lightning calls us."""

from det_callbacks.callback.determinism import DeterminismCallback
from det_callbacks.callback.fits import take_unfinished
from det_callbacks.callback.proof import prove_resume
from det_callbacks.callback.replica_audit import ReplicaAuditCallback

__all__ = ["DeterminismCallback", "ReplicaAuditCallback", "prove_resume", "take_unfinished"]
