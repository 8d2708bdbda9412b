"""How much was kept, and what was not."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Calls of ops whose tensors a process was asked to keep and did not.

    Attributes:
        first_step: the first step of which something is not there.
        num_calls: that were not kept, in all steps.
        reason: what was in the way the first time, in a few words.
    """

    first_step: int
    num_calls: int
    reason: str

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Shortage":
        """Return what ``asdict`` gave, after JSON; KeyError, TypeError or ValueError where it is not that."""
        return cls(
            first_step=int(content["first_step"]),
            num_calls=int(content["num_calls"]),
            reason=str(content["reason"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCounts:
    """What a run kept.

    Attributes:
        num_tensors: outputs of ops and what they read.
        num_steps: of which something was kept.
        num_bytes: on the disk.
        shortage: what was not kept; None where nothing is missing.
    """

    num_tensors: int = 0
    num_steps: int = 0
    num_bytes: int = 0
    shortage: Shortage | None = None

    def with_rank(self, other: "KeptCounts") -> "KeptCounts":
        """Return the counts of two processes, or fits, together; the steps are those of the one with more of them."""
        known = [one for one in (self.shortage, other.shortage) if one is not None]
        first = known[0] if known else None
        return KeptCounts(
            num_tensors=self.num_tensors + other.num_tensors,
            num_steps=max(self.num_steps, other.num_steps),
            num_bytes=self.num_bytes + other.num_bytes,
            shortage=None
            if first is None
            else Shortage(
                first_step=first.first_step,
                num_calls=sum(one.num_calls for one in known),
                reason=first.reason,
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "KeptCounts":
        """Return what ``to_dict`` gave, after JSON."""
        shortage = content["shortage"]
        return cls(**{**content, "shortage": None if shortage is None else Shortage.from_dict(shortage)})
