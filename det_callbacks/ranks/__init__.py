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
from det_callbacks.ranks.start import require_same, require_same_start, start_facts

__all__ = [
    "RankGroup",
    "ReplicaAudit",
    "ReplicaDifference",
    "ReplicaReport",
    "ReplicaValue",
    "ReplicatedState",
    "replicated_state",
    "require_same",
    "require_same_start",
    "start_facts",
]
