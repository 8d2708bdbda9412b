"""What the processes of one run tell each other."""

from det_callbacks.ranks.group import RankGroup
from det_callbacks.ranks.start import require_same, start_facts
from det_callbacks.ranks.watch import Ended, Watch

__all__ = ["Ended", "RankGroup", "Watch", "require_same", "start_facts"]
