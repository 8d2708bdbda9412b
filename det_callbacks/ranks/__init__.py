"""What the processes of one run tell each other."""

from det_callbacks.ranks.group import RankGroup

__all__ = ["RankGroup"]
