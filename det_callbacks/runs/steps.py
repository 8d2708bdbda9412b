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
    checked: frozenset[int] | None = None  # see ``StepView``

    @property
    def layout(self) -> Layout:
        """The layout of each site, built on demand until the next step begins."""
        return self._make_layout()

    def view(self, *, rank: int = 0, step: int = 0, epoch: int = 0, chain: int = 0, segment: int = 0) -> StepView:
        record = StepRecord(step, epoch, self.program.id, self.layout_id, self.digests, chain, segment)
        return StepView(
            rank, record, self.program, self.layout, self.unseen_writes, lambda: self.values, checked=self.checked
        )


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
    program_id: int | None = None
    unseen_writes: set[int] = field(default_factory=set)
    checks_left: int = MAX_INPUT_CHECKS
    looked_at: set[int] = field(default_factory=set)  # the sites whose inputs were digested again
    is_incomplete: bool = False  # whether an op that differs without reading a difference was not checked
    _all: frozenset[int] | None = None  # all digests, when first needed

    @classmethod
    def of(cls, digests: np.ndarray, program_id: int | None = None) -> "Expectation":
        return cls(array("Q", np.ascontiguousarray(digests, dtype=np.uint64).tobytes()), program_id)

    def differs(self, position: int, digest: int) -> bool:
        """Return whether the reference has a different digest at this position."""
        return position >= len(self.digests) or self.digests[position] != digest

    def is_new(self, digest: int) -> bool:
        """Return whether the reference has this digest nowhere: its site differs, whatever it is compared with."""
        if self._all is None:
            self._all = frozenset(self.digests)
        return digest not in self._all

    def spend_check(self, digests: Sequence[int]) -> bool:
        """Use up a check for the differing outputs of a call; return whether there was one.

        An op whose digests the reference has elsewhere has probably only moved: half of the checks are for the others.
        """
        kept = 0 if any(map(self.is_new, digests)) else MAX_INPUT_CHECKS // 2
        if self.checks_left <= kept:
            self.is_incomplete = True
            return False
        self.checks_left -= 1
        return True

    def checked(self, program_id: int) -> frozenset[int] | None:
        """Return the sites whose ops were checked for unseen writes, or None if all origins of the step were.

        In another program, the comparison may find differences at other sites than ``differs``.
        """
        is_exact = program_id == self.program_id and not self.is_incomplete
        return None if is_exact else frozenset(self.looked_at)
