"""Tensors saved while recording, and put back while verifying, bit for bit."""

from det_callbacks.replay.choice import replay_patterns
from det_callbacks.replay.counts import ReplayCounts
from det_callbacks.replay.files import replay_path
from det_callbacks.replay.late import replay, replay_apart
from det_callbacks.replay.ops import OpReplayer, OpResaver, OpSaver
from det_callbacks.replay.parts import SavedTensor, copy_bits, new_tensor, put_back
from det_callbacks.replay.reading import SavedStep
from det_callbacks.replay.saving import TENSOR_BUDGET_MIB, SavedTensors, check_budget, require_room

__all__ = [
    "TENSOR_BUDGET_MIB",
    "OpReplayer",
    "OpResaver",
    "OpSaver",
    "ReplayCounts",
    "SavedStep",
    "SavedTensor",
    "SavedTensors",
    "check_budget",
    "copy_bits",
    "new_tensor",
    "put_back",
    "replay",
    "replay_apart",
    "replay_path",
    "replay_patterns",
    "require_room",
]
