"""How the sites of one step differ, and who starts a difference: nothing that it read differs.

Every other difference came in from elsewhere. What is looked at row by row are the few rows that start one; all else is
arrays.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from det_callbacks.compare.align import Alignment
from det_callbacks.compare.arguments import ArgumentDifference, ArgumentReader, differing_arguments
from det_callbacks.runs.program import IN_FLIGHT, MISSES_PARAMETERS, REGION, UNWRITTEN, Program, Site, StepView
from det_callbacks.verdict import Kind

SOURCE_ROLES = ("input", "generator", "samples")
SOURCE_PHASES = ("data", "rng", "input")
_BEFORE_OPS = ("state", "data", "rng", "input")
_READ_UNSEEN = ("int", "float", "bool", "int32", "int64")
"""Data types whose values Python or C++ may read without an op: Python's own numbers, and lengths and sizes in tensors
(``Tensor.tolist``, NumPy, the ``batch_sizes`` of a native LSTM). A site does not say whether it is of the host."""
_HOST_GENERATORS = ("python", "numpy")


class SiteDifferences:
    """How the aligned sites of one step differ, and where each difference starts.

    Args:
        reference: the step in the reference.
        current: the same step in the current run.
        alignment: which of their sites belong together; a row below is one of its rows.

    Attributes:
        kinds: row -> kind of the difference, ascending.
        differs: bool by row: other bits, another layout, or only one side has it. Rows of arguments never do.
        arguments: row -> how the arguments of its op differ. A call with other arguments and the same bits passes
            nothing on: whoever reads its output reads the same.
        num_compared: rows that both sides have.
    """

    def __init__(self, reference: StepView, current: StepView, alignment: Alignment) -> None:
        self.reference = reference
        self.current = current
        self.alignment = alignment
        lefts, rights = alignment.reference, alignment.current
        both = (lefts >= 0) & (rights >= 0)
        other_bits = np.zeros(len(alignment), dtype=bool)
        other_bits[both] = reference.record.digests[lefts[both]] != current.record.digests[rights[both]]
        other_layout = self._other_layout = _other_layout(reference, current, alignment)
        self.num_compared = int(both.sum())
        self.differs = other_bits | other_layout | ~both
        is_argument = np.zeros(len(alignment), dtype=bool)
        is_argument[both] = current.program.roles[rights[both]] == "argument"
        argument_rows = np.flatnonzero(self.differs & is_argument).tolist()
        self.differs[argument_rows] = False
        self.arguments = self._other_arguments(argument_rows)
        kinds: dict[int, Kind] = dict.fromkeys(np.flatnonzero(self.differs).tolist(), "content")
        kinds.update(dict.fromkeys(np.flatnonzero(self.differs & other_layout).tolist(), "structure"))
        kinds.update((row, "argument") for row, known in self.arguments.items() if known.is_known)
        kinds.update(dict.fromkeys(np.flatnonzero(lefts < 0).tolist(), "extra"))
        kinds.update(dict.fromkeys(np.flatnonzero(rights < 0).tolist(), "missing"))
        self.kinds: Mapping[int, Kind] = dict(sorted(kinds.items()))

    # where a row lies

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.alignment.reference.tolist(), self.alignment.current.tolist(), strict=True))

    def places(self, row: int) -> tuple[int, int]:
        """Return the positions of a row in the reference and in the current step, -1 where there is none."""
        return self._pairs[row]

    def site(self, row: int) -> Site:
        """Return the site of a row: that of the current step, where it has one."""
        left, right = self._pairs[row]
        return self.current.program.sites[right] if right >= 0 else self.reference.program.sites[left]

    def _side(self, row: int) -> tuple[Program, int]:
        """Return the program that a row's site is in, and its position there."""
        left, right = self._pairs[row]
        return (self.current.program, right) if right >= 0 else (self.reference.program, left)

    def sites_read(self, row: int) -> Iterator[Site]:
        """Yield what a row reads in the current step, else in the reference."""
        program, position = self._side(row)
        return (program.sites[place] for place in program.sites[position].inputs)

    def first_reader(self, row: int) -> str:
        """Return the phase of the first op that reads what a row wrote; "" where none does."""
        program, position = self._side(row)
        readers, read = program.edges
        sites = (program.sites[place] for place in readers[read == position].tolist() if place > position)
        return next((site.phase for site in sites if site.op), "")

    @cached_property
    def is_leading(self) -> np.ndarray:
        """Bool by row: it lies before everything that the step computed."""
        numbers = [num_leading_sites(view.program) for view in (self.reference, self.current)]
        lefts, rights = self.alignment.reference, self.alignment.current
        return np.where(rights >= 0, rights < numbers[1], lefts < numbers[0])

    # what a row read

    @cached_property
    def fed(self) -> np.ndarray:
        """Bool by row: something that was read there differs, on either side.

        That is another writer, or one whose memory a named tensor has shown to be changed since.
        """
        sides = (self.reference.program, self.alignment.reference), (self.current.program, self.alignment.current)
        fed = np.zeros(len(self.alignment), dtype=bool)

        def spread(hits: Sequence[np.ndarray]) -> None:
            for (program, positions), hit in zip(sides, hits, strict=True):
                is_fed = np.zeros(len(program) + 1, dtype=bool)  # the last one is of position -1
                is_fed[program.edges[0][hit]] = True
                np.logical_or(fed, is_fed[positions], out=fed)

        flags = []
        for program, positions in sides:
            differs = np.zeros(len(program) + 1, dtype=bool)
            differs[positions[self.differs]] = True
            flags.append(differs[program.edges[1]])
        spread(flags)
        changed = self._changed_unseen(fed)
        if any(changed):
            flags = []
            for (program, _), known in zip(sides, changed, strict=True):
                since = np.full(len(program), len(program))
                for writer, position in known.items():
                    since[writer] = position
                readers, read = program.edges
                flags.append(since[read] < readers)
            spread(flags)
        return fed

    def _changed_unseen(self, fed: np.ndarray) -> tuple[dict[int, int], dict[int, int]]:
        """Return, on either side, writer -> the first named tensor that shows its memory to be changed unseen since."""
        changed: tuple[dict[int, int], dict[int, int]] = ({}, {})
        rows = np.flatnonzero(self.differs & ~fed & (self.alignment.current >= 0))
        is_named = self.current.program.roles[self.alignment.current[rows]] == "named"
        for row in rows[is_named].tolist():
            if self.kinds[row] != "content":
                continue
            views = zip((self.reference, self.current), changed, self._pairs[row], strict=True)
            sides = [(known, position, view.program.sites[position].inputs) for view, known, position in views]
            if not any(known.get(place, position) < position for known, position, read in sides for place in read):
                for known, position, read in sides:
                    known.update((place, position) for place in read)
        return changed

    @cached_property
    def rows(self) -> np.ndarray:
        """Int64, the rows that differ, ascending."""
        return np.fromiter(self.kinds, dtype=np.int64, count=len(self.kinds))

    @cached_property
    def beginnings(self) -> list[int]:
        """The differing rows where nothing that was read differs, ascending: all other differences follow from them."""
        found: list[int] = self.rows[~self.fed[self.rows]].tolist()
        return found

    @property
    def origins(self) -> np.ndarray:
        """Bool by entry of ``rows``: an op with nothing it read differing."""
        return np.isin(self.rows, [row for row in self.beginnings if self.is_origin(row)])

    @property
    def sources(self) -> np.ndarray:
        """Bool by entry of ``rows``: something that entered the step here (a batch, a weight, a generator)."""
        return np.isin(self.rows, [row for row in self.beginnings if self.is_source(row)])

    @property
    def unproven(self) -> np.ndarray:
        """Bool by entry of ``rows``: nothing that it read differs, and that it starts there cannot be proven."""
        return np.isin(self.rows, [row for row in self.beginnings if self.is_origin(row) is None])

    # where a difference starts

    def is_source(self, row: int) -> bool:
        """Return whether a row is where something with other bits enters the step: it was not computed in it."""
        site = self.site(row)
        if site.op or self.fed[row]:
            return False
        is_state = site.phase == "state" and bool(self.is_leading[row])
        return site.role in SOURCE_ROLES or site.phase in SOURCE_PHASES or is_state

    def is_origin(self, row: int) -> bool | None:
        """Return whether the difference at a row starts there.

        Returns:
            True when nothing the op read differs, on either side; False when something does, or when the site is a
            source (a batch, an initial weight, a generator, a tensor from outside the trace); None where neither can
            be proven: what wrote it was not recorded, or was seen to have been changed unseen, or a collective
            delivered it, into which other ranks may have put something else; or a CUDA graph may have written it; or
            it goes into a compiled region, or was seen inside one; or Python may have passed it on
            (see ``may_be_passed_on``).
        """
        if self.fed[row] or self.is_source(row):
            return False
        # Bits of a named tensor are those that its writers left: if they agree, something unseen wrote it, and without
        # recorded writers nothing is known.
        site = self.site(row)
        is_comparable = row not in self.arguments or self.arguments[row].is_known
        if not site.op or not is_comparable or self._pairs[row][1] in self.current.unseen_writes:
            return None
        if site.role in ("delivered", "entering") or self._reads_unknown(row) or self.is_inside_region(row):
            return None
        if site.op.startswith(REGION) and any(MISSES_PARAMETERS in one.arguments for one in self.sites_read(row)):
            return None  # a compiled region reads parameters that are no sites: below level op
        if site.role == "sent" and self.kinds[row] in ("content", "structure"):
            return None  # nothing computed it: what wrote it agrees, so something unseen did
        return None if self.may_be_passed_on(row) else True

    @property
    def unread(self) -> str:
        """Type of something in the batch that could not be looked into, so that Python may read it unseen; or ""."""
        return self.reference.layout.unread or self.current.layout.unread

    def may_be_passed_on(self, row: int) -> bool:
        """Return whether a difference may follow from one that Python could read before, past every edge.

        A shape, a number and whether an op runs at all may come from any shape, number, tensor of the batch or host
        tensor of lengths that was there before, and in a backward pass from how the ops of the forward pass were
        called; other bits from the same inputs may not.
        """
        is_backward_of_other_calls = row > self._first_called_otherwise and self.site(row).phase == "backward"
        if not (self.is_after_readable(row) or is_backward_of_other_calls):
            return False
        return self.kinds[row] != "content" or self.is_rewired(row)

    def is_after_readable(self, row: int) -> bool:
        """Return whether something that Python could read differs before the call that a row belongs to."""
        if self.unread and not self.is_leading[row]:
            return True
        first = self._first_readable
        if first == len(self.alignment) or self._call(row) == self._call(first):
            return False
        # rows that only the reference has stand before those that only the current step has
        return row > first or bool(self.is_leading[first] and not self.is_leading[row])

    @cached_property
    def _first_called_otherwise(self) -> int:
        """The first row of an op of the forward pass that was called otherwise, or by one side only."""
        rows = (row for row, kind in self.kinds.items() if kind != "content" and self.site(row).op)
        return next((row for row in rows if self.site(row).phase in ("forward", "other")), len(self.alignment))

    @cached_property
    def _first_readable(self) -> int:
        """The first differing row that Python may know of: another structure, or a number that it reads."""
        lefts, rights = self.alignment.reference, self.alignment.current
        sides = [np.append(_readable_sites(view.program), False) for view in (self.reference, self.current)]
        is_readable = np.where(rights >= 0, sides[1][rights], sides[0][lefts])
        both = (lefts >= 0) & (rights >= 0)
        is_number = np.append(np.isin(self.current.layout.dtypes, _READ_UNSEEN), False)
        is_readable |= both & (self._other_layout | is_number[rights])
        found = np.flatnonzero(self.differs & is_readable)
        return int(found[0]) if len(found) else len(self.alignment)

    def _call(self, row: int) -> tuple[bool, int]:
        """Return what the outputs of one call have in common: the side, and the position of the first of them."""
        left, right = self._pairs[row]
        return right >= 0, (right if right >= 0 else left) - self.site(row).output

    # what else is said of a row

    def is_rewired(self, row: int) -> bool:
        """Return whether an op with other bits reads other sites than its partner in the reference does."""
        left, right = self._pairs[row]
        if self.alignment.is_same_program or self.kinds[row] != "content" or not self.site(row).op:
            return False
        inputs = [self._partners.get(place, -1) for place in self.current.program.sites[right].inputs]
        return sorted(inputs) != sorted(self.reference.program.sites[left].inputs)

    @cached_property
    def _partners(self) -> dict[int, int]:
        return {current: reference for reference, current in self._pairs if current >= 0}

    def is_inside_region(self, row: int) -> bool:
        """Return whether a site is of an op seen inside a compiled region: only the region can be told an origin."""
        op = self.site(row).op
        return bool(op) and not op.startswith(REGION) and any(site.role == "graph" for site in self.sites_read(row))

    def is_written_unseen(self, row: int) -> bool:
        """Return whether a named tensor has other bits although what the step recorded as its writers agrees."""
        site = self.site(row)
        return site.role == "named" and bool(site.inputs) and self.kinds[row] == "content" and not bool(self.fed[row])

    def draws(self, row: int) -> bool:
        """Return whether the op at a row reads the state of a generator."""
        return bool(self.site(row).op) and any(site.role == "generator" for site in self.sites_read(row))

    def _reads_unknown(self, row: int) -> bool:
        """Return whether something read at a row has no bits: a collective brings it, or nobody saw its writer."""
        for position, view in zip(self._pairs[row], (self.reference, self.current), strict=True):
            places = view.program.sites[position].inputs if position >= 0 else ()
            entries = (view.layout.entries[place] for place in places)
            if any(entry is not None and entry.detail in (IN_FLIGHT, UNWRITTEN) for entry in entries):
                return True
        return False

    def _other_arguments(self, argument_rows: Sequence[int]) -> dict[int, ArgumentDifference]:
        """Return the rows whose op was called with other arguments: the first of each call, and those that differ."""
        is_same = self.alignment.is_same_program
        candidates = self._outputs_of(argument_rows) if is_same else self._rows_to_examine()
        readers = ArgumentReader(self.reference), ArgumentReader(self.current)
        by_call: dict[int, ArgumentDifference | None] = {}
        found: dict[int, ArgumentDifference] = {}
        for row in candidates:
            left, right = self._pairs[row]
            call = right - self.current.program.sites[right].output
            is_first = call not in by_call
            if is_first:
                by_call[call] = differing_arguments(readers[0].read(left), readers[1].read(right))
            difference = by_call[call]
            if difference is not None and (is_first or self.differs[row]):
                found[row] = difference
        return found

    def _outputs_of(self, argument_rows: Iterable[int]) -> Iterator[int]:
        """Yield the output rows of the calls whose row of varying arguments differs, in one and the same program."""
        sites = self.current.program.sites
        for row in argument_rows:
            place = row + 1
            while place < len(sites) and _is_output(sites[place], sites[row], place - row - 1):
                yield place
                place += 1
            if place == row + 1:
                yield row

    def _rows_to_examine(self) -> Iterator[int]:
        """Yield the rows of calls that may have had other arguments, where the programs differ."""
        ours, theirs = self.reference.program.sites, self.current.program.sites
        for row, (left, right) in enumerate(self._pairs):
            if left < 0 or right < 0 or not theirs[right].op:
                continue
            one, other = ours[left], theirs[right]
            has_outputs = right + 1 < len(theirs) and _is_output(theirs[right + 1], other, 0)
            if one.role == "argument" and has_outputs:
                continue
            if one.varying or other.varying or one.arguments != other.arguments:
                yield row


def num_leading_sites(program: Program) -> int:
    """Return how many sites lie before everything that the step computed."""
    for position, site in enumerate(program.sites):
        if site.op or site.phase not in _BEFORE_OPS:
            return position
    return len(program)


def _readable_sites(program: Program) -> np.ndarray:
    """Return, bool by position, whether Python may know of what is there: a number, the batch, its own generators."""
    is_readable: np.ndarray = (program.roles == "value") | (program.phases == "data")
    for position in np.flatnonzero(program.roles == "generator").tolist():
        is_readable[position] |= program.sites[position].name in _HOST_GENERATORS
    return is_readable


def _is_output(site: Site, argument: Site, output: int) -> bool:
    return site.op == argument.op and site.role in ("output", "value") and site.output == output


def _other_layout(reference: StepView, current: StepView, alignment: Alignment) -> np.ndarray:
    if alignment.is_same_program and reference.record.layout_id == current.record.layout_id:
        return np.zeros(len(alignment), dtype=bool)
    ours, theirs = reference.layout.entries, current.layout.entries
    pairs = zip(alignment.reference.tolist(), alignment.current.tolist(), strict=True)
    return np.fromiter(
        (left >= 0 and right >= 0 and ours[left] != theirs[right] for left, right in pairs),
        dtype=bool,
        count=len(alignment),
    )
