"""Who is an origin: a difference with nothing it read differing starts here, every other one came in from elsewhere."""

from collections.abc import Iterator

import numpy as np

from det_callbacks.compare.align import Alignment
from det_callbacks.compare.changes import Changes
from det_callbacks.runs.program import (
    IN_FLIGHT,
    MISSES_PARAMETERS,
    REGION,
    UNREAD,
    UNWRITTEN,
    Program,
    Site,
    StepView,
)

SOURCE_ROLES = ("input", "generator", "samples")
SOURCE_PHASES = ("data", "rng", "input")
_BEFORE_OPS = ("state", "data", "rng", "input")
_READ_UNSEEN = frozenset({"int", "float", "bool", "int32", "int64"})
"""Data types whose values Python or C++ may read without an op: Python's own numbers, and lengths and sizes in tensors
(``Tensor.tolist``, NumPy, the ``batch_sizes`` of a native LSTM). A site does not say whether it is of the host."""
_HOST_GENERATORS = ("python", "numpy")


class OriginFinder:
    """Judges the differing sites of one step.

    Args:
        reference: the step in the reference.
        current: the same step in the current run.
        alignment: which of their sites belong together.
        changes: what differs. A call with other arguments and the same bits passes nothing on: whoever reads its output
            reads the same.
    """

    def __init__(self, reference: StepView, current: StepView, alignment: Alignment, changes: Changes) -> None:
        self._views = (reference, current)
        self._differs = (
            _by_position(len(reference.program), alignment.reference, changes.differs),
            _by_position(len(current.program), alignment.current, changes.differs),
        )
        self._alignment = alignment
        self._changes = changes
        self._partners: dict[int, int] | None = None
        self._num_leading = (num_leading_sites(reference.program), num_leading_sites(current.program))
        self.unread = next((name for view in (reference, current) for name in _unread(view)), "")
        """Type of something in the batch that could not be looked into, so that Python may read it unseen."""
        self._changed: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """On either side: a writer -> the first named tensor that shows its memory to be changed unseen since."""
        for row in changes.kinds:
            if self.is_written_unseen(row):
                for view, changed, position in zip(self._views, self._changed, self._places(row), strict=True):
                    changed.update((place, position) for place in view.program.sites[position].inputs)
        called_otherwise = (row for row, kind in changes.kinds.items() if kind != "content" and self._is_called(row))
        self._first_called_otherwise = next(called_otherwise, len(alignment))
        self._first_readable = next(filter(self._is_readable, np.flatnonzero(changes.differs).tolist()), len(alignment))

    def is_origin(self, row: int) -> bool | None:
        """Return whether the difference at a row of the alignment starts there.

        Returns:
            True when nothing the op read differs, on either side; False when something does, or when the site is a
            source (a batch, an initial weight, a generator, a tensor from outside the trace); None where neither can
            be proven: what wrote it was not recorded, or was seen to have been changed unseen, or a collective
            delivered it, into which other ranks may have put something else; or a CUDA graph may have written it; or
            it goes into a compiled region, or was seen inside one; or Python may have passed it on
            (see ``may_be_passed_on``).
        """
        site = self.site(row)
        if self.is_source(row) or self.has_differing_input(row):
            return False
        # Bits of a named tensor are those that its writers left: if they agree, something unseen wrote it, and without
        # recorded writers nothing is known.
        known = self._changes.arguments.get(row)
        is_comparable = known is None or known.is_known
        if not site.op or not is_comparable or self._places(row)[1] in self._views[1].unseen_writes:
            return None
        if site.role == "delivered" or self._reads_unknown(row):
            return None
        if site.role == "entering" or self.is_inside_region(row):
            return None
        if site.op.startswith(REGION) and self._misses_parameters(row):
            return None
        if site.role == "sent" and self._changes.kinds[row] in ("content", "structure"):
            return None  # nothing computed it: what wrote it agrees, so something unseen did
        return None if self.may_be_passed_on(row) else True

    def site(self, row: int) -> Site:
        """Return the site at a row: the current step's, else the reference's."""
        left, right = self._places(row)
        return self._views[1].program.sites[right] if right >= 0 else self._views[0].program.sites[left]

    def is_leading(self, row: int) -> bool:
        """Return whether a row lies before everything that the step computed."""
        left, right = self._places(row)
        return right < self._num_leading[1] if right >= 0 else left < self._num_leading[0]

    def is_source(self, row: int) -> bool:
        """Return whether a row is where something enters the step: it was not computed in it."""
        site = self.site(row)
        if site.op:
            return False
        is_state = site.phase == "state" and self.is_leading(row)
        return site.role in SOURCE_ROLES or site.phase in SOURCE_PHASES or is_state

    def may_be_passed_on(self, row: int) -> bool:
        """Return whether a difference may follow from one that Python could read before, past every edge.

        A shape, a number and whether an op runs at all may come from any shape, number, tensor of the batch or host
        tensor of lengths that was there before, and in a backward pass from how the ops of the forward pass were
        called; other bits from the same inputs may not.
        """
        if not (self.is_after_readable(row) or self._is_backward_of_other_calls(row)):
            return False
        return self._changes.kinds[row] != "content" or self.is_rewired(row)

    def is_after_readable(self, row: int) -> bool:
        """Return whether something that Python could read differs before the call that a row belongs to."""
        if self.unread and not self.is_leading(row):
            return True
        first = self._first_readable
        if first == len(self._alignment) or self._call(row) == self._call(first):
            return False
        # rows that only the reference has stand before those that only the current step has
        return row > first or (self.is_leading(first) and not self.is_leading(row))

    def _is_backward_of_other_calls(self, row: int) -> bool:
        """Return whether a row is of a backward pass, and an op before it was called otherwise, or by one side only."""
        return row > self._first_called_otherwise and self.site(row).phase == "backward"

    def is_rewired(self, row: int) -> bool:
        """Return whether an op with other bits reads other sites than its partner in the reference does."""
        left, right = self._places(row)
        if self._alignment.is_same_program or self._changes.kinds[row] != "content" or not self.site(row).op:
            return False
        if self._partners is None:
            pairs = zip(self._alignment.current.tolist(), self._alignment.reference.tolist(), strict=True)
            self._partners = {current: reference for current, reference in pairs if current >= 0}
        inputs = [self._partners.get(place, -1) for place in self._views[1].program.sites[right].inputs]
        return sorted(inputs) != sorted(self._views[0].program.sites[left].inputs)

    def _is_called(self, row: int) -> bool:
        """Return whether a row is of an op that runs before a backward pass does."""
        site = self.site(row)
        return bool(site.op) and site.phase in ("forward", "other")

    def _is_readable(self, row: int) -> bool:
        """Return whether Python may know of the difference at a row: another structure, or a number that it reads."""
        left, right = self._places(row)
        site = self.site(row)
        if site.role == "value" or (site.role == "generator" and site.name in _HOST_GENERATORS):
            return True
        if site.phase == "data" or left < 0 or right < 0:
            return site.phase == "data"
        ours, theirs = self._views[0].layout.entries[left], self._views[1].layout.entries[right]
        return ours != theirs or (theirs is not None and theirs.dtype in _READ_UNSEEN)

    def _places(self, row: int) -> tuple[int, int]:
        return int(self._alignment.reference[row]), int(self._alignment.current[row])

    def _call(self, row: int) -> tuple[bool, int]:
        """Return what the outputs of one call have in common: the side, and the position of the first of them."""
        left, right = self._places(row)
        return right >= 0, (right if right >= 0 else left) - self.site(row).output

    def is_inside_region(self, row: int) -> bool:
        """Return whether a site is of an op seen inside a compiled region: only the region can be told an origin."""
        op = self.site(row).op
        return bool(op) and not op.startswith(REGION) and any(site.role == "graph" for site in self._sites_read(row))

    def is_written_unseen(self, row: int) -> bool:
        """Return whether a named tensor has other bits although what the step recorded as its writers agrees."""
        site = self.site(row)
        is_read = site.role == "named" and bool(site.inputs) and self._changes.kinds[row] == "content"
        return is_read and not self.has_differing_input(row)

    def first_reader(self, row: int) -> str:
        """Return the phase of the first op that reads what a row wrote; "" where none does."""
        left, right = self._places(row)
        place, sites = (right, self._views[1].program.sites) if right >= 0 else (left, self._views[0].program.sites)
        return next((site.phase for site in sites[place + 1 :] if place in site.inputs and site.op), "")

    def draws(self, row: int) -> bool:
        """Return whether the op at a row reads the state of a generator."""
        return bool(self.site(row).op) and any(site.role == "generator" for site in self._sites_read(row))

    def has_differing_input(self, row: int) -> bool:
        """Return whether something that was read at a row differs, on either side.

        That is another writer, or one whose memory a named tensor has shown to be changed since.
        """
        for side, position in enumerate(self._places(row)):
            differs, changed = self._differs[side], self._changed[side]
            if position >= 0 and any(
                differs[place] or changed.get(place, position) < position
                for place in self._views[side].program.sites[position].inputs
            ):
                return True
        return False

    def _misses_parameters(self, row: int) -> bool:
        """Return whether a compiled region reads parameters that are no sites: below level op."""
        return any(site.role == "graph" and MISSES_PARAMETERS in site.arguments for site in self._sites_read(row))

    def _reads_unknown(self, row: int) -> bool:
        """Return whether something read at a row has no bits: a collective brings it, or nobody saw its writer."""
        for position, view in zip(self._places(row), self._views, strict=True):
            places = view.program.sites[position].inputs if position >= 0 else ()
            entries = (view.layout.entries[place] for place in places)
            if any(entry is not None and entry.detail in (IN_FLIGHT, UNWRITTEN) for entry in entries):
                return True
        return False

    def _sites_read(self, row: int) -> Iterator[Site]:
        """Yield what a row reads in the current step, else in the reference."""
        sites = self._views[self._places(row)[1] >= 0].program.sites
        return (sites[place] for place in self.site(row).inputs)


def _unread(view: StepView) -> list[str]:
    return [entry.dtype for entry in view.layout.entries if entry is not None and entry.detail == UNREAD]


def num_leading_sites(program: Program) -> int:
    """Return how many sites lie before everything that the step computed."""
    for position, site in enumerate(program.sites):
        if site.op or site.phase not in _BEFORE_OPS:
            return position
    return len(program)


def _by_position(num_sites: int, positions: np.ndarray, differs: np.ndarray) -> list[bool]:
    flags = np.zeros(num_sites, dtype=bool)
    flags[positions[(positions >= 0) & differs]] = True
    flagged: list[bool] = flags.tolist()
    return flagged
