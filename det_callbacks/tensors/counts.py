"""How much was saved, put back and kept, and what was not: plain data."""

from dataclasses import asdict, dataclass, replace
from typing import Any


class ReplayCounts:
    """Counts the tensors saved or put back, by op or by the name of an observation.

    Example:
        >>> counts = ReplayCounts()
        >>> counts.add("aten.index_add_.default", differs=True, num_bytes=2**20)
        >>> counts.end_step()
        >>> counts.to_dict()
        {'aten.index_add_.default': {'count': 1, 'differing': 1, 'mib_per_step': 1.0}}
    """

    def __init__(self) -> None:
        self._by_op: dict[str, tuple[int, int, int]] = {}
        self._num_steps = 0

    def add(self, op: str, *, differs: bool = False, num_bytes: int = 0) -> None:
        """Count one tensor, or plain value; ``differs`` where the live bits were others than the saved ones."""
        count, differing, total = self._by_op.get(op, (0, 0, 0))
        self._by_op[op] = count + 1, differing + differs, total + num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them together."""
        return sum(total for _, _, total in self._by_op.values())

    def end_step(self) -> None:
        """Count a step, whether or not anything was saved or put back in it."""
        self._num_steps += 1

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return what the coverage shows as ``replayed``: tensors in all, those that differed, MiB a step."""
        return {
            op: {
                "count": count,
                "differing": differing,
                "mib_per_step": round(total / 2**20 / max(1, self._num_steps), 6),
            }
            for op, (count, differing, total) in sorted(self._by_op.items())
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCounts:
    """What a run kept of the tensors of ops, and what it was asked to keep and did not.

    Attributes:
        num_tensors: outputs of ops and what they read.
        num_steps: of which something was kept.
        num_bytes: on the disk.
        num_missing: calls of ops that were not kept.
        first_missing: the first step of which a call is not there; -1 where nothing is missing.
        reason: what was in the way the first time.
    """

    num_tensors: int = 0
    num_steps: int = 0
    num_bytes: int = 0
    num_missing: int = 0
    first_missing: int = -1
    reason: str = ""

    def with_missing(self, step: int, num_calls: int, reason: str) -> "KeptCounts":
        """Return the counts with calls of a step that were not kept."""
        first = self if self.num_missing else replace(self, first_missing=step, reason=reason)
        return replace(first, num_missing=self.num_missing + num_calls)

    def with_rank(self, other: "KeptCounts") -> "KeptCounts":
        """Return the counts of two processes together; the steps are those of the one with more of them."""
        both = replace(
            self,
            num_tensors=self.num_tensors + other.num_tensors,
            num_steps=max(self.num_steps, other.num_steps),
            num_bytes=self.num_bytes + other.num_bytes,
        )
        return both.with_missing(other.first_missing, other.num_missing, other.reason) if other.num_missing else both

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; ``KeptCounts(**content)`` reads it."""
        return asdict(self)
