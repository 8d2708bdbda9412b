"""How the sites of one step differ, and which differences start there:
their ops read no difference.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from det_callbacks.compare.align import Alignment, align
from det_callbacks.compare.order import ArgumentDifference, other_arguments
from det_callbacks.digest.host import format_digest
from det_callbacks.runs.program import (
    AT_END,
    HOST_GENERATORS,
    IN_FLIGHT,
    MISSES_PARAMETERS,
    UNWRITTEN,
    Program,
    Site,
    StepView,
    TensorLayout,
    lines_of_reader,
)
from det_callbacks.verdict import Divergence, Kind

Start = Literal[
    "here",  # the op read no difference, on either side
    "read",  # the op read a difference
    "outside",  # the step started with it: a batch, a weight, a generator, an unrecorded tensor
    # why it cannot be proven
    "inside a region",  # only a compiled region as a whole can be an origin
    "written since",  # the recorded writers of a named tensor match, so an unseen write changed it
    "other arguments",  # each side kept a digest of different arguments
    "unread batch",  # Python may have read an object in the batch that could not be inspected
    "passed on",  # Python may have read a number or a shape that differs: ``_may_be_passed_on``
    "drawn",  # or what Python's or NumPy's generator gave, which moved differently in the step
    "race",  # the tensor was read before its collective was done
    "collective",  # a collective delivered it, perhaps from another rank
    "graph replay",  # a replay of a CUDA graph may have written it
    "not recorded",  # the op that wrote it was not recorded
    "region parameters",  # the parameters of a compiled region have no digest, below level op
    "unseen writer",  # the recorder did not see the writer of an input
    "unchecked",  # the inputs were not checked for unseen writes
]
"""Where the difference at a row starts."""

_IS_ORIGIN: Mapping[Start, bool] = {"here": True, "read": False, "outside": False}
_SOURCE_ROLES = ("input", "generator", "samples")
_SOURCE_PHASES = ("data", "rng", "input")
_BEFORE_OPS = ("state", "data", "rng", "input")
_READ_UNSEEN = ("int", "float", "bool", "int32", "int64")
"""Data types whose values Python or C++ may read without an op: Python's own numbers, and lengths
and sizes in tensors (``Tensor.tolist``, NumPy, the ``batch_sizes`` of a native LSTM). A site does
not record whether it is on the host.
"""

MAX_DESCRIBED = 100
"""How many divergences and origins of a step are described; all are counted."""


Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDifference:
    """A divergence with further facts for its explanation."""

    divergence: Divergence
    row: int
    site: Site
    start: Start
    is_rewired: bool = False  # the op reads different tensors than in the reference
    # of both steps, where they differ
    layouts: tuple[TensorLayout | None, TensorLayout | None] | None = None
    arguments: ArgumentDifference | None = None
    choices: tuple[str, str] | None = None  # of a kernel in both steps, where they differ
    shapes_read: tuple[Shapes, Shapes] = ((), ())  # of the tensors that it read, in both steps


class StepDifference:
    """How the aligned sites of one step differ, and where each difference starts,
    by row of the alignment.

    ``pairs`` has the two positions of each row (-1: none), ``kinds`` the kind of each differing
    row. ``differs`` (bool by row) is whether its bits or layout differ, or only one side has it. It
    is False for rows of arguments, because a call with the same outputs passes nothing on;
    ``arguments`` has the rows of calls with different arguments.
    """

    def __init__(self, reference: StepView, current: StepView, alignment: Alignment) -> None:
        self.reference, self.current, self.alignment = reference, current, alignment
        self.rank, self.segment, self.step = (
            current.rank,
            current.record.segment,
            current.record.step,
        )
        reference_positions, current_positions = alignment.reference, alignment.current
        self.pairs = list(
            zip(reference_positions.tolist(), current_positions.tolist(), strict=True)
        )
        both = (reference_positions >= 0) & (current_positions >= 0)
        self._both = both
        other_bits = np.zeros(len(alignment), dtype=bool)
        reference_digests = reference.record.digests[reference_positions[both]]
        other_bits[both] = reference_digests != current.record.digests[current_positions[both]]
        other_layout = np.zeros(len(alignment), dtype=bool)
        self._other_layout = other_layout
        if not alignment.is_same_program or reference.record.layout_id != current.record.layout_id:
            reference_entries, current_entries = reference.layout.entries, current.layout.entries
            pairs = zip(
                reference_positions[both].tolist(), current_positions[both].tolist(), strict=True
            )
            other_layout[both] = [
                reference_entries[reference_position] != current_entries[current_position]
                for reference_position, current_position in pairs
            ]
        self.num_compared = int(both.sum())
        self.differs = other_bits | other_layout | ~both
        is_argument = self.differs & both & (self.roles == "argument")
        self.differs &= ~is_argument
        self.arguments: Mapping[int, ArgumentDifference] = {}
        if is_argument.any() or not alignment.is_same_program:
            self.arguments = other_arguments(reference, current, self.pairs, self.differs)
        kinds: dict[int, Kind] = dict.fromkeys(np.flatnonzero(self.differs).tolist(), "content")
        kinds.update(
            dict.fromkeys(np.flatnonzero(self.differs & other_layout).tolist(), "structure")
        )
        kinds.update((row, "argument") for row, known in self.arguments.items() if known)
        kinds.update(dict.fromkeys(np.flatnonzero(reference_positions < 0).tolist(), "extra"))
        kinds.update(dict.fromkeys(np.flatnonzero(current_positions < 0).tolist(), "missing"))
        # the layout of a named input is that of its first reader:
        # a different reader is not a difference
        others = np.flatnonzero(self.differs & other_layout & ~other_bits).tolist()
        views = [row for row in others if self.site(row).role == "input" and self.site(row).name]
        if len(views) < len(kinds):
            self.differs[views] = False
            other_layout[views] = False
            kinds = {row: kind for row, kind in kinds.items() if row not in views}
        self.kinds: Mapping[int, Kind] = dict(sorted(kinds.items()))
        self.num_differing = len(kinds)

    @cached_property
    def divergences(self) -> tuple[Divergence, ...]:
        """The first ``MAX_DESCRIBED``, in the order of the step."""
        return tuple(map(self.describe, list(self.kinds)[:MAX_DESCRIBED]))

    @cached_property
    def origins(self) -> tuple[Divergence, ...]:
        """The first proven origins, even beyond ``divergences``."""
        return tuple(map(self.describe, self.starting("here")[:MAX_DESCRIBED]))

    def describe(self, row: int) -> Divergence:
        """Return the divergence of a row; a row that does not differ also gets the kind content."""
        reference_position, current_position = self.pairs[row]
        site, reference, current = self.site(row), self.reference, self.current
        if site.role in ("value", "argument", "graph"):
            layout = None
        else:
            layout = (current if current_position >= 0 else reference).layout.entries[
                self.side(row)[1]
            ]
        reference_site = (
            reference.program.sites[reference_position] if reference_position >= 0 else site
        )
        return Divergence(
            rank=self.rank,
            step=self.step,
            phase=site.phase,
            module=site.module,
            op=site.op,
            occurrence=site.occurrence,
            output=site.output,
            name=site.name or reference_site.name,
            kind=self.kinds.get(row, "content"),
            source=site.source or reference_site.source or lines_of_reader(*self.side(row)),
            shape=None if layout is None else layout.shape,
            dtype=None if layout is None else layout.dtype,
            reference_digest=_digest_at(reference, reference_position),
            current_digest=_digest_at(current, current_position),
            is_origin=_IS_ORIGIN.get(self.start(row)),
            segment=self.segment,
        )

    def at(self, row: int) -> RowDifference:
        reference_position, current_position = self.pairs[row]
        layouts = None
        if self._other_layout[row]:
            layouts = (
                self.reference.layout.entries[reference_position],
                self.current.layout.entries[current_position],
            )
        return RowDifference(
            divergence=self.describe(row),
            row=row,
            site=self.site(row),
            start=self.start(row),
            is_rewired=self._is_rewired(row),
            layouts=layouts,
            arguments=self.arguments.get(row),
            choices=self._choices(row),
            shapes_read=(
                self._shapes_read(self.reference, row),
                self._shapes_read(self.current, row),
            ),
        )

    def _choices(self, row: int) -> tuple[str, str] | None:
        pair = self.pairs[row]
        if min(pair) < 0:
            return None
        reference, current = (
            view.program.sites[position].choice
            for view, position in zip((self.reference, self.current), pair, strict=True)
        )
        return None if reference == current else (reference, current)

    def _shapes_read(self, view: StepView, row: int) -> Shapes:
        position = self.pairs[row][view is self.current]
        read = view.program.sites[position].inputs if position >= 0 else ()
        return tuple(entry.shape for at in read if (entry := view.layout.entries[at]) is not None)

    # where a row lies

    def site(self, row: int) -> Site:
        """Return the site of a row: the current step's if it has one."""
        program, position = self.side(row)
        return program.sites[position]

    def digest(self, row: int) -> int:
        """Return the bits of a row: the current step's if it has one."""
        reference_position, current_position = self.pairs[row]
        if current_position >= 0:
            return int(self.current.record.digests[current_position])
        return int(self.reference.record.digests[reference_position])

    def side(self, row: int) -> tuple[Program, int]:
        """Return the program and the position of a row's site."""
        view, position = self.view_of(row)
        return view.program, position

    def view_of(self, row: int) -> tuple[StepView, int]:
        """Return the step that has a row's site, and its position: the current one if it has it."""
        reference_position, current_position = self.pairs[row]
        if current_position >= 0:
            return self.current, current_position
        return self.reference, reference_position

    def _by_row(self, reference: np.ndarray, current: np.ndarray) -> np.ndarray:
        """Merge two arrays by position into one by row: the current step's value if it has one."""
        has_current = self.alignment.current >= 0
        reference_by_row = _with_blank(reference)[self.alignment.reference]
        current_by_row = _with_blank(current)[self.alignment.current]
        return np.asarray(np.where(has_current, current_by_row, reference_by_row))

    @cached_property
    def roles(self) -> np.ndarray:
        """Role by row, as text."""
        return self._by_row(self.reference.program.roles, self.current.program.roles)

    @cached_property
    def is_leading(self) -> np.ndarray:
        """Bool by row: it comes before everything that the step computed."""
        programs = self.reference.program, self.current.program
        return self._by_row(
            *(np.arange(len(program)) < num_leading_sites(program) for program in programs)
        )

    def sites_read(self, row: int) -> list[Site]:
        return [self.side(row)[0].sites[position] for position in self.site(row).inputs]

    def rows_read(self, row: int) -> list[int]:
        """Return the rows that a row read, on either side."""
        sides = zip(
            (self.alignment.reference, self.alignment.current),
            self._positions_read(row),
            strict=True,
        )
        return [
            int(at) for positions, read in sides for at in np.flatnonzero(np.isin(positions, read))
        ]

    def _positions_read(self, row: int) -> list[list[int]]:
        """Return the positions that a row read in the reference, and in the current step."""
        programs = self.reference.program, self.current.program
        pairs = zip(programs, self.pairs[row], strict=True)
        return [[*program.sites[at].inputs] if at >= 0 else [] for program, at in pairs]

    def reads_detail(self, row: int, detail: str) -> bool:
        """Return whether a row read a site with this layout detail in either step."""
        return self._has_detail(row, detail, is_read=True)

    def first_reader(self, row: int) -> str:
        """Return the phase of the first op that reads a row; "" if none does."""
        program, position = self.side(row)
        readers, read = program.edges
        later = readers[(read == position) & (readers > position)].tolist()
        sites = (program.sites[reader] for reader in later)
        return next((site.phase for site in sites if site.op), "")

    def _views_with(self, row: int) -> Iterator[tuple[StepView, int]]:
        for view, position in zip((self.reference, self.current), self.pairs[row], strict=True):
            if position >= 0:
                yield view, position

    def _has_detail(self, row: int, *details: str, is_read: bool) -> bool:
        """Return whether a row, or a site that it read, has one of these
        layout details in either step.
        """
        entries = (
            view.layout.entries[at]
            for view, position in self._views_with(row)
            for at in (view.program.sites[position].inputs if is_read else (position,))
        )
        return any(entry is not None and entry.detail in details for entry in entries)

    # where a difference starts

    @cached_property
    def reads_difference(self) -> np.ndarray:
        """Bool by row: it read a site that differs, or memory that changed by a named tensor."""
        sides = (
            _StepReaders(self.reference, self.alignment.reference),
            _StepReaders(self.current, self.alignment.current),
        )
        for side in sides:
            positions = side.positions
            side.mark(positions[self.differs & (positions >= 0)], since=-1)
        # a named tensor that differs, although it read no difference,
        # shows that what it read has changed before it
        is_first = self.differs & ~self._readers(sides) & (self.roles == "named")
        for row in np.flatnonzero(is_first).tolist():
            if self.kinds[row] == "content":
                places = [
                    (side, int(side.positions[row])) for side in sides if side.positions[row] >= 0
                ]
                if not any(side.has_changed_inputs(position) for side, position in places):
                    for side, position in places:
                        side.mark(side.inputs(position), since=position)
        return self._readers(sides)

    def _readers(self, sides: Iterable["_StepReaders"]) -> np.ndarray:
        """Return, bool by row, which rows read different bits, in either step."""
        found = np.zeros(len(self.alignment), dtype=bool)
        for side in sides:
            found |= side.readers()
        return found

    @cached_property
    def rows(self) -> np.ndarray:
        """The rows that differ, ascending."""
        return np.array([*self.kinds], dtype=np.int64)

    @cached_property
    def starts(self) -> Mapping[int, Start]:
        """The differing rows that read no difference, ascending; all others depend on them."""
        return {
            row: self._start(row) for row in self.rows[~self.reads_difference[self.rows]].tolist()
        }

    def start(self, row: int) -> Start:
        return self.starts.get(row, "read")

    def starting(self, start: Start) -> list[int]:
        """Return the rows whose difference starts in this way, ascending."""
        return [row for row, known in self.starts.items() if known == start]

    def _start(self, row: int) -> Start:
        site, kind = self.site(row), self.kinds[row]
        is_found = site.phase == "state" and bool(self.is_leading[row])
        if not site.op and (site.role in _SOURCE_ROLES or site.phase in _SOURCE_PHASES or is_found):
            return "outside"
        if (
            site.op
            and not site.is_region
            and any(read.role == "graph" for read in self.sites_read(row))
        ):
            return "inside a region"
        # the recorded writers of a named tensor left different bits
        if (
            not site.op
            and site.role == "named"
            and kind == "content"
            and any(one.op for one in self.sites_read(row))
        ):
            return "written since"
        if self.arguments.get(row) == {}:
            return "other arguments"
        if self._may_be_passed_on(row):
            if self.unread:
                return "unread batch"
            return "drawn" if self._first_readable in self._moved_in_step else "passed on"
        if site.role == "delivered":
            return "race" if self._has_detail(row, IN_FLIGHT, is_read=False) else "collective"
        if site.role == "graph_output":
            return "graph replay"
        if not site.op:
            return "not recorded"
        if site.is_region and any(
            MISSES_PARAMETERS in read.arguments for read in self.sites_read(row)
        ):
            return "region parameters"
        # the writer of an input of a collective or region matches, so an unseen write changed it
        is_given = site.role == "region_input" or (
            site.role == "sent" and kind in ("content", "structure")
        )
        is_unseen = self.pairs[row][1] in self.current.unseen_writes
        # tensors in flight or unwritten have no recorded writer
        is_unknown = self._has_detail(row, IN_FLIGHT, UNWRITTEN, is_read=True)
        if is_given or is_unseen or is_unknown:
            return "unseen writer"
        return "here" if self._is_checked(row) else "unchecked"

    def _is_checked(self, row: int) -> bool:
        """Return whether a row was checked for unseen writes,
        or no unseen write to its inputs can be the reason.

        Such a write changes neither the arguments of a call nor whether it runs, and a region has
        sites for its inputs.
        """
        checked = self.current.checked
        if checked is None or self.kinds[row] not in ("content", "structure"):
            return True
        return self.pairs[row][1] in checked or self.site(row).is_region

    @property
    def unread(self) -> str:
        """Type of an object in the batch that could not be inspected, or ""."""
        return self.reference.layout.unread or self.current.layout.unread

    def _may_be_passed_on(self, row: int) -> bool:
        """Return whether a difference may follow, past every edge,
        from an earlier one that Python could read.

        Python can pass on shapes, numbers and whether an op runs, and in a backward pass how the
        forward ops were called, but not different bits from the same inputs.
        """
        if self.kinds[row] == "content" and not self._is_rewired(row):
            return False
        if row > self._first_called_differently and self.site(row).phase == "backward":
            return True
        if self.unread and not self.is_leading[row]:
            return True
        first = self._first_readable
        if first == len(self.alignment) or self._call(row) == self._call(first):
            return False
        # rows only in the reference come before rows only in the current step
        return row > first or bool(self.is_leading[first] and not self.is_leading[row])

    @cached_property
    def _first_called_differently(self) -> int:
        """The first forward op that was called differently, or in one step only."""
        rows = (row for row, kind in self.kinds.items() if kind != "content" and self.site(row).op)
        of_forward = (row for row in rows if self.site(row).phase in ("forward", "other"))
        return next(of_forward, len(self.alignment))

    @cached_property
    def _first_readable(self) -> int:
        """The first differing row that Python may have read: a different
        shape or dtype, or a number.
        """
        is_readable = self._by_row(
            *(_readable_sites(view.program) for view in (self.reference, self.current))
        )
        is_number = np.isin(_with_blank(self.current.layout.dtypes), _READ_UNSEEN)[
            self.alignment.current
        ]
        is_seen = self._both & (self._other_layout | is_number)
        found = np.flatnonzero(self.differs & (is_readable | is_seen))
        return min([*found[:1].tolist(), *self._moved_in_step], default=len(self.alignment))

    @cached_property
    def _moved_in_step(self) -> list[int]:
        """The rows, at the start of the step, of the generators of Python and NumPy that differ at
        its end.
        """
        return [self._begin_row(row) for row in self.rows_after_step if self._is_of_host(row)]

    @cached_property
    def rows_after_step(self) -> list[int]:
        """The differing rows of generators at the end of the step."""
        rows = np.flatnonzero(self.differs & (self.roles == "generator")).tolist()
        return [row for row in rows if self.site(row).part == AT_END]

    @cached_property
    def rows_after_update(self) -> list[int]:
        """The differing rows after the last op of an optimizer; none unless they include an op."""
        found = [row for row in self.kinds if self._is_after_update(row)]
        return found if any(self.site(row).op for row in found) else []

    def _is_after_update(self, row: int) -> bool:
        program, position = self.side(row)
        updates = [
            at for at, site in enumerate(program.sites) if site.op and site.phase == "optimizer"
        ]
        is_generator_after = row in self.rows_after_step
        return bool(updates) and position > updates[-1] and not is_generator_after

    @property
    def ends_early(self) -> Literal["reference", "current"] | None:
        """The run that may have ended in this step: all that differs is that only the other one
        goes on after the last update, as a loop without a loader draws its next batch there.
        """
        rows = self.rows_after_update
        kinds = {self.kinds[row] for row in rows}
        if len(kinds) != 1 or {*self.kinds} - {*rows, *self.rows_after_step}:
            return None
        ends: dict[str, Literal["reference", "current"]] = {
            "missing": "current",
            "extra": "reference",
        }
        return ends.get(kinds.pop())

    def _is_of_host(self, row: int) -> bool:
        return self.site(row).of in HOST_GENERATORS

    def _begin_row(self, row: int) -> int:
        """Return the row of a generator at the start of the step, given its row at the end."""
        view, position = self.view_of(row)
        positions = getattr(self.alignment, "current" if view is self.current else "reference")
        read = view.program.sites[position].inputs[:1]
        return int(np.flatnonzero(positions == read[0])[0]) if read else row

    def _call(self, row: int) -> tuple[bool, int]:
        """Return the key that the outputs of one call share: the side,
        and the position of the first output.
        """
        view, position = self.view_of(row)
        return view is self.current, position - view.program.sites[position].output

    def _is_rewired(self, row: int) -> bool:
        """Return whether an op with different bits or shapes reads different
        sites than in the reference.
        """
        reference_position, current_position = self.pairs[row]
        if (
            self.alignment.is_same_program
            or not self.site(row).op
            or self.kinds[row] not in ("content", "structure")
        ):
            return False
        inputs = [
            self._partners.get(position, -1)
            for position in self.current.program.sites[current_position].inputs
        ]
        return sorted(inputs) != sorted(self.reference.program.sites[reference_position].inputs)

    @cached_property
    def _partners(self) -> dict[int, int]:
        return {current: reference for reference, current in self.pairs if current >= 0}


def compare_steps(reference: StepView, current: StepView) -> StepDifference:
    return StepDifference(reference, current, align(reference, current))


def recomputed_differently(view: StepView) -> int | None:
    """Return the first output that activation checkpointing computed again with other
    bits than before, or None.

    Its first executions are the calls of the same op in the same module, or outside modules on the
    same line, before the backward pass, with the same arguments; a module may be called several
    times, and backward runs them in reverse.
    """
    first_runs: defaultdict[Hashable, set[int]] = defaultdict(set)
    again: list[tuple[int, Hashable]] = []
    digests = view.record.digests.tolist()
    for position, (site, entry) in enumerate(
        zip(view.program.sites, view.layout.entries, strict=True)
    ):
        if site.op and site.role == "output" and site.name is None and entry is not None:
            # the detail, which parts of its inputs it reads, is only known of forward ops
            made = site.output, entry.dtype, entry.shape
            line = site.source[:1] if site.module in ("", "?") else ()
            key = site.module, site.op, site.arguments, line, made
            if site.recomputed:
                again.append((position, key))
            elif site.phase != "backward":
                first_runs[key].add(digests[position])
    return next(
        (at for at, key in again if key in first_runs and digests[at] not in first_runs[key]), None
    )


def num_leading_sites(program: Program) -> int:
    """Return how many sites come before everything that the step computed."""
    is_given = False
    for position, site in enumerate(program.sites):
        if site.op or site.phase not in _BEFORE_OPS or (is_given and site.phase == "state"):
            return position
        is_given = is_given or site.phase in ("data", "rng")
    return len(program)


def _with_blank(values: np.ndarray) -> np.ndarray:
    """Append the value of position -1."""
    return np.append(values, np.zeros(1, dtype=values.dtype))


def _readable_sites(program: Program) -> np.ndarray:
    """Return, bool by position, whether Python may read it: a number, the batch,
    Python's generators.
    """
    is_readable: np.ndarray = (program.roles == "value") | (program.phases == "data")
    for position in np.flatnonzero(program.roles == "generator").tolist():
        is_readable[position] |= (
            program.sites[position].of in HOST_GENERATORS and not program.sites[position].part
        )
    return is_readable


def _digest_at(view: StepView, position: int) -> str | None:
    return None if position < 0 else format_digest(int(view.record.digests[position]))


class _StepReaders:
    """One of two steps: ``since[p]`` is the position from which on readers of
    site p see different bits.

    It is -1 if p itself differs, and the length of the step if no reader does.
    """

    def __init__(self, view: StepView, positions: np.ndarray) -> None:
        self.positions = positions  # by row; -1 if only the other step has it
        self._sites = view.program.sites
        self._edges = view.program.edges
        self._since = np.full(len(view.program), len(view.program))

    def mark(self, sites: Sequence[int] | np.ndarray, *, since: int) -> None:
        self._since[np.asarray(sites, dtype=np.int64)] = since

    def inputs(self, position: int) -> list[int]:
        return [*self._sites[position].inputs]

    def has_changed_inputs(self, position: int) -> bool:
        inputs = self.inputs(position)
        return bool(inputs) and bool((self._since[inputs] < position).any())

    def readers(self) -> np.ndarray:
        """Return, bool by row, which rows read different bits."""
        readers, read = self._edges
        # the last is of rows without a position
        is_reader = np.zeros(len(self._sites) + 1, dtype=bool)
        is_reader[readers[self._since[read] < readers]] = True
        found: np.ndarray = is_reader[self.positions]
        return found
