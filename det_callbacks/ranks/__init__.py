"""What the processes of one run tell each other."""

from det_callbacks.ranks.group import RankGroup
from det_callbacks.ranks.replicas import ReplicaAudit, ReplicaDifference, ReplicaReport, ReplicaValue
from det_callbacks.ranks.replicated import ReplicatedState, ReplicaTensor, holders_of, replicated_state

__all__ = [
    "RankGroup",
    "ReplicaAudit",
    "ReplicaDifference",
    "ReplicaReport",
    "ReplicaTensor",
    "ReplicaValue",
    "ReplicatedState",
    "holders_of",
    "replicated_state",
]
