"""The heat map of one fit of one rank: what became of each module, and of each phase, in each step; bounded."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from det_callbacks.compare.step_states import SiteDifferences
from det_callbacks.patterns import OpPattern
from det_callbacks.report.html.rows import module_label
from det_callbacks.runs.program import Program, Site
from det_callbacks.runs.store import Run

MAX_COLUMNS = 200
"""Columns of a heat map; longer runs have several steps in one."""
MAX_ROWS = 100
"""Rows of a heat map; modules beyond that are shown together with their neighbours."""

MATCH, ORIGIN, CARRIED, REPLAYED, NOT_COMPARED = "mocr."
"""One letter a cell, as it stands in the file."""

OTHERS = "(other modules)"
PHASES = ("data", "rng", "state", "input", "forward", "backward", "gradient", "optimizer", "other")

_MAX_PROGRAMS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of the heat maps.

    Attributes:
        labels: as they are shown.
        of: module -> row.
        is_grouped: whether several modules share a row.
    """

    labels: tuple[str, ...]
    of: Mapping[str, int]
    is_grouped: bool = False


def group_modules(modules: Sequence[str], limit: int = MAX_ROWS) -> Rows:
    """Return the rows of modules in their order: one each, or as deep into their names as fits.

    Args:
        modules: qualified names, each once.
        limit: rows that there may be.
    """
    deepest = max((name.count(".") + 1 for name in modules), default=1)
    labels = {name: module_label(name) for name in modules}
    is_grouped = len(modules) > limit
    for depth in range(deepest - 1, 0, -1):
        if len(set(labels.values())) <= limit:
            break
        for name in modules:
            parts = name.split(".")
            if len(parts) > depth:
                labels[name] = ".".join(parts[:depth]) + ".*"
    shown = list(dict.fromkeys(labels.values()))
    if len(shown) > limit:
        rest = frozenset(shown[limit - 1 :])
        labels = {name: OTHERS if label in rest else label for name, label in labels.items()}
        shown = [*shown[: limit - 1], OTHERS]
    number = {label: row for row, label in enumerate(shown)}
    return Rows(labels=tuple(shown), of={name: number[label] for name, label in labels.items()}, is_grouped=is_grouped)


def phase_rows(phases: Iterable[str]) -> Rows:
    """Return the rows of phases, in the order of a step."""
    there = set(phases)
    shown = [*(phase for phase in PHASES if phase in there), *sorted(there.difference(PHASES))]
    return Rows(labels=tuple(shown), of={phase: row for row, phase in enumerate(shown)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgramPlaces:
    """Where the sites of a program belong.

    Attributes:
        modules: int64 by position, row of its module.
        phases: likewise of its phase.
        replayed: bool by position: bits of the reference were put back there.
        named: bool by position: its tensor has a name.
    """

    modules: np.ndarray
    phases: np.ndarray
    replayed: np.ndarray
    named: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Rows of the sites of a step that differ: by module and by phase, and whether they have a name."""

    modules: np.ndarray
    phases: np.ndarray
    named: np.ndarray


class Placing:
    """Finds the rows of sites; a few programs are kept.

    Args:
        modules: rows of modules.
        phases: rows of phases.
        patterns: ops whose bits were put back.
        names: observations whose bits were put back.
    """

    def __init__(
        self, modules: Rows, phases: Rows, *, patterns: Sequence[OpPattern] = (), names: frozenset[str] = frozenset()
    ) -> None:
        self.modules = modules
        self.phases = phases
        self._patterns = patterns
        self._names = names
        self._known: dict[int, ProgramPlaces] = {}

    def of(self, run: Run, program_id: int) -> ProgramPlaces:
        """Return where the sites of a program of a run belong."""
        known = self._known.get(program_id)
        if known is None:
            if len(self._known) == _MAX_PROGRAMS:
                self._known.clear()
            known = self._known[program_id] = self._find(run.program(program_id))
        return known

    def of_differing(self, sites: SiteDifferences, reference: Run, current: Run) -> Places:
        """Return where the sites of a step that differ belong."""
        ours = self.of(reference, sites.reference.record.program_id)
        theirs = self.of(current, sites.current.record.program_id)
        left, right = sites.alignment.reference[sites.rows], sites.alignment.current[sites.rows]
        return Places(
            **{
                name: np.where(right >= 0, getattr(theirs, name)[right], getattr(ours, name)[left])
                for name in ("modules", "phases", "named")
            }
        )

    def _find(self, program: Program) -> ProgramPlaces:
        size = len(program)
        return ProgramPlaces(
            modules=np.fromiter((self.modules.of[site.module] for site in program.sites), dtype=np.int64, count=size),
            phases=np.fromiter((self.phases.of[site.phase] for site in program.sites), dtype=np.int64, count=size),
            replayed=np.fromiter(map(self._is_replayed, program.sites), dtype=bool, count=size),
            named=np.fromiter((site.name is not None for site in program.sites), dtype=bool, count=size),
        )

    def _is_replayed(self, site: Site) -> bool:
        if not site.op:
            return site.name in self._names
        if site.role not in ("output", "value"):
            return False
        return any(pattern.matches(site.phase, site.module, site.op) for pattern in self._patterns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """What became of each row in each column; int64 arrays of rows x columns.

    Attributes:
        compared: sites that were compared.
        differing: those of them that differ.
        starting: those of them where a difference starts.
        replayed: those into which bits of the reference were put back.
    """

    compared: np.ndarray
    differing: np.ndarray
    starting: np.ndarray
    replayed: np.ndarray

    @classmethod
    def empty(cls, num_rows: int, num_columns: int) -> "Cells":
        """Return cells in which nothing was compared."""
        return cls(
            **{
                name: np.zeros((num_rows, num_columns), dtype=np.int64)
                for name in ("compared", "differing", "starting", "replayed")
            }
        )

    def states(self) -> list[str]:
        """Return a letter for each cell, one text a row."""
        letters = np.full(self.compared.shape, NOT_COMPARED, dtype="U1")
        letters[self.compared > 0] = MATCH
        letters[self.replayed > 0] = REPLAYED
        letters[self.differing > 0] = CARRIED
        letters[self.starting > 0] = ORIGIN
        return ["".join(row) for row in letters]


class Grid:
    """The cells of one fit of one rank, by module and by phase, filled step by step.

    Args:
        steps: that either run has, ascending.
        placing: rows of the sites.
        max_columns: steps share columns where there are more.
    """

    def __init__(self, steps: Sequence[int], placing: Placing, *, max_columns: int = MAX_COLUMNS) -> None:
        num_columns = min(len(steps), max_columns)
        self._placing = placing
        bounds = [index * len(steps) // num_columns for index in range(num_columns + 1)] if steps else [0]
        self.columns = tuple((steps[start], steps[stop - 1]) for start, stop in pairwise(bounds))
        self._firsts = np.array([first for first, _ in self.columns], dtype=np.int64)
        self.modules = Cells.empty(len(placing.modules.labels), num_columns)
        self.phases = Cells.empty(len(placing.phases.labels), num_columns)

    def column(self, step: int) -> int:
        """Return the column that a step is in."""
        return int(np.searchsorted(self._firsts, step, side="right")) - 1

    def add_compared(self, run: Run, program_id: int, step: int) -> None:
        """Count the sites of a step as compared."""
        places, column = self._placing.of(run, program_id), self.column(step)
        for cells, rows in ((self.modules, places.modules), (self.phases, places.phases)):
            size = len(cells.compared)
            cells.compared[:, column] += np.bincount(rows, minlength=size)
            if places.replayed.any():
                cells.replayed[:, column] += np.bincount(rows[places.replayed], minlength=size)

    def add_differing(self, step: int, places: Places, starting: np.ndarray) -> None:
        """Count sites that differ.

        Args:
            step: training batch.
            places: of the sites.
            starting: whether a difference starts there.
        """
        column = self.column(step)
        for cells, rows in ((self.modules, places.modules), (self.phases, places.phases)):
            cells.differing[:, column] += np.bincount(rows, minlength=len(cells.differing))
            cells.starting[:, column] += np.bincount(rows[starting], minlength=len(cells.starting))
