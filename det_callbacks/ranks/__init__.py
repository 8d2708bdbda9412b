"""What the processes of one run tell each other."""

from det_callbacks.ranks.group import RankGroup
from det_callbacks.ranks.replicas import (
    ReplicaAudit,
    ReplicaDifference,
    ReplicaReport,
    ReplicatedState,
    ReplicaValue,
    replicated_state,
)

__all__ = [
    "RankGroup",
    "ReplicaAudit",
    "ReplicaDifference",
    "ReplicaReport",
    "ReplicaValue",
    "ReplicatedState",
    "replicated_state",
]
