"""One traced step in memory, and the expectation of a verification."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from det_callbacks.errors import TraceError
from det_callbacks.runs.program import Layout, Program, StepRecord, StepView

MAX_INPUT_CHECKS = 32  # ops a step whose inputs are digested again


@dataclass(frozen=True, slots=True, eq=False)
class StepTrace:
    """One recorded step; ``values`` has the JSON text of arguments by digest."""

    program: Program
    digests: np.ndarray
    layout_id: int
    unseen_writes: frozenset[int]
    values: Mapping[int, str]
    _make_layout: Callable[[], Layout]
    _places: Mapping[int, int] | None = None  # if several threads ran: order of arrival of a site -> position

    @property
    def layout(self) -> Layout:
        """The layout of each site, built on demand until the next step begins."""
        return self._make_layout()

    def place_of(self, number: int) -> int:
        """Return the position of the n-th recorded site."""
        return number if self._places is None else self._places[number]

    def view(self, *, rank: int = 0, step: int = 0, epoch: int = 0, chain: int = 0, segment: int = 0) -> StepView:
        """Return the step opened for a comparison."""
        record = StepRecord(step, epoch, self.program.id, self.layout_id, self.digests, chain, segment)
        return StepView(rank, record, self.program, self.layout, self.unseen_writes, lambda: self.values)


def require_whole(program: Program, digests: "array[int]") -> None:
    """Raise TraceError if a step has different numbers of sites and digests."""
    if len(program) != len(digests):
        raise TraceError(
            f"The step has {len(program)} sites and {len(digests)} digests: an exception (out of memory, Ctrl-C) "
            "interrupted the recording of an op, and the program continued the step. The training is intact, but this "
            "step was not recorded. Let the exception end the step; if memory ran out, leave the device more."
        )


@dataclass(slots=True, eq=False)
class Expectation:
    """The reference's digests of the current step; the inputs of differing sites are digested again."""

    digests: "array[int]"
    unseen_writes: set[int] = field(default_factory=set)
    checks_left: int = MAX_INPUT_CHECKS
    among: frozenset[int] | None = None  # all digests, if several threads record: sites then come in any order
    looked_at: set[int] = field(default_factory=set)  # the sites whose inputs were digested again

    @classmethod
    def of(cls, digests: np.ndarray) -> "Expectation":
        """Return the expectation of a recorded step."""
        return cls(digests=array("Q", np.ascontiguousarray(digests, dtype=np.uint64).tobytes()))

    def differs(self, position: int, digest: int) -> bool:
        """Return whether the reference has a different digest at this position, or anywhere without an order."""
        if self.among is not None:
            return digest not in self.among
        return position >= len(self.digests) or self.digests[position] != digest

    def forget_order(self) -> None:
        """Accept sites in any order from now on."""
        if self.among is None:
            self.among = frozenset(self.digests)

    def unproven(self, order: Sequence[int], digests: np.ndarray) -> set[int]:
        """Return the positions of sites that differ, if their inputs changed unseen or were not digested again.

        Args:
            order: the sites by arrival, in the order of their positions.
            digests: by position.
        """
        changed = {position for position, number in enumerate(order) if number in self.unseen_writes}
        reference = np.frombuffer(self.digests, dtype=np.uint64)
        is_other = np.ones(len(digests), dtype=bool)
        common = min(len(digests), len(reference))
        is_other[:common] = digests[:common] != reference[:common]
        differing = np.flatnonzero(is_other).tolist()
        return changed | {position for position in differing if order[position] not in self.looked_at}
