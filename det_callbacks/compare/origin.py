"""Who is an origin: a difference with nothing it read differing starts here, every other one came in from elsewhere."""

import numpy as np

from det_callbacks.compare.align import Alignment
from det_callbacks.trace.compiled import MISSES_PARAMETERS, REGION
from det_callbacks.trace.deliveries import IN_FLIGHT
from det_callbacks.trace.program import Program, Site, StepView

SOURCE_ROLES = ("input", "generator", "samples")
SOURCE_PHASES = ("data", "rng", "input")
_BEFORE_OPS = ("state", "data", "rng", "input")


class OriginFinder:
    """Judges the differing sites of one step.

    Args:
        reference: the step in the reference.
        current: the same step in the current run.
        alignment: which of their sites belong together.
        differs: bool by row of the alignment: other bits, another layout, or only one side has it. A call with other
            arguments and the same bits is not meant: whoever reads its output reads the same.
    """

    def __init__(self, reference: StepView, current: StepView, alignment: Alignment, differs: np.ndarray) -> None:
        self._reference = reference
        self._current = current
        self._differs = (
            _by_position(len(reference.program), alignment.reference, differs),
            _by_position(len(current.program), alignment.current, differs),
        )
        self._partners = alignment
        self._first_value = tuple(
            next((at for at, flag in enumerate(flags) if flag and view.program.sites[at].role == "value"), len(flags))
            for flags, view in zip(self._differs, (reference, current), strict=True)
        )
        self._num_leading = (num_leading_sites(reference.program), num_leading_sites(current.program))

    def is_origin(
        self, reference: int, current: int, *, is_comparable: bool = True, has_other_arguments: bool = False
    ) -> bool | None:
        """Return whether the difference at two aligned sites starts there.

        Args:
            reference: position in the reference, -1 where only the current step has the site.
            current: position in the current step, -1 where only the reference has it.
            is_comparable: False where the op's arguments could not be compared.
            has_other_arguments: the op was called with other arguments.

        Returns:
            True when nothing the op read differs, on either side; False when something does, or when the site is a
            source (a batch, an initial weight, a generator, a tensor from outside the trace); None where neither can
            be proven: what wrote it was not recorded, or was seen to have been changed unseen, or a collective
            delivered it, into which other ranks may have put something else; or a CUDA graph may have written it; or
            it goes into a compiled region, or was seen inside one; or the op was called with other arguments
            after a number read back from a tensor differed, which Python may have passed on.
        """
        site = self._current.program.sites[current] if current >= 0 else self._reference.program.sites[reference]
        position, side = (current, 1) if current >= 0 else (reference, 0)
        if is_source(site, position < self._num_leading[side]):
            return False
        if self.has_differing_input(reference, current):
            return False
        # Bits of a named tensor are those that its writers left: if they agree, something unseen wrote it, and without
        # recorded writers nothing is known.
        if not site.op or not is_comparable or current in self._current.unseen_writes:
            return None
        if site.role in ("delivered", "left") or self._reads_in_flight(reference, current):
            return None
        if site.role == "entering" or self.is_inside_region(reference, current):
            return None
        if site.op.startswith(REGION) and self._misses_parameters(site, side):
            return None
        if site.role == "sent" and reference >= 0 and current >= 0 and not has_other_arguments:
            return None  # nothing computed it: what wrote it agrees, so something unseen did
        return None if has_other_arguments and position > self._first_value[side] else True

    def is_behind_graph(self, reference: int, current: int) -> bool:
        """Return whether a site holds memory that a CUDA graph may have written, and nobody recorded since."""
        sites = self._current.program.sites if current >= 0 else self._reference.program.sites
        site = sites[current if current >= 0 else reference]
        return site.role == "left" or any(sites[place].role == "launch" for place in site.inputs)

    def is_inside_region(self, reference: int, current: int) -> bool:
        """Return whether a site is of an op seen inside a compiled region: only the region can be told an origin."""
        sites = self._current.program.sites if current >= 0 else self._reference.program.sites
        site = sites[current if current >= 0 else reference]
        return (
            bool(site.op)
            and not site.op.startswith(REGION)
            and any(sites[place].role == "graph" for place in site.inputs)
        )

    def _misses_parameters(self, site: Site, side: int) -> bool:
        """Return whether a compiled region reads parameters that are no sites: below level op."""
        sites = (self._reference, self._current)[side].program.sites
        return any(
            sites[place].role == "graph" and MISSES_PARAMETERS in sites[place].arguments for place in site.inputs
        )

    def _reads_in_flight(self, reference: int, current: int) -> bool:
        """Return whether something that was read at two aligned sites had not arrived from a collective yet."""
        for position, view in ((reference, self._reference), (current, self._current)):
            places = view.program.sites[position].inputs if position >= 0 else ()
            if any((entry := view.layout.entries[place]) is not None and entry.detail == IN_FLIGHT for place in places):
                return True
        return False

    def has_differing_input(self, reference: int, current: int) -> bool:
        """Return whether something that was read at two aligned sites differs, on either side."""
        for position, view, differs in zip(
            (reference, current), (self._reference, self._current), self._differs, strict=True
        ):
            if position >= 0 and any(differs[place] for place in view.program.sites[position].inputs):
                return True
        return False


def is_source(site: Site, is_leading: bool) -> bool:
    """Return whether a site is where something enters the step: it was not computed in it.

    Args:
        site: the site.
        is_leading: whether it lies before everything that the step computed; a state there is the initial one.
    """
    if site.op:
        return False
    return site.role in SOURCE_ROLES or site.phase in SOURCE_PHASES or (site.phase == "state" and is_leading)


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
