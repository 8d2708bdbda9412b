"""One step of two runs, compared in numbers: the error of each site, and where a change starts.

The comparison relates an op's error to the errors of its inputs. An op that only passes rounding
on multiplies the error by a small factor; a real change adds an error that the inputs do not
explain. A site that was not kept, or has no partner, takes the error of its inputs; if an op behind
it jumps, the change starts at the op without a partner.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from math import inf, prod
from typing import NamedTuple

from det_callbacks.compare.differences import compare_steps
from det_callbacks.compare.eager import eager_pairs
from det_callbacks.compare.module_names import ModuleNames
from det_callbacks.compare.rounding import Place, Rounding, place_of
from det_callbacks.digest.host import format_digest
from det_callbacks.digest.numbers import Measure, can_measure, coarser, epsilon
from det_callbacks.runs.program import StepView
from det_callbacks.tensors.files import SavedStep, SavedTensor, joined, key_of, measure_saved
from det_callbacks.verdict import Divergence, SiteNumerics

JUMP = 10.0
"""An op is a jump if it multiplies the error of its inputs by this factor,
or adds so many epsilons.
"""

_NO_MEASURE = Measure(num_elements=0, num_unknown=1, excess=inf)
"""Of an op that only one run has: there is no partner to measure a distance to."""
_SUMS = re.compile(r"aten\.(_foreach_)?(sum|mean|add|sub)_?\.")
_COPIES = re.compile(r"aten\.(_foreach_)?(_to_copy|clone|copy_?)\.")


def kept_sites(view: StepView, saved: SavedStep) -> dict[int, str]:
    """Return the keys of kept tensors by position; leave out sites whose bits
    are not those kept.
    """
    keys = {}
    for position, site in enumerate(view.program.sites):
        key = key_of(site)
        digest = format_digest(int(view.record.digests[position]))
        if site.role == "output" and saved.entries.get(key, {}).get("site_digest") == digest:
            keys[position] = key
    return keys


Positions = tuple[Sequence[int], Sequence[int]]
"""Positions in the reference and in the current step: several for fused modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairedSite:
    """A site that both steps have."""

    positions: Positions
    divergence: Divergence | None = None  # None if it was not kept
    measure: Measure | None = None  # None if unknown
    is_equal: bool = False  # bit for bit


class _Error(NamedTuple):
    """The error at a site, or the largest error of its inputs; infinite if unknown."""

    relative: float = 0.0
    absolute: float = 0.0
    through: tuple[str, ...] = ()  # unknown tensors in between

    @classmethod
    def largest(cls, errors: Sequence["_Error"]) -> "_Error":
        return cls(
            relative=max((error.relative for error in errors), default=0.0),
            absolute=max((error.absolute for error in errors), default=0.0),
            through=tuple(dict.fromkeys(name for error in errors for name in error.through)),
        )


class _CarriedErrors:
    """The error of each site of a step; a site that was not measured has the error of its inputs.

    ``paired`` has the positions of sites that the other step has too.
    """

    def __init__(self, view: StepView, paired: Set[int], measured: Mapping[int, _Error]) -> None:
        self._sites, self._layout, self._paired = view.program.sites, view.layout, paired
        self._errors: list[_Error] = []
        for position in range(len(self._sites)):
            error = measured.get(position)
            self._errors.append(self._carried_to(position) if error is None else error)

    def _carried_to(self, position: int) -> _Error:
        site = self._sites[position]
        if not (site.inputs or site.op):  # the tensor comes from outside the trace, and differs
            return _Error(inf, inf, through=(site.name or "a tensor made outside the trace",))
        read = self.read(position)
        if site.role != "output":
            return read
        entry = self._layout.entries[position]
        own = epsilon("" if entry is None else entry.dtype)  # the op rounds, too
        through = tuple(dict.fromkeys((*read.through, site.op)))
        return _Error(max(read.relative, own), read.absolute, through)

    def read(self, position: int) -> _Error:
        """Return the largest error of a site's inputs."""
        inputs = self._sites[position].inputs
        if position not in self._paired:
            # a tensor from outside that only this run reads, such as the weight of an
            # added layer, has no error
            inputs = tuple(at for at in inputs if at in self._paired or self._sites[at].op)
        return _Error.largest([self._errors[at] for at in inputs])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumerics:
    """The kept tensors of one step of two runs, compared in numbers."""

    sites: Sequence[SiteNumerics]  # that both runs kept, in the order of the step
    # by the place of a site with a change: the op that only one run has, at which it starts
    starts_before: Mapping[Place, SiteNumerics]
    not_compared: Counter[str]  # why sites were not compared, and how many
    num_default: int  # sites without a measured tolerance


def compare_step(
    views: Sequence[StepView],
    saved: Sequence[SavedStep],
    rounding: Rounding | None,
    names: ModuleNames | None,
) -> StepNumerics:
    step = _Step(views, saved, rounding, names)
    sites, starts_before = step.with_starts([*step.paired_sites()])
    return StepNumerics(
        sites=sites,
        starts_before=starts_before,
        not_compared=step.not_compared,
        num_default=step.num_default,
    )


class _Step:
    """One step of two runs: the sites that both have, and which of them were kept."""

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
        self._row_of = [
            {pair[side]: row for row, pair in enumerate(self._difference.pairs)} for side in (0, 1)
        ]
        pairs = [pair for pair in self._difference.pairs if min(pair) >= 0]
        self._paired = [{pair[side] for pair in pairs} for side in (0, 1)]
        self._fused = [] if names is None else names.fused(views[0], current)
        # compared as a group, or with a partner in compiled code, instead of by row
        self._in_groups = [{at for group in self._fused for at in group[side]} for side in (0, 1)]
        self._add_to_paired(self._in_groups)
        self._compiled = eager_pairs(self._views, self._paired)
        in_compiled = [{pair[side] for pair, _ in self._compiled} for side in (0, 1)]
        self._add_to_paired(in_compiled)
        for in_group, positions in zip(self._in_groups, in_compiled, strict=True):
            in_group |= positions
        self.not_compared: Counter[str] = Counter()
        self.num_default = 0

    def _add_to_paired(self, positions: Sequence[Set[int]]) -> None:
        for paired, of_side in zip(self._paired, positions, strict=True):
            paired |= of_side

    def with_starts(
        self, paired_sites: Sequence[_PairedSite]
    ) -> tuple[list[SiteNumerics], dict[Place, SiteNumerics]]:
        """Return the sites that both runs kept, each with whether a change starts there, and the
        ops of one run at which it does.
        """
        errors = [
            _CarriedErrors(view, paired, _measured_errors(paired_sites, side))
            for side, (view, paired) in enumerate(zip(self._views, self._paired, strict=True))
        ]
        kept = sorted(
            (site for site in paired_sites if site.divergence is not None),
            key=lambda site: site.positions[1][0],
        )
        sites = [self._numerics_of(site, errors) for site in kept]
        changed = [
            site.positions
            for site, numerics in zip(kept, sites, strict=True)
            if _is_change(numerics)
        ]
        reached = [
            _reached_from(view, {at for positions in changed for at in positions[side]})
            for side, view in enumerate(self._views)
        ]
        with_starts, starts_before = list[SiteNumerics](), dict[Place, SiteNumerics]()
        for site, numerics in zip(kept, sites, strict=True):
            is_start = _is_change(numerics) and not self._reads(site.positions, reached)
            with_starts.append(replace(numerics, is_start=is_start))
            if is_start and numerics.reads is not None:
                start = self._start_before(site, errors)
                if start is not None:
                    starts_before[place_of(numerics)] = start
        return with_starts, starts_before

    def _reads(self, positions: Positions, reached: Sequence[Set[int]]) -> bool:
        """Return whether a site reads any of the ``reached`` positions, in either step."""
        return any(
            not reached[side].isdisjoint(view.program.sites[at].inputs)
            for side, view in enumerate(self._views)
            for at in positions[side]
        )

    # an op that only one run has

    def _start_before(
        self, site: _PairedSite, errors: Sequence[_CarriedErrors]
    ) -> SiteNumerics | None:
        """Return the op that only one run has between a site and the compared sites before it,
        or None.

        Different arguments of the site's own op explain its error, and a kernel has fused what
        comes before its output.
        """
        is_kernel = any(site.positions == (pair[:1], pair[1:]) for pair, _ in self._compiled)
        if site.divergence is None or site.divergence.kind == "argument" or is_kernel:
            return None
        for side in (1, 0):  # the user edits the current run's code
            position = self._first_between(side, site.positions[side])
            if position is not None:
                return _numerics(
                    self._difference.describe(self._row_of[side][position]),
                    _NO_MEASURE,
                    errors[side].read(position),
                    is_start=True,
                )
        return None

    def _first_between(self, side: int, positions: Sequence[int]) -> int | None:
        """Return the first op without a partner that leads to one of these positions and reads a
        tensor of both runs, since a mask may have been made long before.

        Copies and casts change no numbers.
        """
        sites, paired = self._views[side].program.sites, self._paired[side]
        between = {at for at in self._unpaired_before(side, positions) if not sites[at].is_region}
        copies = {at for at in between if _COPIES.match(sites[at].op)}
        candidates = sorted(between - copies)
        of_both = paired | copies
        readers = (at for at in candidates if not of_both.isdisjoint(sites[at].inputs))
        return next(readers, candidates[0] if candidates else None)

    def _unpaired_before(self, side: int, positions: Sequence[int]) -> set[int]:
        """Return the ops without a partner from which these positions follow."""
        sites, paired = self._views[side].program.sites, self._paired[side]
        between = set[int]()
        waiting = [read for at in positions for read in sites[at].inputs]
        while waiting:
            at = waiting.pop()
            is_unpaired = sites[at].op and at in self._row_of[side] and at not in paired
            if is_unpaired and at not in between:
                between.add(at)
                waiting += sites[at].inputs
        return between

    # the sites that both steps have

    def paired_sites(self) -> Iterator[_PairedSite]:
        for row, pair in enumerate(self._difference.pairs):
            if not any(at in group for at, group in zip(pair, self._in_groups, strict=True)):
                site = self._aligned_site(row)
                if site is not None:
                    yield site
        for group in self._fused:
            if all(self._are_kept(group)):
                of_whole = int(len(group[1]) == 1)
                whole = self._row_of[of_whole][group[of_whole][0]]
                yield self._measured(self._difference.describe(whole), group)
            else:
                self.not_compared["of fused modules, and not all of them kept"] += 1
        for pair, compiled in self._compiled:
            positions = pair[:1], pair[1:]
            is_kept = self._are_kept(positions)
            if all(is_kept):
                row = self._row_of[compiled][pair[compiled]]
                yield self._measured(self._with_digests(row, pair), positions)
            else:
                self.not_compared["only one run kept it"] += any(is_kept)

    def _aligned_site(self, row: int) -> _PairedSite | None:
        """Return the site of a row; None if only one step has it, or only one run kept it."""
        pair = self._difference.pairs[row]
        positions = pair[:1], pair[1:]
        is_kept = self._are_kept(positions)
        if min(pair) < 0:
            only = "the reference" if pair[1] < 0 else "the current run"
            self.not_compared[f"only {only} has it"] += any(is_kept)
        elif not self._difference.differs[row]:
            return self._equal(row, has_bits=all(is_kept))
        elif all(is_kept):
            return self._measured(self._difference.describe(row), positions)
        else:
            self.not_compared["only one run kept it"] += any(is_kept)
        return None

    def _are_kept(self, positions: Positions) -> list[bool]:
        return [
            at in kept
            for of_side, kept in zip(positions, self._kept, strict=True)
            for at in of_side
        ]

    def _with_digests(self, row: int, pair: tuple[int, int]) -> Divergence:
        """Return the divergence of a row with the digests of the two positions that it pairs."""
        reference, current = (
            format_digest(int(view.record.digests[at]))
            for view, at in zip(self._views, pair, strict=True)
        )
        shown = self._difference.describe(row)
        return replace(shown, kind="content", reference_digest=reference, current_digest=current)

    def _equal(self, row: int, *, has_bits: bool) -> _PairedSite:
        pair = self._difference.pairs[row]
        entry = self._saved[1].entries[self._kept[1][pair[1]]] if has_bits else {}
        num = len(range(entry["first"], prod(entry["shape"]), entry["every"])) if has_bits else 0
        return _PairedSite(
            positions=(pair[:1], pair[1:]),
            divergence=self._difference.describe(row) if has_bits else None,
            measure=Measure(num_elements=num),
            is_equal=True,
        )

    def _measured(self, divergence: Divergence, positions: Positions) -> _PairedSite:
        site = _PairedSite(positions=positions)
        tensors = [
            [saved.read(kept[at]) for at in of_side]
            for saved, kept, of_side in zip(self._saved, self._kept, positions, strict=True)
        ]
        whole = min(tensors, key=len)[0].shape
        reference, current = (_joined_to(of_side, whole) for of_side in tensors)
        if reference is None or current is None or reference.shape != current.shape:
            self.not_compared["of another shape"] += 1
            return site
        dtypes = reference.dtype, current.dtype
        if not all(map(can_measure, dtypes)):
            self.not_compared["of a dtype whose numbers are not known"] += 1
            return site
        measure, dtype = measure_saved(reference, current), coarser(*dtypes)
        bound = None if self._rounding is None else self._rounding.bound(divergence, dtype)
        if bound is not None:
            measure = replace(measure, excess=_multiple(measure.relative, bound))
        self.num_default += self._rounding is not None and bound is None
        return replace(site, divergence=replace(divergence, dtype=dtype), measure=measure)

    def _numerics_of(self, site: _PairedSite, errors: Sequence[_CarriedErrors]) -> SiteNumerics:
        divergence, measure = site.divergence, site.measure
        assert divergence is not None, "the site was kept"
        assert measure is not None, "so it was measured"
        read = _Error.largest(
            [
                of_side.read(at)
                for of_side, positions in zip(errors, site.positions, strict=True)
                for at in positions
            ]
        )
        growth = None
        if read.relative < inf:
            growth = self._growth(divergence, site.positions[1][0], read, measure)
        numerics = _numerics(divergence, measure, read, growth=growth)
        return replace(numerics, kind="equal") if site.is_equal else numerics

    def _growth(
        self, divergence: Divergence, position: int, read: _Error, measure: Measure
    ) -> float | None:
        """Return an error as a multiple of the error that explains it, or None if it has no number.

        A sum whose terms cancel has a large relative error, but an absolute error like those of its
        n terms: about sqrt(n) times as large if these are independent.
        """
        if measure.relative is None or measure.absolute is None:
            return None
        growth = measure.relative / (max(read.relative, epsilon(divergence.dtype or "")) or 1.0)
        if _SUMS.match(divergence.op) and read.absolute:
            view = self._views[1]
            entries = [view.layout.entries[at] for at in view.program.sites[position].inputs]
            num_read = max((prod(entry.shape) for entry in entries if entry is not None), default=1)
            num_terms = max(num_read / max(prod(divergence.shape or ()), 1), 1)
            growth = min(growth, measure.absolute / (read.absolute * math.sqrt(num_terms)))
        return growth


def or_inf(size: float | None) -> float:
    return inf if size is None else size


def _is_change(site: SiteNumerics) -> bool:
    """Return whether rounding cannot explain a site's error, as far as its inputs are known."""
    return not site.within and (site.reads is None or or_inf(site.growth) >= JUMP)


def _measured_errors(sites: Sequence[_PairedSite], side: int) -> dict[int, _Error]:
    """Return the errors of the measured sites by their position in one of the steps."""
    return {
        at: _Error(or_inf(site.measure.relative), or_inf(site.measure.absolute))
        for site in sites
        if site.measure is not None
        for at in site.positions[side]
    }


def _reached_from(view: StepView, starts: Set[int]) -> set[int]:
    """Return these positions, and all that read them directly or through others."""
    reached = set[int]()
    for position, site in enumerate(view.program.sites):
        if position in starts or not reached.isdisjoint(site.inputs):
            reached.add(position)
    return reached


def _numerics(
    divergence: Divergence,
    measure: Measure,
    read: _Error,
    *,
    growth: float | None = None,
    is_start: bool = False,
) -> SiteNumerics:
    names = [field.name for field in fields(divergence) if field.name != "numbers"]
    figures = ("ulp", "relative", "absolute", "num_elements")
    return SiteNumerics(
        **{name: getattr(divergence, name) for name in names},
        **{name: getattr(measure, name) for name in figures},
        within=measure.excess <= 1,
        excess=measure.excess if measure.excess < inf else None,
        reads=read.relative if read.relative < inf else None,
        growth=growth,
        is_start=is_start,
        through=read.through,
    )


def _joined_to(tensors: Sequence[SavedTensor], shape: tuple[int, ...]) -> SavedTensor | None:
    """Return the tensors, joined along the axis that yields this shape, or None if no axis does."""
    if len(tensors) == 1:
        return tensors[0]
    wholes = (joined(tensors, axis) for axis in range(len(shape)))
    return next((whole for whole in wholes if whole is not None and whole.shape == shape), None)


def _multiple(error: float | None, bound: float) -> float:
    """Return an error, or None for one without a number, divided by its tolerance."""
    if error == 0 or bound == inf:
        return 0.0
    return error / bound if error is not None and bound else inf
