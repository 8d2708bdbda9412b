"""Sites as a report shows them: text and numbers, nothing of a run is held."""

from dataclasses import dataclass

from det_callbacks.compare.step_states import SiteDifferences
from det_callbacks.report.run_text import describe_site, describe_tensor
from det_callbacks.runs.program import Site, StepView

OUTSIDE = "(outside any module)"
UNKNOWN = "(module not known)"

STARTS, CARRIED, UNPROVEN, AGREES = "starts here", "carried on", "differs, start not proven", "agrees"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """One site of one step, of both runs.

    Attributes:
        position: in the current step, or in the reference where only that has it.
        phase: of the site.
        module: as it is shown.
        what: op, or role and name.
        tensor: dtype and shape.
        state: one of the words above.
        kind: of the difference; "" where there is none.
        reference_digest: 16 hexadecimal digits, "" where there is none.
        current_digest: likewise.
        source: lines, innermost first.
    """

    position: int
    phase: str
    module: str
    what: str
    tensor: str
    state: str
    kind: str
    reference_digest: str
    current_digest: str
    source: tuple[str, ...]


class SiteRows:
    """The rows of one step that differs.

    Args:
        sites: how they differ.
        starting: rows of which the verdict says that they start there; None takes what the two runs say.
    """

    def __init__(self, sites: SiteDifferences, starting: frozenset[int] | None = None) -> None:
        self._sites = sites
        if starting is None:
            starting = frozenset(sites.rows[sites.origins | sites.sources].tolist())
        self._starting = starting
        self._unproven = frozenset(sites.rows[sites.unproven].tolist())

    def state(self, row: int) -> str:
        """Return what became of a row, in words."""
        if row in self._starting:
            return STARTS
        if row in self._unproven:
            return UNPROVEN
        return CARRIED if row in self._sites.changes.kinds or self._sites.changes.differs[row] else AGREES

    def row(self, row: int) -> SiteRow:
        """Return a row of the alignment as it is shown."""
        left, right = self._sites.places(row)
        site = self._sites.site(row)
        views = (self._sites.reference, left), (self._sites.current, right)
        digests = ["" if place < 0 else f"{int(view.record.digests[place]):016x}" for view, place in views]
        view, place = views[1] if right >= 0 else views[0]
        return SiteRow(
            position=place,
            phase=site.phase,
            module=module_label(site.module),
            what=describe_site(site),
            tensor=describe_tensor(view.layout.entries[place]),
            state=self.state(row),
            kind=self._sites.changes.kinds.get(row, ""),
            reference_digest=digests[0],
            current_digest=digests[1],
            source=source_of(site, self._sites.reference, left),
        )

    def inputs(self, row: int) -> list[int]:
        """Return the rows of what a row reads; on the reference's side where only that has it."""
        left, right = self._sites.places(row)
        if right >= 0:
            places, partners = self._sites.current.program.sites[right].inputs, self._sites.alignment.current
        else:
            places, partners = self._sites.reference.program.sites[left].inputs, self._sites.alignment.reference
        row_of = {int(place): index for index, place in enumerate(partners.tolist()) if place >= 0}
        return [row_of[place] for place in places if place in row_of]


def source_of(site: Site, reference: StepView, left: int) -> tuple[str, ...]:
    """Return the lines of a site, from the reference where the current run has none."""
    return site.source or (reference.program.sites[left].source if left >= 0 else ())


def module_label(module: str) -> str:
    """Return a module's name as it is shown."""
    return {"": OUTSIDE, "?": UNKNOWN}.get(module, module)
