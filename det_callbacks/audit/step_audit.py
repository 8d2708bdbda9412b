"""A training step run again from the same state, and its traces compared."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from det_callbacks.audit.findings import AuditFinding, AuditReport, Judgement
from det_callbacks.audit.held_state import HeldState
from det_callbacks.compare import StepDifference, compare_steps
from det_callbacks.errors import StepNotRepeatableError
from det_callbacks.trace.program import StepView
from det_callbacks.verdict import Divergence

MAX_PLACES = 1_000
"""Origins of one step that are kept."""

_Place = tuple[str, str, str, int, int, str | None]


@dataclass(slots=True)
class _Found:
    first: Divergence
    judgements: dict[int, Judgement] = field(default_factory=dict)
    num_places: int = 0


class StepAudit:
    """Runs training steps several times each.

    A step is run ``num_runs`` times, and once more when two of its runs differ and that makes three, so that a fault
    that came once can be told from an op that never agrees with itself. Where three runs disagree in a place, it is
    *transient* when two of them agree there and no other step differs in it.

    Args:
        num_runs: of each step, at least 2; the last one is the one that counts.

    Raises:
        ValueError: fewer than two runs.
    """

    def __init__(self, num_runs: int = 2) -> None:
        if num_runs < 2:
            raise ValueError(f"a step is compared with itself in at least 2 runs; got {num_runs}")
        self._num_runs = num_runs
        self._found: dict[tuple[str, str, str, str | None], _Found] = {}
        self._steps: list[int] = []
        self._num_compared = 0
        self._put_back: dict[str, None] = {}

    def run(self, step: int, held: HeldState, trace: Callable[[], tuple[StepView, Any]]) -> Any:
        """Run a step from the same state several times; return what its last run returned.

        Args:
            step: its number.
            held: the state before it.
            trace: runs the step once; returns its trace and what it returned.

        Raises:
            StepNotRepeatableError: it changed what cannot be put back, or failed when it was run again.
        """
        views: list[StepView] = []
        outcome: Any = None
        num_runs = self._num_runs
        while len(views) < num_runs:
            if views:
                self._put_back.update(dict.fromkeys(held.put_back()))
            try:
                view, outcome = trace()
            except Exception as error:  # whatever a user's step raises; it goes on as it is, or as the cause of ours
                if not views:
                    raise  # the step's own failure
                raise StepNotRepeatableError(
                    f"Step {step} ran once and failed when it was run again from the same state: "
                    f"{type(error).__name__}: {error}. It leaves something behind that cannot be put back; use "
                    'audit="ops", which repeats ops.'
                ) from error
            views.append(view)
            if len(views) == 2 and num_runs == 2 and self._differ(views):
                num_runs = 3
        self._steps.append(step)
        self._judge(step, views)
        return outcome

    def report(self) -> AuditReport:
        """Return what was found so far."""
        findings = []
        for found in self._found.values():
            judgements = set(found.judgements.values())
            judgement: Judgement = "nondeterministic"
            if judgements == {"not held"}:
                judgement = "not held"
            elif judgements == {"transient"} and len(found.judgements) == 1:
                judgement = "transient"
            first = found.first
            findings.append(
                AuditFinding(
                    judgement=judgement,
                    phase=first.phase,
                    module=first.module,
                    op=first.op,
                    name=first.name,
                    source=first.source,
                    steps=tuple(found.judgements),
                    num_places=found.num_places,
                    shape=first.shape,
                    dtype=first.dtype,
                )
            )
        return AuditReport(
            kind="step",
            steps=tuple(self._steps),
            num_compared=self._num_compared,
            skipped={},
            findings=tuple(findings),
            put_back=tuple(self._put_back),
        )

    def _differ(self, views: list[StepView]) -> bool:
        return compare_steps(views[0], views[1], limit=1).num_differing > 0

    def _judge(self, step: int, views: list[StepView]) -> None:
        differences = [compare_steps(views[0], view, limit=MAX_PLACES) for view in views[1:]]
        self._num_compared += sum(difference.num_compared for difference in differences)
        bits: dict[_Place, list[str | None]] = {}
        firsts: dict[_Place, Divergence] = {}
        not_held: set[_Place] = set()
        for number, difference in enumerate(differences, start=1):
            for divergence in _starts(difference):
                place = _place(divergence)
                firsts.setdefault(place, divergence)
                known = bits.setdefault(place, [divergence.reference_digest] * len(views))
                known[number] = divergence.current_digest
                if not divergence.op or divergence.kind != "content":
                    not_held.add(place)
        for place, known in bits.items():
            phase, module, op, _, _, name = place
            found = self._found.setdefault((phase, module, op, name), _Found(first=firsts[place]))
            found.num_places += 1
            judgement: Judgement = "nondeterministic"
            if place in not_held:
                judgement = "not held"
            elif len(views) > 2 and max(map(known.count, known)) == len(views) - 1:
                judgement = "transient"
            if found.judgements.get(step) != "nondeterministic":
                found.judgements[step] = judgement


def _starts(difference: StepDifference) -> tuple[Divergence, ...]:
    """Return where two runs of a step begin to differ: origins, and what entered the step otherwise."""
    sources = tuple(finding.divergence for finding in difference.findings if finding.is_source)
    if difference.origins or sources:
        return (*sources, *difference.origins)
    return difference.divergences[:1]


def _place(divergence: Divergence) -> _Place:
    return (
        divergence.phase,
        divergence.module,
        divergence.op,
        divergence.occurrence,
        divergence.output,
        divergence.name,
    )
