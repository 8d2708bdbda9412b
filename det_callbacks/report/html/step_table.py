"""What became of the steps of one fit of one rank, in a table that does not grow with them."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from det_callbacks.compare.step_states import Outcome, SiteDifferences
from det_callbacks.report.html.rows import module_label
from det_callbacks.report.run_text import describe_site

MAX_STEPS = 50
"""Steps shown one by one, of all heat maps together; at least five of each."""
MAX_SPANS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferingStep:
    """One step that differs: how many sites do, where it starts, and the first site that differs."""

    step: int
    num_differing: int
    num_starting: int
    first_phase: str
    first_module: str
    first_site: str


@dataclass(slots=True, kw_only=True)
class StepTable:
    """Collects the steps of one fit.

    Attributes:
        rank: process.
        segment: fit.
        max_steps: that are shown one by one.
        outcomes: outcome -> number of steps.
        differing: the first steps that differ.
        spans: outcome, first and last step of those that were not compared site by site; the first ones.
    """

    rank: int
    segment: int
    max_steps: int = MAX_STEPS
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    differing: list[DifferingStep] = field(default_factory=list)
    spans: list[tuple[Outcome, int, int]] = field(default_factory=list)
    _last: Outcome | None = None

    def add(self, step: int, outcome: Outcome) -> None:
        """Count a step of which no sites are known to differ."""
        self.outcomes[outcome] += 1
        if outcome != "equal":
            if self._last == outcome and self.spans and self.spans[-1][0] == outcome:
                self.spans[-1] = (outcome, self.spans[-1][1], step)
            elif len(self.spans) < MAX_SPANS:
                self.spans.append((outcome, step, step))
        self._last = outcome

    def add_differing(self, step: int, sites: SiteDifferences, starting: np.ndarray) -> None:
        """Count a step whose sites differ."""
        self.outcomes["differs"] += 1
        self._last = "differs"
        if len(self.differing) < self.max_steps:
            site = sites.site(int(sites.rows[0]))
            self.differing.append(
                DifferingStep(
                    step=step,
                    num_differing=len(sites.rows),
                    num_starting=int(starting.sum()),
                    first_phase=site.phase,
                    first_module=module_label(site.module),
                    first_site=describe_site(site),
                )
            )
