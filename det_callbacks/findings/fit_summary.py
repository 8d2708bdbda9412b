"""The steps and the evidence of each fit of each process, read once and bounded."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from det_callbacks.runs.evidence import (
    AFTER_FORWARD,
    BATCH_START,
    LOADER,
    NAMES,
    EvidenceRow,
    evidence_path,
    read_evidence,
)
from det_callbacks.runs.files import damaged
from det_callbacks.runs.program import Layout, Program, Site, StepRecord
from det_callbacks.runs.steps import StreamFile
from det_callbacks.runs.store import Run

# Limits of a whole run, which its fits share.
MAX_RANKS, MAX_FITS = 8, 4  # processes, and fits of each: the first ones
MAX_STEPS = 4_000  # steps whose digests are read: the first and the last half of these
MAX_BYTES = 256 * 2**20  # of these digests
MAX_NOTED = 20_000  # steps whose evidence is read: the first of each fit
MAX_PROGRAMS = 16  # programs of a fit; steps of other programs are left out

MIN_STEPS = 5  # that must show a finding
MIN_BATCHES = 3  # different ones among them

_MOMENTS = frozenset({LOADER, BATCH_START, AFTER_FORWARD})
_KINDS = NAMES | {"indices", "start", "option"}

SiteKey = Callable[[Site], str | None]

CASTS = ("aten._to_copy.default", "aten.clone.default")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """The digests of one site; both arrays ascend by step."""

    steps: np.ndarray  # int64
    digests: np.ndarray  # uint64

    @property
    def is_constant(self) -> bool:
        return bool((self.digests == self.digests[:1]).all())

    def since(self, step: int) -> "Series":
        """Return the part from a step on."""
        first = int(np.searchsorted(self.steps, step))
        return Series(steps=self.steps[first:], digests=self.digests[first:])

    @property
    def after_last_change(self) -> "Series":
        """The steps after the last one that changed the digest; all if none did."""
        changes = np.flatnonzero(self.digests[1:] != self.digests[:-1])
        first = int(changes[-1]) + 2 if len(changes) else 0
        return Series(steps=self.steps[first:], digests=self.digests[first:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Indices that a sampler drew for a step: the digest of all, and the first 256 as text."""

    step: int
    digest: int
    text: str

    @property
    def indices(self) -> list[int]:
        """The first indices."""
        return [int(index) for index in json.loads(self.text or "[]")]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizedParameters:
    """Names of parameters that were always trainable; none if the recording
    has no such evidence.
    """

    by_optimizer: Mapping[str, list[str]]  # "optimizer 0" -> its parameters
    without_optimizer: list[str]  # parameters with a gradient that are never in an optimizer
    # parameters whose gradient exceeded rounding in one of the first updates
    with_large_gradient: list[str]


class FitSummary:
    """One fit of one process, read on demand."""

    def __init__(self, run: Run, rank: int, segment: int, paths: list[Path], *, share: int) -> None:
        self.run = run
        self.rank = rank
        self.segment = segment
        self._paths = paths
        self._share = share

    def choice(self, name: str) -> object:
        """Return an entry of the run's environment, or None."""
        entry = self.run.manifest.environment.get(name)
        return None if entry is None else entry.value

    @cached_property
    def records(self) -> list[StepRecord]:
        """The examined steps, ascending."""
        rank = self.run.rank(self.rank)
        fit = rank.fit(self.segment)
        if not len(fit):
            return []
        largest = 8 * max(1, int(fit.num_digests.max()))
        limit = max(2 * MIN_STEPS, min(MAX_STEPS, MAX_BYTES // largest) // self._share)
        chosen = np.arange(len(fit))
        if len(fit) > limit:
            chosen = np.concatenate((chosen[: limit // 2], chosen[-(limit // 2) :]))
        programs = list(dict.fromkeys(fit.program_ids[chosen].tolist()))[:MAX_PROGRAMS]
        chosen = chosen[np.isin(fit.program_ids[chosen], np.array(programs, dtype=np.uint64))]
        return [rank.read(self.segment, int(step)) for step in fit.steps[chosen]]

    @cached_property
    def programs(self) -> list[tuple[Program, list[StepRecord]]]:
        by_program: dict[int, list[StepRecord]] = {}
        for record in self.records:
            by_program.setdefault(record.program_id, []).append(record)
        return [(self.run.program(identity), records) for identity, records in by_program.items()]

    def layout(self, record: StepRecord) -> Layout:
        return self.run.layout(record.layout_id)

    def series(self, key: SiteKey, *, takes_first: bool = False) -> dict[str, Series]:
        """Return the digests of sites by the name that ``key`` gives them; None leaves a site out.

        Of sites with one name in a step the last counts, or with ``takes_first`` the first.
        """
        parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for program, records in self.programs:
            positions: dict[str, int] = {}
            for position, site in enumerate(program.sites):
                name = key(site)
                if name is not None and not (takes_first and name in positions):
                    positions[name] = position
            steps = np.array([record.step for record in records])
            chosen = np.array([*positions.values()], dtype=np.int64)
            matrix = np.stack([record.digests[chosen] for record in records])
            for column, name in enumerate(positions):
                parts.setdefault(name, []).append((steps, matrix[:, column]))
        return {name: _joined(known) for name, known in parts.items()}

    @cached_property
    def states(self) -> dict[str, Series]:
        """Parameters, buffers and optimizer state after each step, by name."""
        return self.series(
            lambda site: site.name if site.phase == "state" and site.role == "named" else None
        )

    @cached_property
    def initial_digests(self) -> dict[str, int]:
        """The first digest of each parameter, buffer and optimizer state: when the fit begins."""
        first = self.series(
            lambda site: site.name if site.phase == "state" else None, takes_first=True
        )
        return {name: int(series.digests[0]) for name, series in first.items()}

    @cached_property
    def gradients(self) -> dict[str, Series]:
        """The gradients of each update, by the name of their parameter."""
        return self.series(lambda site: _parameter_of(site) if site.phase == "gradient" else None)

    @cached_property
    def batches(self) -> list[tuple[int, int, bytes]]:
        """Step, epoch and digests of each batch that holds tensors."""
        batches = []
        for program, records in self.programs:
            chosen = [
                at
                for at, site in enumerate(program.sites)
                if site.phase == "data" and site.role == "named"
            ]
            if chosen:
                batches += [
                    (record.step, record.epoch, record.digests[chosen].tobytes())
                    for record in records
                ]
        return sorted(batches)

    @cached_property
    def steps_with_backward(self) -> list[int]:
        """The steps in which the loss started a backward pass."""
        return [
            record.step
            for program, records in self.programs
            if any(map(is_loss, program.sites))
            for record in records
        ]

    @property
    def num_batches(self) -> int:
        """How many of the batches differ."""
        return len({batch for *_, batch in self.batches})

    @cached_property
    def rows(self) -> list[EvidenceRow]:
        """The evidence that findings need, in order."""
        needed: list[EvidenceRow] = []
        for path in self._paths:
            end: int | None = None
            for row in read_evidence(path, run_id=self.run.manifest.run_id, keep=_is_needed):
                end = row.step + MAX_NOTED // self._share if end is None else end
                if row.step >= end:
                    break
                needed.append(row)
        return needed

    @cached_property
    def optimized(self) -> OptimizedParameters:
        always: dict[str, list[str]] = {}
        last: dict[str, list[str]] = {}
        for row in self.rows:
            if row.kind not in NAMES:
                continue
            names: list[str] = json.loads(row.text or "[]")
            if row.kind in ("trained", "untrained"):
                always[row.of] = [name for name in always.get(row.of, names) if name in {*names}]
            else:
                last[row.kind] = names
        in_none = {*always.pop("", ())}
        return OptimizedParameters(
            by_optimizer={f"optimizer {number}": names for number, names in always.items()},
            without_optimizer=[
                name for name in last.get("untrained_with_gradient", ()) if name in in_none
            ],
            with_large_gradient=last.get("large_gradient", []),
        )

    def rates_since(self, step: int) -> set[float]:
        """Return all learning rates in force from a step on."""
        rates: dict[str, set[float]] = {}  # of each optimizer
        in_force = set[float]()
        for row in self.rows:
            if (row.kind, row.part) == ("option", "lr"):
                rates[row.of] = {rate for rate in json.loads(row.text) if rate is not None}
                in_force |= rates[row.of] if row.step > step else set()
            if row.step <= step:
                in_force = set[float]().union(*rates.values())
        return in_force

    @cached_property
    def settings(self) -> Mapping[tuple[str, str], str]:
        """Settings of the loaders: ("train_dataloader", "sampler") -> "RandomSampler"."""
        return {(row.of, row.part): row.text for row in self.rows if row.kind == "loader"}

    @property
    def loaders(self) -> list[str]:
        return [loader for loader, setting in self.settings if setting == "type"]

    def iterations(self, loader: str) -> list[list[Drawn]]:
        """Return what a loader's sampler drew, for each iteration over the loader."""
        iterations, is_at_start = list[list[Drawn]](), False
        for row in self.rows:
            if row.moment == LOADER and row.kind == "generator":
                if not is_at_start:
                    iterations.append([])
                is_at_start = True
            elif (row.kind, row.of) == ("indices", loader):
                if not iterations:
                    iterations.append([])
                iterations[-1].append(Drawn(step=row.step, digest=row.value, text=row.text))
                is_at_start = False
            elif row.moment == BATCH_START:
                is_at_start = False
        return [drawn for drawn in iterations if drawn]

    def generator_states(self, point: str) -> dict[str, dict[int, int]]:
        """Return the states of generators at a point of each step: name -> step -> digest."""
        states: dict[str, dict[int, int]] = {}
        for row in self.rows:
            if row.moment == point and row.kind == "generator":
                states.setdefault(row.of, {})[row.step] = row.value
        return states

    @cached_property
    def constants(self) -> set[str]:
        """The parameters and buffers whose elements are all equal when the fit begins."""
        return {
            name for row in self.rows if row.kind == "constants" for name in json.loads(row.text)
        }

    @cached_property
    def generator_starts(self) -> dict[str, int]:
        """The states of generators when the fit begins, by name."""
        return {row.of: row.value for row in self.rows if row.kind == "start"}

    @cached_property
    def has_equal_samples(self) -> bool:
        """Whether the samples of the first batch are all equal, or unknown."""
        sketches: dict[int, set[int]] = {}
        for row in self.rows:
            if row.kind == "sample":
                sketches.setdefault(row.step, set()).add(row.value)
        return all(len(values) < 2 for values in sketches.values())


def fits_of(run: Run) -> list[list[FitSummary]]:
    """Return the first fits of a run, each with the examined processes;
    an error if their evidence is missing.
    """
    paths: dict[tuple[int, int], list[Path]] = {}
    for rank in run.ranks[:MAX_RANKS]:
        for file in run.rank(rank).files:
            if file.segment < MAX_FITS:
                path = evidence_path(file.path)
                if _has_evidence(run, file) and not path.is_file():
                    raise damaged(path, "it is missing, although the steps of its fit are complete")
                paths.setdefault((file.segment, rank), []).append(path)
    fits: dict[int, list[FitSummary]] = {}
    for (segment, rank), files in sorted(paths.items()):
        fits.setdefault(segment, []).append(FitSummary(run, rank, segment, files, share=len(paths)))
    return [*fits.values()]


def _has_evidence(run: Run, file: StreamFile) -> bool:
    """Return whether evidence was recorded next to a file of steps: by every fit with a step.

    A verification writes evidence only of steps that differ,
    and an ObserverContext only of arguments.
    """
    is_training = run.keeps == "all" and not run.manifest.recorded_by
    return is_training and file.unfinished is None and len(file.rows) > 0


def _is_needed(batch: pa.RecordBatch) -> np.ndarray:
    def is_needed(step: int, moment: str, kind: str) -> bool:
        return kind in _KINDS or moment in _MOMENTS or (kind == "sample" and step < 1)

    columns = (batch.column(name).to_pylist() for name in ("step", "moment", "kind"))
    return np.fromiter(map(is_needed, *columns), dtype=bool, count=len(batch))


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> Series:
    steps, digests = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(steps, kind="stable")
    return Series(steps=steps[order], digests=digests[order])


def is_loss(site: Site) -> bool:
    """Return whether a site is a loss that started a backward pass of the step."""
    if (
        site.phase != "forward"
        or site.role != "named"
        or site.op
        or site.module
        or site.name is None
    ):
        return False
    return site.is_loss


def _parameter_of(site: Site) -> str | None:
    return site.of or None


def outputs_of(program: Program, *ops: str) -> Iterator[tuple[int, Site]]:
    """Yield the positions and sites of the outputs of ops, such as "aten._softmax."."""
    for at, site in enumerate(program.sites):
        if site.role == "output" and site.op.startswith(ops):
            yield at, site


def before_casts(program: Program, at: int) -> int:
    """Return the position of what casts and copies read first."""
    while (site := program.sites[at]).op in CASTS and len(site.inputs) == 1:
        (at,) = site.inputs
    return at


def ancestors(program: Program, positions: Iterable[int], *, phase: str) -> set[int]:
    """Return positions, and what they followed from: through ops of this phase,
    up to the first other site.
    """
    reached, pending = set[int](), [*positions]
    while pending:
        at = pending.pop()
        if at not in reached:
            reached.add(at)
            site = program.sites[at]
            pending += site.inputs if site.phase == phase else ()
    return reached


def forward_readers(program: Program) -> dict[str, list[Site]]:
    """Return the ops of the forward pass that read each named tensor as it was
    before the step, by its name.
    """
    readers: dict[str, list[Site]] = {}
    for site in program.sites:
        if site.op and site.phase == "forward" and site.role == "output":
            for at in site.inputs:
                name = held_name(program.sites[at])
                if name is not None:
                    readers.setdefault(name, []).append(site)
    return readers


def held_name(site: Site) -> str | None:
    """Return the name of a tensor that was there before the step, and is
    read as it was then; or None.
    """
    is_first = site.phase == "state" and not site.inputs  # the first step begins with the state
    return site.name if is_first or site.role == "input" else None


def place(site: Site) -> str:
    """Return " in net.head, at train.py:7 in forward", with what is known of it."""
    module = f" in {site.module}" if site.module not in ("", "?") else ""
    return module + (f", at {site.source[0]}" if site.source else "")


def line_with(fit: FitSummary, site: Site, word: str) -> str:
    """Return the first line of a site's stack with this word, as "train.py:7 in
    forward"; "" if none has it.
    """
    for line in site.source:
        number = line.partition(" in ")[0].rpartition(":")[2]
        if any(str(at) == number and word in text for at, text in fit.run.source_text(line)):
            return line
    return ""
