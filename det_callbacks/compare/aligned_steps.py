"""Two aligned steps: which site each row has, and what the row reads."""

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from det_callbacks.compare.align import Alignment
from det_callbacks.runs.program import Program, Site, StepView

Shapes = tuple[tuple[int, ...], ...]

_BEFORE_OPS = ("state", "data", "rng", "input")


class AlignedSteps:
    """The rows of two aligned steps, by number.

    ``pairs`` has the two positions of each row (-1: none). What a row has in both steps is read
    from the current one.
    """

    def __init__(self, reference: StepView, current: StepView, alignment: Alignment) -> None:
        self.reference, self.current, self.alignment = reference, current, alignment
        self.rank, record = current.rank, current.record
        self.segment, self.step = record.segment, record.step
        positions = alignment.reference.tolist(), alignment.current.tolist()
        self.pairs = list(zip(*positions, strict=True))
        self.is_in_both = (alignment.reference >= 0) & (alignment.current >= 0)  # bool by row

    def site(self, row: int) -> Site:
        program, position = self.side(row)
        return program.sites[position]

    def digest(self, row: int) -> int:
        view, position = self.view_of(row)
        return int(view.record.digests[position])

    def side(self, row: int) -> tuple[Program, int]:
        """Return the program that has a row's site, and its position."""
        view, position = self.view_of(row)
        return view.program, position

    def view_of(self, row: int) -> tuple[StepView, int]:
        """Return the step that has a row's site, and its position."""
        reference_position, current_position = self.pairs[row]
        if current_position >= 0:
            return self.current, current_position
        return self.reference, reference_position

    def by_row(self, reference: np.ndarray, current: np.ndarray) -> np.ndarray:
        """Merge two arrays by position into one by row."""
        has_current = self.alignment.current >= 0
        reference_by_row = with_blank(reference)[self.alignment.reference]
        current_by_row = with_blank(current)[self.alignment.current]
        return np.asarray(np.where(has_current, current_by_row, reference_by_row))

    @cached_property
    def roles(self) -> np.ndarray:
        """Role by row, as text."""
        return self.by_row(self.reference.program.roles, self.current.program.roles)

    @cached_property
    def is_leading(self) -> np.ndarray:
        """Bool by row: it comes before everything that the step computed."""
        programs = self.reference.program, self.current.program
        return self.by_row(
            *(np.arange(len(program)) < num_leading_sites(program) for program in programs)
        )

    def call_key(self, row: int) -> tuple[bool, int]:
        """Return the key that the outputs of one call share: the step,
        and the position of the first output.
        """
        view, position = self.view_of(row)
        return view is self.current, position - view.program.sites[position].output

    def choices(self, row: int) -> tuple[str, str] | None:
        """Return the choices of a kernel in both steps, if they differ."""
        sites = [view.program.sites[position] for view, position in self._views_with(row)]
        if len(sites) < 2 or sites[0].choice == sites[1].choice:
            return None
        return sites[0].choice, sites[1].choice

    # what a row reads

    def sites_read(self, row: int) -> list[Site]:
        return [self.side(row)[0].sites[position] for position in self.site(row).inputs]

    def rows_read(self, row: int) -> list[int]:
        """Return the rows that a row read, in either step."""
        return [
            int(at)
            for view, position in self._views_with(row)
            for at in np.flatnonzero(
                np.isin(self._positions(view), view.program.sites[position].inputs)
            )
        ]

    def begin_row(self, row: int) -> int:
        """Return the row of a generator at the start of the step, given its row at the end."""
        view, position = self.view_of(row)
        read = view.program.sites[position].inputs[:1]
        return int(np.flatnonzero(self._positions(view) == read[0])[0]) if read else row

    def shapes_read(self, view: StepView, row: int) -> Shapes:
        """Return the shapes of the tensors that a row read in one of the steps."""
        position = self.pairs[row][view is self.current]
        read = view.program.sites[position].inputs if position >= 0 else ()
        return tuple(entry.shape for at in read if (entry := view.layout.entries[at]) is not None)

    def has_detail(self, row: int, detail: str) -> bool:
        """Return whether a row has this layout detail in either step."""
        return any(_detail(view, position) == detail for view, position in self._views_with(row))

    def reads_detail(self, row: int, *details: str) -> bool:
        """Return whether a row read a site with one of these layout details in either step."""
        return any(
            _detail(view, read) in details
            for view, position in self._views_with(row)
            for read in view.program.sites[position].inputs
        )

    def first_reader(self, row: int) -> str:
        """Return the phase of the first op that reads a row; "" if none does."""
        program, position = self.side(row)
        readers, read = program.edges
        later = readers[(read == position) & (readers > position)].tolist()
        sites = (program.sites[reader] for reader in later)
        return next((site.phase for site in sites if site.op), "")

    def reads_other_sites(self, row: int) -> bool:
        """Return whether a row of both steps reads different sites than in the reference."""
        reference_position, current_position = self.pairs[row]
        inputs = [
            self._partners.get(position, -1)
            for position in self.current.program.sites[current_position].inputs
        ]
        return sorted(inputs) != sorted(self.reference.program.sites[reference_position].inputs)

    @cached_property
    def _partners(self) -> dict[int, int]:
        return {current: reference for reference, current in self.pairs if current >= 0}

    def _positions(self, view: StepView) -> np.ndarray:
        """Return the positions in one of the steps, by row."""
        return self.alignment.current if view is self.current else self.alignment.reference

    def _views_with(self, row: int) -> Iterator[tuple[StepView, int]]:
        for view, position in zip((self.reference, self.current), self.pairs[row], strict=True):
            if position >= 0:
                yield view, position


def num_leading_sites(program: Program) -> int:
    """Return how many sites come before everything that the step computed."""
    has_sources = False
    for position, site in enumerate(program.sites):
        if site.op or site.phase not in _BEFORE_OPS or (has_sources and site.phase == "state"):
            return position
        has_sources = has_sources or site.phase in ("data", "rng")
    return len(program)


def with_blank(values: np.ndarray) -> np.ndarray:
    """Append the value of position -1."""
    return np.append(values, np.zeros(1, dtype=values.dtype))


def _detail(view: StepView, position: int) -> str | None:
    entry = view.layout.entries[position]
    return None if entry is None else entry.detail
