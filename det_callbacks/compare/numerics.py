"""Distinguishes rounding from a real change, by the differences of tensors that both runs kept.

The comparison relates an op's error to the errors of its inputs. If an op carries on rounding, it
multiplies the error by a small factor; a real change adds an error that the inputs do not explain.
A site that was not kept, or has no partner, takes the error of its inputs; if an op behind it
jumps, the change starts at the op without a partner.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, fields, replace
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from det_callbacks.compare.differences import compare_steps
from det_callbacks.compare.eager import eager_pairs
from det_callbacks.compare.module_names import ModuleNames, modules_of
from det_callbacks.compare.rounding import Place, Rounding, place_of
from det_callbacks.digest.host import format_digest
from det_callbacks.digest.numbers import Measure, can_measure, coarser, epsilon
from det_callbacks.errors import NothingComparedError, SelectionError
from det_callbacks.runs.program import StepView
from det_callbacks.runs.store import Run
from det_callbacks.tensors.files import KEPT, SavedStep, SavedTensor, key_of, measure_saved
from det_callbacks.verdict import Divergence, Numerics, SiteNumerics

JUMP = 10.0
"""An op is a jump if it multiplies the error of its inputs by this factor,
or adds so many epsilons.
"""

_NO_MEASURE = Measure(num_elements=0, num_unknown=1, excess=inf)
"""Of an op that only one run has: there is no partner to measure a distance to."""
_SUMS = re.compile(r"aten\.(_foreach_)?(sum|mean|add|sub)_?\.")
_COPIES = re.compile(r"aten\.(_foreach_)?(_to_copy|clone|copy_?)\.")


def compare_numerics(
    reference: Run,
    current: Run,
    *,
    tolerance: Rounding | None = None,
    names: ModuleNames | None = None,
) -> Numerics:
    """Compare the tensors that two runs kept of the same steps.

    Raises:
        SelectionError: a run is a verification or kept nothing; the message says how to keep
            tensors. Or a pattern of ``names`` matches no module.
        NothingComparedError: the runs have no step and site in common of which both kept a tensor.
        ReferenceFormatError: a file of kept tensors is damaged.
    """
    for run in (reference, current):
        is_verification = run.keeps != "all"
        if is_verification or not run.manifest.keep_tensors:
            problem = (
                "is a verification, which keeps only steps that differ"
                if is_verification
                else "kept no tensors"
            )
            raise SelectionError(
                f"{run.path} {problem}, so it cannot be measured. Record that training with "
                "tensors, into another folder, with the same steps and ops as the other run: "
                "det-callbacks record RUN --only-steps 0 --keep '*' -- python train.py"
            )
    found, counts, num_default = list[SiteNumerics](), Counter[str](), 0
    starts_before: dict[Place, SiteNumerics] = {}
    modules: tuple[set[str], set[str]] = set(), set()
    for views, kept in _common_steps(reference, current):
        for known, view in zip(modules, views, strict=True):
            known |= modules_of(view)
        step = _StepNumerics(views, kept, tolerance, names)
        found += step.sites()
        starts_before |= step.starts_before
        counts += step.not_compared
        num_default += step.num_default
    if names is not None:
        names.check(*modules)
    if not found:
        reasons = "".join(f"; {number:,} sites: {reason}" for reason, number in counts.items())
        raise NothingComparedError(
            f"{reference.path} and {current.path} kept no tensor that both have, of a step that "
            f"both have{reasons}. Record both with the same only_steps and keep_tensors."
        )
    # keep equal samples, since other elements may differ; drop tensors that differ
    # only in the signs of zeros
    differing = [
        site
        for site in found
        if site.kind != "equal"
        and (site.absolute != 0 or site.num_elements < prod(site.shape or ()))
    ]
    beyond = [site for site in found if not site.within]
    starts = [site for site in beyond if site.is_start]
    jumps = [site for site in starts if site.reads is not None]
    first = min(((site.segment, site.step) for site in jumps), default=None)
    jumps = [site for site in jumps if (site.segment, site.step) == first]
    jumps.sort(key=lambda site: _or_inf(site.growth), reverse=True)
    # an op that only one run has comes directly before the first jump behind it
    listed = (
        site
        for jump in jumps
        for site in (starts_before.get(place_of(jump)), jump)
        if site is not None
    )
    jumps = [*dict.fromkeys(listed)]
    return Numerics(
        conclusion="change" if starts else "rounding" if differing else "none",
        tolerance=str(tolerance.path) if tolerance is not None else "torch.testing",
        first_jump=jumps[0] if jumps else None,
        worst=max(differing, key=lambda site: _or_inf(site.excess), default=None),
        num_differing=len(differing),
        num_beyond=len(beyond),
        num_default=num_default,
        not_compared=dict(counts),
        jumps=tuple(jumps),
        sites=tuple(found),
    )


def _or_inf(size: float | None) -> float:
    return inf if size is None else size


def _common_steps(reference: Run, current: Run) -> Iterator[tuple[list[StepView], list[SavedStep]]]:
    """Yield the steps of which both runs kept tensors."""
    for rank in sorted({*reference.ranks} & {*current.ranks}):
        reference_rank, current_rank = reference.rank(rank), current.rank(rank)
        for segment in sorted({*reference_rank.segments} & {*current_rank.segments}):
            for step in np.intersect1d(
                reference_rank.steps(segment), current_rank.steps(segment)
            ).tolist():
                place: dict[str, Any] = {"rank": rank, "segment": segment, "step": step}
                kept = [SavedStep.of(run, **place, kind=KEPT) for run in (reference, current)]
                if all(saved.exists for saved in kept):
                    yield [run.view(**place) for run in (reference, current)], kept


def kept_sites(view: StepView, saved: SavedStep) -> dict[int, str]:
    """Return the keys of kept tensors by position; leave out sites whose bits
    are not those kept.
    """
    found = {}
    for position, site in enumerate(view.program.sites):
        key = key_of(site)
        digest = format_digest(int(view.record.digests[position]))
        if site.role == "output" and saved.entries.get(key, {}).get("site_digest") == digest:
            found[position] = key
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A site of both steps and its positions in each: several for fused modules,
    none if a step lacks it.
    """

    positions: tuple[Sequence[int], Sequence[int]]
    divergence: Divergence | None = None  # None if it was not kept
    measure: Measure | None = None  # None if unknown
    is_equal: bool = False  # bit for bit


class _Error(NamedTuple):
    """The error at a site, or the largest error of its inputs; infinite if unknown."""

    relative: float = 0.0
    absolute: float = 0.0
    through: tuple[str, ...] = ()  # unknown tensors in between


def _largest(errors: Sequence[_Error]) -> _Error:
    return _Error(
        relative=max((one.relative for one in errors), default=0.0),
        absolute=max((one.absolute for one in errors), default=0.0),
        through=tuple(dict.fromkeys(name for one in errors for name in one.through)),
    )


class _Carried:
    """The error of each site of a step; a site that was not kept has the error of its inputs."""

    def __init__(self, view: StepView, paired: Set[int]) -> None:
        self._sites, self._layout, self._paired = view.program.sites, view.layout, paired
        self._known: dict[int, _Error] = {}
        self._carried: list[_Error] = []

    def note(self, positions: Sequence[int], row: _Row) -> None:
        if (known := row.measure) is not None:
            error = _Error(_or_inf(known.relative), _or_inf(known.absolute))
            self._known.update(dict.fromkeys(positions, error))

    def carry(self) -> None:
        """Compute the errors of all sites in order."""
        for position, site in enumerate(self._sites):
            error = self._known.get(position)
            if error is None and (site.inputs or site.op):
                read = self.read(position)
                error = read
                if site.role == "output":  # the op rounds, too
                    entry = self._layout.entries[position]
                    own = epsilon("" if entry is None else entry.dtype)
                    through = tuple(dict.fromkeys((*read.through, site.op)))
                    error = _Error(max(read.relative, own), read.absolute, through)
            elif error is None:  # the tensor comes from outside the trace, and differs
                error = _Error(inf, inf, through=(site.name or "a tensor made outside the trace",))
            self._carried.append(error)

    def read(self, position: int) -> _Error:
        """Return the largest error of a site's inputs."""
        inputs = self._sites[position].inputs
        if position not in self._paired:
            # a tensor from outside that only this run reads, such as the weight of an
            # added layer, has no error
            inputs = tuple(at for at in inputs if at in self._paired or self._sites[at].op)
        return _largest([self._carried[at] for at in inputs])


class _StepNumerics:
    def __init__(
        self,
        views: Sequence[StepView],
        saved: Sequence[SavedStep],
        rounding: Rounding | None,
        names: ModuleNames | None,
    ) -> None:
        self._saved, self._rounding = saved, rounding
        self._kept = [kept_sites(*side) for side in zip(views, saved, strict=True)]
        reference, current = views
        if names is not None:
            reference = names.renamed(reference)
        self._views = reference, current
        self._difference = compare_steps(reference, current)
        self._fused = [] if names is None else names.fused(views[0], current)
        pairs = [pair for pair in self._difference.pairs if min(pair) >= 0]
        self._paired = [{pair[side] for pair in pairs} for side in (0, 1)]
        for group in self._fused:
            for paired, positions in zip(self._paired, group, strict=True):
                paired |= {*positions}
        self._compiled = eager_pairs(self._views, self._paired)
        for pair, _ in self._compiled:
            for paired, position in zip(self._paired, pair, strict=True):
                paired.add(position)
        # sites with a change -> the op that only one run has, at which the change starts
        self.starts_before: dict[Place, SiteNumerics] = {}
        self.not_compared: Counter[str] = Counter()
        self.num_default = 0  # sites without a measured tolerance

    def sites(self) -> list[SiteNumerics]:
        """Return the sites that both runs kept, in the order of the step."""
        rows = [*self._rows()]
        sides = [
            _Carried(view, paired) for view, paired in zip(self._views, self._paired, strict=True)
        ]
        for number, side in enumerate(sides):
            for row in rows:
                side.note(row.positions[number], row)
            side.carry()
        kept = sorted(
            (row for row in rows if row.divergence is not None), key=lambda row: row.positions[1][0]
        )
        sites = [self._site(row, sides) for row in kept]
        # with unknown inputs, nothing shows that the error is rounding
        changed = [
            not site.within and (site.reads is None or _or_inf(site.growth) >= JUMP)
            for site in sites
        ]
        # positions that a change has reached, including the change
        tainted = [set[int](), set[int]()]
        for number, (view, reached) in enumerate(zip(self._views, tainted, strict=True)):
            starts = [
                row.positions[number]
                for row, is_changed in zip(kept, changed, strict=True)
                if is_changed
            ]
            here = {at for positions in starts for at in positions}
            for position, site in enumerate(view.program.sites):
                if position in here or not reached.isdisjoint(site.inputs):
                    reached.add(position)
        found = list[SiteNumerics]()
        for row, compared, is_changed in zip(kept, sites, changed, strict=True):
            is_start = is_changed and not self._reads(row, tainted)
            found.append(replace(compared, is_start=is_start))
            start = (
                self._start_before(row, sides) if is_start and compared.reads is not None else None
            )
            if start is not None:
                self.starts_before[place_of(compared)] = start
        return found

    def _start_before(self, row: _Row, sides: Sequence[_Carried]) -> SiteNumerics | None:
        """Return the op between a row and the compared sites before it that
        only one run has, or None.

        Several: the first that reads a tensor of both runs, since a mask may have been made long
        before. Copies and casts change no numbers, and different arguments of the row's
        own op explain its error. A kernel has fused what comes before its output.
        """
        is_kernel = any(row.positions == (pair[:1], pair[1:]) for pair, _ in self._compiled)
        if row.divergence is None or row.divergence.kind == "argument" or is_kernel:
            return None
        for number in (1, 0):  # the user edits the current run's code
            sites, paired = self._views[number].program.sites, self._paired[number]
            row_of = {pair[number]: at for at, pair in enumerate(self._difference.pairs)}
            between = set[int]()
            waiting = [at for position in row.positions[number] for at in sites[position].inputs]
            while waiting:
                at = waiting.pop()
                if sites[at].op and at in row_of and at not in paired and at not in between:
                    between.add(at)
                    waiting += sites[at].inputs
            between = {at for at in between if not sites[at].is_region}  # they are no ops
            candidates = [at for at in sorted(between) if not _COPIES.match(sites[at].op)]
            if not candidates:
                continue
            copies = between - {*candidates}
            readers = (
                at
                for at in candidates
                if any(it in paired or it in copies for it in sites[at].inputs)
            )
            position = next(readers, candidates[0])
            read = sides[number].read(position)
            return _site_of(
                self._difference.describe(row_of[position]), _NO_MEASURE, read, is_start=True
            )
        return None

    def _reads(self, row: _Row, positions: Sequence[set[int]]) -> bool:
        """Return whether a row reads any of these positions, on either side."""
        return any(
            not positions[side].isdisjoint(view.program.sites[at].inputs)
            for side, view in enumerate(self._views)
            for at in row.positions[side]
        )

    def _rows(self) -> Iterator[_Row]:
        found = self._difference
        in_groups = [{at for group in self._fused for at in group[side]} for side in (0, 1)]
        for pair, _ in self._compiled:
            for known, position in zip(in_groups, pair, strict=True):
                known.add(position)
        for row, pair in enumerate(found.pairs):
            reference_place, current_place = pair
            is_kept = [at in kept for at, kept in zip(pair, self._kept, strict=True)]
            if reference_place in in_groups[0] or current_place in in_groups[1]:
                continue
            if min(reference_place, current_place) < 0:
                side = "the reference" if current_place < 0 else "the current run"
                self.not_compared[f"only {side} has it"] += any(is_kept)
            elif not found.differs[row]:
                yield self._equal(row, has_bits=all(is_kept))
            elif all(is_kept):
                yield self._compared(found.describe(row), (reference_place,), (current_place,))
            else:
                self.not_compared["only one run kept it"] += any(is_kept)
        for group in self._fused:
            is_kept = [
                at in kept
                for positions, kept in zip(group, self._kept, strict=True)
                for at in positions
            ]
            if not all(is_kept):
                self.not_compared["of fused modules, and not all of them kept"] += 1
                continue
            of_whole = int(len(group[1]) == 1)
            whole = next(
                row for row, pair in enumerate(found.pairs) if pair[of_whole] == group[of_whole][0]
            )
            yield self._compared(found.describe(whole), *group)
        yield from self._compiled_rows()

    def _compiled_rows(self) -> Iterator[_Row]:
        """Yield the tensors that compiled code made in one run and eager code in the other."""
        pairs = self._difference.pairs if self._compiled else ()
        row_of = [{pair[side]: row for row, pair in enumerate(pairs)} for side in (0, 1)]
        for positions, compiled in self._compiled:
            is_kept = [at in kept for at, kept in zip(positions, self._kept, strict=True)]
            if all(is_kept):
                shown = self._difference.describe(row_of[compiled][positions[compiled]])
                digests = [
                    format_digest(int(view.record.digests[at]))
                    for view, at in zip(self._views, positions, strict=True)
                ]
                shown = replace(
                    shown, kind="content", reference_digest=digests[0], current_digest=digests[1]
                )
                yield self._compared(shown, positions[:1], positions[1:])
            else:
                self.not_compared["only one run kept it"] += any(is_kept)

    def _equal(self, row: int, *, has_bits: bool) -> _Row:
        positions = self._difference.pairs[row]
        entry = self._saved[1].entries[self._kept[1][positions[1]]] if has_bits else {}
        num = len(range(entry["first"], prod(entry["shape"]), entry["every"])) if has_bits else 0
        return _Row(
            positions=((positions[0],), (positions[1],)),
            divergence=self._difference.describe(row) if has_bits else None,
            measure=Measure(num_elements=num),
            is_equal=True,
        )

    def _compared(self, divergence: Divergence, *positions: Sequence[int]) -> _Row:
        row = _Row(positions=(positions[0], positions[1]))
        sides = [
            [saved.read(kept[at]) for at in places]
            for saved, kept, places in zip(self._saved, self._kept, positions, strict=True)
        ]
        whole = min(sides, key=len)[0].shape
        reference, current = (_joined(tensors, whole) for tensors in sides)
        if reference is None or current is None or reference.shape != current.shape:
            self.not_compared["of another shape"] += 1
            return row
        dtypes = reference.dtype, current.dtype
        if not all(map(can_measure, dtypes)):
            self.not_compared["of a dtype whose numbers are not known"] += 1
            return row
        known = measure_saved(reference, current)
        bound = (
            None if self._rounding is None else self._rounding.bound(divergence, coarser(*dtypes))
        )
        if bound is not None:
            known = replace(known, excess=_multiple(known.relative, bound))
        self.num_default += self._rounding is not None and bound is None
        return replace(row, divergence=replace(divergence, dtype=coarser(*dtypes)), measure=known)

    def _site(self, row: _Row, sides: Sequence[_Carried]) -> SiteNumerics:
        divergence, known = row.divergence, row.measure
        if divergence is None or known is None:
            raise ValueError("it was not compared")
        read = _largest(
            [
                side.read(at)
                for side, positions in zip(sides, row.positions, strict=True)
                for at in positions
            ]
        )
        growth = self._growth(row, read, known) if read.relative < inf else None
        site = _site_of(divergence, known, read, growth=growth)
        return replace(site, kind="equal") if row.is_equal else site

    def _growth(self, row: _Row, read: _Error, known: Measure) -> float | None:
        """Return an error as a multiple of the error that explains it, or None if it has no number.

        A sum whose terms cancel has a large relative error, but an absolute error like those of its
        n terms: about sqrt(n) times as large if these are independent.
        """
        if known.relative is None or known.absolute is None or row.divergence is None:
            return None
        growth = known.relative / (max(read.relative, epsilon(row.divergence.dtype or "")) or 1.0)
        if _SUMS.match(row.divergence.op) and read.absolute:
            view, position = self._views[1], row.positions[1][0]
            entries = [view.layout.entries[at] for at in view.program.sites[position].inputs]
            num_read = max((prod(entry.shape) for entry in entries if entry is not None), default=1)
            num_terms = max(num_read / max(prod(row.divergence.shape or ()), 1), 1)
            growth = min(growth, known.absolute / (read.absolute * math.sqrt(num_terms)))
        return growth


def _site_of(
    divergence: Divergence,
    known: Measure,
    read: _Error,
    *,
    growth: float | None = None,
    is_start: bool = False,
) -> SiteNumerics:
    names = [one.name for one in fields(divergence) if one.name != "numbers"]
    return SiteNumerics(
        **{name: getattr(divergence, name) for name in names},
        **{name: getattr(known, name) for name in ("ulp", "relative", "absolute", "num_elements")},
        within=known.excess <= 1,
        excess=known.excess if known.excess < inf else None,
        reads=read.relative if read.relative < inf else None,
        growth=growth,
        is_start=is_start,
        through=read.through,
    )


def _joined(tensors: Sequence[SavedTensor], shape: tuple[int, ...]) -> SavedTensor | None:
    """Return the tensors, joined along the axis that yields this shape, or None if no axis does."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if any(
        tensor.every > 1 or len(tensor.shape) != len(shape) or tensor.dtype != first.dtype
        for tensor in tensors
    ):
        return None
    parts = [
        tensor.bits.reshape(*tensor.shape, tensor.bits.nbytes // max(tensor.num_saved, 1))
        for tensor in tensors
    ]
    for axis in range(len(shape)):
        others = {tensor.shape[:axis] + tensor.shape[axis + 1 :] for tensor in tensors}
        if (
            others == {shape[:axis] + shape[axis + 1 :]}
            and sum(part.shape[axis] for part in parts) == shape[axis]
        ):
            return SavedTensor(
                dtype=first.dtype, shape=shape, bits=np.concatenate(parts, axis).reshape(-1)
            )
    return None


def _multiple(error: float | None, bound: float) -> float:
    """Return an error, or None for one without a number, divided by its tolerance."""
    if error == 0 or bound == inf:
        return 0.0
    return error / bound if error is not None and bound else inf
