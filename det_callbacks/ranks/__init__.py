"""What the processes of one run tell each other."""

from det_callbacks.ranks.group import RankGroup
from det_callbacks.ranks.replicas import ReplicaAudit, ReplicaDifference, ReplicaReport, ReplicaValue
from det_callbacks.ranks.replicated import ReplicatedState, ReplicaTensor, holders_of, replicated_state
from det_callbacks.ranks.start import require_same, start_facts

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
    "require_same",
    "start_facts",
]
