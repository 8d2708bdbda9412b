"""How much was put back, and how much of it differed."""

from collections import Counter
from typing import Any


class ReplayCounts:
    """Counts the tensors put back, by op or by the name of an observation.

    Example:
        >>> counts = ReplayCounts()
        >>> counts.add("aten.index_add_.default", differs=True, num_bytes=2**20)
        >>> counts.end_step()
        >>> counts.to_dict()
        {'aten.index_add_.default': {'count': 1, 'differing': 1, 'mib_per_step': 1.0}}
    """

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._differing: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._num_steps = 0

    def add(self, op: str, *, differs: bool, num_bytes: int) -> None:
        """Count one tensor.

        Args:
            op: ``namespace.op.overload``, or the name of an observation.
            differs: whether the live bits were others than the saved ones.
            num_bytes: that were put back, or would have been.
        """
        self._count[op] += 1
        self._differing[op] += differs
        self._num_bytes[op] += num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them together."""
        return self._num_bytes.total()

    def end_step(self) -> None:
        """Count a step, whether or not anything was put back in it."""
        self._num_steps += 1

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return what the coverage shows as ``replayed``: tensors in all, those that differed, MiB a step."""
        return {
            op: {
                "count": count,
                "differing": self._differing[op],
                "mib_per_step": round(self._num_bytes[op] / 2**20 / max(1, self._num_steps), 6),
            }
            for op, count in sorted(self._count.items())
        }
