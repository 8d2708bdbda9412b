"""How the sites of one step differ, and which differences start there:
their ops read no difference.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from det_callbacks.compare.align import Alignment, align
from det_callbacks.compare.aligned_steps import AlignedSteps, Shapes, with_blank
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
_READ_UNSEEN = ("int", "float", "bool", "int32", "int64")
"""Data types whose values Python or C++ may read without an op: Python's own numbers, and lengths
and sizes in tensors (``Tensor.tolist``, NumPy, the ``batch_sizes`` of a native LSTM). A site does
not record whether it is on the host.
"""

MAX_DESCRIBED = 100
"""How many divergences and origins of a step are described; all are counted."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _DifferingRows:
    """The rows of two aligned steps that differ, and how.

    ``kinds`` has a row exactly if ``differs`` (bool by row) is True for it, or if it has the
    arguments of a call that differ.
    """

    kinds: Mapping[int, Kind]  # ascending
    # its bits or layout differ, or only one step has it; False for a row of arguments, because a
    # call with the same outputs passes nothing on
    differs: np.ndarray
    has_other_layout: np.ndarray
    arguments: Mapping[int, ArgumentDifference]  # of calls with different arguments


def _differing_rows(steps: AlignedSteps) -> _DifferingRows:
    has_other_bits, has_other_layout = _with_other_bits(steps), _with_other_layout(steps)
    differs = has_other_bits | has_other_layout | ~steps.is_in_both
    is_argument = differs & steps.is_in_both & (steps.roles == "argument")
    differs &= ~is_argument
    arguments: Mapping[int, ArgumentDifference] = {}
    if is_argument.any() or not steps.alignment.is_same_program:
        arguments = other_arguments(steps.reference, steps.current, steps.pairs, differs)
    kinds: dict[int, Kind] = dict.fromkeys(_rows(differs), "content")
    kinds.update(dict.fromkeys(_rows(differs & has_other_layout), "structure"))
    kinds.update((row, "argument") for row, values in arguments.items() if values)
    kinds.update(dict.fromkeys(_rows(steps.alignment.reference < 0), "extra"))
    kinds.update(dict.fromkeys(_rows(steps.alignment.current < 0), "missing"))
    # the layout of a named input is that of its first reader: a different reader does not count
    views = [
        row
        for row in _rows(differs & has_other_layout & ~has_other_bits)
        if (site := steps.site(row)).role == "input" and site.name
    ]
    if len(views) < len(kinds):
        differs[views] = has_other_layout[views] = False
        kinds = {row: kind for row, kind in kinds.items() if row not in views}
    return _DifferingRows(
        kinds=dict(sorted(kinds.items())),
        differs=differs,
        has_other_layout=has_other_layout,
        arguments=arguments,
    )


def _with_other_bits(steps: AlignedSteps) -> np.ndarray:
    """Return, bool by row, which rows have different bits in the two steps."""
    both, alignment = steps.is_in_both, steps.alignment
    reference_digests = steps.reference.record.digests[alignment.reference[both]]
    has_other_bits = np.zeros(len(both), dtype=bool)
    has_other_bits[both] = (
        reference_digests != steps.current.record.digests[alignment.current[both]]
    )
    return has_other_bits


def _with_other_layout(steps: AlignedSteps) -> np.ndarray:
    """Return, bool by row, which rows have a different layout in the two steps."""
    reference, current = steps.reference, steps.current
    has_other_layout = np.zeros(len(steps.pairs), dtype=bool)
    is_same_program = steps.alignment.is_same_program
    if not is_same_program or reference.record.layout_id != current.record.layout_id:
        reference_entries, current_entries = reference.layout.entries, current.layout.entries
        has_other_layout[steps.is_in_both] = [
            reference_entries[pair[0]] != current_entries[pair[1]]
            for pair in steps.pairs
            if min(pair) >= 0
        ]
    return has_other_layout


def _rows(mask: np.ndarray) -> list[int]:
    rows: list[int] = np.flatnonzero(mask).tolist()
    return rows


class StepDifference(AlignedSteps):
    """How the aligned sites of one step differ, and where each difference starts.

    ``kinds`` has the kind of each differing row; ``differs`` and ``arguments`` are those of
    ``_DifferingRows``.
    """

    def __init__(self, reference: StepView, current: StepView, alignment: Alignment) -> None:
        super().__init__(reference, current, alignment)
        rows = _differing_rows(self)
        self.kinds, self.differs, self.arguments = rows.kinds, rows.differs, rows.arguments
        self._has_other_layout = rows.has_other_layout
        self.num_compared, self.num_differing = int(self.is_in_both.sum()), len(self.kinds)

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
        view, position = self.view_of(row)
        site = view.program.sites[position]
        has_layout = site.role not in ("value", "argument", "graph")
        layout = view.layout.entries[position] if has_layout else None
        reference_sites = self.reference.program.sites
        reference_site = reference_sites[reference_position] if reference_position >= 0 else site
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
            source=site.source or reference_site.source or lines_of_reader(view.program, position),
            shape=None if layout is None else layout.shape,
            dtype=None if layout is None else layout.dtype,
            reference_digest=_digest_at(self.reference, reference_position),
            current_digest=_digest_at(self.current, current_position),
            is_origin=_IS_ORIGIN.get(self.start(row)),
            segment=self.segment,
        )

    def row_difference(self, row: int) -> RowDifference:
        """Return the divergence of a row with what explains it."""
        reference_position, current_position = self.pairs[row]
        layouts = None
        if self._has_other_layout[row]:
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
            choices=self.choices(row),
            shapes_read=(
                self.shapes_read(self.reference, row),
                self.shapes_read(self.current, row),
            ),
        )

    # where a difference starts

    @cached_property
    def reads_difference(self) -> np.ndarray:
        """Bool by row: it read a site that differs, or memory that changed by a named tensor."""
        reads = [
            _DifferentReads(self.reference, self.alignment.reference),
            _DifferentReads(self.current, self.alignment.current),
        ]
        for of_step in reads:
            positions = of_step.positions
            of_step.mark(positions[self.differs & (positions >= 0)], since=-1)
        self._mark_unseen_writes(reads)
        return _readers(reads)

    def _mark_unseen_writes(self, reads: Sequence["_DifferentReads"]) -> None:
        """Mark what a named tensor reads, if it differs although it reads no difference:
        something changed the memory before it.
        """
        for row in _rows(self.differs & ~_readers(reads) & (self.roles == "named")):
            places = [
                (of_step, position)
                for of_step in reads
                if (position := int(of_step.positions[row])) >= 0
            ]
            is_explained = any(of_step.has_marked_inputs(at) for of_step, at in places)
            if self.kinds[row] == "content" and not is_explained:
                for of_step, position in places:
                    of_step.mark(of_step.inputs(position), since=position)

    @cached_property
    def rows(self) -> np.ndarray:
        """The rows that differ, ascending."""
        return np.array([*self.kinds], dtype=np.int64)

    @cached_property
    def starts(self) -> Mapping[int, Start]:
        """The differing rows that read no difference, ascending; all others depend on them."""
        is_start = ~self.reads_difference[self.rows]
        return {row: self._start(row) for row in self.rows[is_start].tolist()}

    def start(self, row: int) -> Start:
        return self.starts.get(row, "read")

    def starting(self, start: Start) -> list[int]:
        """Return the rows whose difference starts in this way, ascending."""
        return [row for row, row_start in self.starts.items() if row_start == start]

    def _start(self, row: int) -> Start:
        """Return where the difference of a row starts that read none: what prevents a proof,
        or else "here".
        """
        site = self.site(row)
        if self._is_outside(row):
            return "outside"
        if site.op and not site.is_region and any(r.role == "graph" for r in self.sites_read(row)):
            return "inside a region"
        if self._is_written_since(row):
            return "written since"
        if self.arguments.get(row) == {}:
            return "other arguments"
        if self._may_be_passed_on(row):
            if self.unread:
                return "unread batch"
            return "drawn" if self._first_readable in self._moved_in_step else "passed on"
        if site.role == "delivered":
            return "race" if self.has_detail(row, IN_FLIGHT) else "collective"
        if site.role == "graph_output":
            return "graph replay"
        if not site.op:
            return "not recorded"
        if site.is_region and any(
            MISSES_PARAMETERS in read.arguments for read in self.sites_read(row)
        ):
            return "region parameters"
        if self._has_unseen_writer(row):
            return "unseen writer"
        return "here" if self._is_checked(row) else "unchecked"

    def _is_outside(self, row: int) -> bool:
        """Return whether the step started with what a row has."""
        site = self.site(row)
        is_initial_state = site.phase == "state" and bool(self.is_leading[row])
        is_source = site.role in _SOURCE_ROLES or site.phase in _SOURCE_PHASES
        return not site.op and (is_source or is_initial_state)

    def _is_written_since(self, row: int) -> bool:
        """Return whether a named tensor differs, although recorded ops wrote it."""
        site = self.site(row)
        is_named = site.role == "named" and not site.op and self.kinds[row] == "content"
        return is_named and any(read.op for read in self.sites_read(row))

    def _has_unseen_writer(self, row: int) -> bool:
        site, kind = self.site(row), self.kinds[row]
        # the writer of an input of a collective or region matches, so an unseen write changed it
        is_input = site.role == "region_input" or (
            site.role == "sent" and kind in ("content", "structure")
        )
        is_unseen = self.pairs[row][1] in self.current.unseen_writes
        # tensors in flight or unwritten have no recorded writer
        return is_input or is_unseen or self.reads_detail(row, IN_FLIGHT, UNWRITTEN)

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
        if first == len(self.alignment) or self.call_key(row) == self.call_key(first):
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
        is_readable = self.by_row(
            *(_readable_sites(view.program) for view in (self.reference, self.current))
        )
        is_number = np.isin(with_blank(self.current.layout.dtypes), _READ_UNSEEN)[
            self.alignment.current
        ]
        is_seen = self.is_in_both & (self._has_other_layout | is_number)
        readable = _rows(self.differs & (is_readable | is_seen))
        return min([*readable[:1], *self._moved_in_step], default=len(self.alignment))

    @cached_property
    def _moved_in_step(self) -> list[int]:
        """The rows, at the start of the step, of the generators of Python and NumPy that differ at
        its end.
        """
        return [
            self.begin_row(row)
            for row in self.rows_after_step
            if self.site(row).of in HOST_GENERATORS
        ]

    @cached_property
    def rows_after_step(self) -> list[int]:
        """The differing rows of generators at the end of the step."""
        rows = _rows(self.differs & (self.roles == "generator"))
        return [row for row in rows if self.site(row).part == AT_END]

    @cached_property
    def rows_after_update(self) -> list[int]:
        """The differing rows after the last op of an optimizer; none unless they include an op."""
        programs = self.reference.program, self.current.program
        last_updates = {program.id: _last_update(program) for program in programs}
        rows = []
        for row in self.kinds:
            program, position = self.side(row)
            if position > last_updates[program.id] and row not in self.rows_after_step:
                rows.append(row)
        return rows if any(self.site(row).op for row in rows) else []

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

    def _is_rewired(self, row: int) -> bool:
        """Return whether an op with different bits or shapes reads different
        sites than in the reference.
        """
        is_same_call = self.kinds[row] in ("content", "structure")
        is_other_program = not self.alignment.is_same_program
        is_op = bool(self.site(row).op)
        return is_other_program and is_op and is_same_call and self.reads_other_sites(row)


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


def _last_update(program: Program) -> int:
    """Return the position of the last op of an optimizer, or the length if there is none."""
    updates = [at for at, site in enumerate(program.sites) if site.op and site.phase == "optimizer"]
    return updates[-1] if updates else len(program)


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


class _DifferentReads:
    """The sites of one of two steps that read different bits.

    A site at position r reads different bits from site p exactly if ``since[p] < r``. So
    ``since[p]`` is -1 if p itself differs, a position if memory changed there, and the length of
    the step otherwise.
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

    def has_marked_inputs(self, position: int) -> bool:
        return bool((self._since[self.inputs(position)] < position).any())

    def readers(self) -> np.ndarray:
        """Return, bool by row, which rows read different bits."""
        readers, read = self._edges
        # the last is of rows without a position
        is_reader = np.zeros(len(self._sites) + 1, dtype=bool)
        is_reader[readers[self._since[read] < readers]] = True
        by_row: np.ndarray = is_reader[self.positions]
        return by_row


def _readers(reads: Sequence[_DifferentReads]) -> np.ndarray:
    """Return, bool by row, which rows read different bits in either step."""
    return np.asarray(np.logical_or.reduce([of_step.readers() for of_step in reads]))
