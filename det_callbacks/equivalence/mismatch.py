"""What is kept of an op that gave other bits the second time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from det_callbacks.errors import EquivalenceError

MAX_KEPT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMismatch:
    """One output of an op, at one place, that differed between two runs on the same inputs; a third one followed.

    Attributes:
        phase: "forward", "backward", "optimizer" or what was set.
        module: qualified name, "" outside any module, "?" when unknown; for ops of a backward pass that of the forward
            op whose gradient it computes.
        op: ``namespace.op.overload``.
        occurrence: calls of that op at that place earlier in the block.
        output: number among what the call wrote: what it returned first, then the arguments it wrote.
        source: up to four lines of the user's, innermost first; for ops of a backward pass those of the forward call.
        shape: of the first run's output; () for a number.
        dtype: "float32"; the Python class for a number.
        num_elements: of the first run's output.
        num_differing: elements whose bits differ; all of them when the second run gave another shape or dtype.
        max_ulps: largest distance of two elements, as ``digest.ulps`` defines it; None where there is none.
        is_transient: whether everything that the third run wrote agrees with the first run, or with the second.
        count: how often it was found there, in the blocks so far; the rest is of the first time.
    """

    phase: str
    module: str
    op: str
    occurrence: int
    output: int
    source: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    num_elements: int
    num_differing: int
    max_ulps: int | None
    is_transient: bool
    count: int = 1

    def __str__(self) -> str:
        module = {"": "outside any module", "?": "in an unknown module"}.get(self.module, f"in {self.module}")
        place = f" at {self.source[0]}" if self.source else ""
        distance = "" if self.max_ulps is None else f", by up to {self.max_ulps} ULPs"
        third = "; of three runs two agree, so it may be transient" if self.is_transient else ""
        return (
            f"{self.op} {module}{place} ({self.phase}): {self.num_differing} of {self.num_elements} elements of output "
            f"{self.output} differ{distance}{third}"
        )


class Mismatches:
    """The mismatches found so far: one for each place, at most ``MAX_KEPT``, the rest counted.

    Attributes:
        num_found: how many were found in all.
    """

    def __init__(self) -> None:
        self.num_found = 0
        self._kept: dict[tuple[str, str, str, int, int], tuple[OpMismatch, int]] = {}
        self._block: list[OpMismatch] = []

    def __iter__(self) -> Iterator[OpMismatch]:
        for mismatch, count in self._kept.values():
            yield mismatch if count == 1 else replace(mismatch, count=count)

    @property
    def block(self) -> list[OpMismatch]:
        """Those of the running block, at most ``MAX_KEPT``."""
        return list(self._block)

    def begin_block(self) -> None:
        """Start a block."""
        self._block.clear()

    def add(self, mismatch: OpMismatch) -> None:
        """Keep one, or count it."""
        self.num_found += 1
        if len(self._block) < MAX_KEPT:
            self._block.append(mismatch)
        place = (mismatch.phase, mismatch.module, mismatch.op, mismatch.occurrence, mismatch.output)
        known = self._kept.get(place)
        if known is not None:
            self._kept[place] = (known[0], known[1] + 1)
        elif len(self._kept) < MAX_KEPT:
            self._kept[place] = (mismatch, 1)


def error_of(mismatch: OpMismatch) -> EquivalenceError:
    """Return the error that says so."""
    return EquivalenceError(
        f"{mismatch}. It was run twice on the same inputs with the same generator states; every op before it gave the "
        "same bits twice, as far as they were compared. Use a deterministic op there (det-callbacks ops lists what "
        "torch says of its own), or collect all of them with raise_on_mismatch=False.",
        mismatch,
    )
