"""How much was compared, counted as it goes, over steps and ranks."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from det_callbacks.runs.program import Program
from det_callbacks.verdict import Counts, Coverage


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of a comparison; those of several ranks are added up.

    Attributes:
        ranks: whose steps were compared.
        num_steps: that both runs have.
        num_sites: of those steps.
        num_differing: sites and metrics that differ, and steps that only one run has.
        span: first and last step.
        ops_seen: under the trace.
        ops_digested: those whose outputs were digested.
        ops_skipped: reason -> number.
        opaque_regions: names.
        replayed: op -> count, differing, mib_per_step.
        num_metrics: values that the module logged.
        digested_on: device besides the host -> how digests are computed there.
    """

    ranks: set[int] = field(default_factory=set)
    num_steps: int = 0
    num_sites: int = 0
    num_differing: int = 0
    span: tuple[int, int] | None = None
    ops_seen: int = 0
    ops_digested: int = 0
    ops_skipped: Counter[str] = field(default_factory=Counter)
    opaque_regions: set[str] = field(default_factory=set)
    replayed: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_metrics: int = 0
    digested_on: dict[str, str] = field(default_factory=dict)

    def count(self, rank: int, step: int, program: Program, num_sites: int, *, num_steps: int = 1) -> None:
        """Count steps of one program that were compared.

        Args:
            rank: process.
            step: one of them.
            program: of each.
            num_sites: of all of them together.
            num_steps: how many.
        """
        self.ranks.add(rank)
        self.num_steps += num_steps
        self.num_sites += num_sites
        self.include(step)
        self.ops_seen += program.ops_seen * num_steps
        self.ops_digested += program.ops_digested * num_steps
        self.ops_skipped.update({reason: count * num_steps for reason, count in program.ops_skipped.items()})
        self.opaque_regions.update(program.opaque_regions)

    def include(self, step: int) -> None:
        """Let the span reach to a step."""
        self.span = (step, step) if self.span is None else (min(self.span[0], step), max(self.span[1], step))

    def add(self, other: Self) -> None:
        """Add what was counted of other ranks."""
        self.ranks |= other.ranks
        self.num_steps += other.num_steps
        self.num_sites += other.num_sites
        self.num_differing += other.num_differing
        for step in other.span or ():
            self.include(step)
        self.ops_seen += other.ops_seen
        self.ops_digested += other.ops_digested
        self.ops_skipped.update(other.ops_skipped)
        self.opaque_regions |= other.opaque_regions
        self.num_metrics += other.num_metrics
        self.digested_on.update(other.digested_on)
        for name, entry in other.replayed.items():
            known = self.replayed.setdefault(name, {})
            for key, value in entry.items():
                known[key] = known.get(key, 0) + value

    def copy(self) -> Self:
        """Return one that goes on counting without changing this one."""
        fresh = type(self)()
        fresh.add(self)
        return fresh

    @property
    def has_compared(self) -> bool:
        """Whether anything was."""
        return bool(self.num_sites or self.num_metrics)

    def counts(self) -> Counts:
        """Return how much was compared, as a verdict has it."""
        return Counts(steps_compared=self.num_steps, sites_compared=self.num_sites, sites_differing=self.num_differing)

    def coverage(self) -> Coverage:
        """Return what was compared, as a verdict has it."""
        return Coverage(
            ranks=len(self.ranks),
            steps=self.span,
            ops_seen=self.ops_seen,
            ops_digested=self.ops_digested,
            ops_skipped=dict(sorted(self.ops_skipped.items())),
            opaque_regions=tuple(sorted(self.opaque_regions)),
            replayed=self.replayed,
            metrics=self.num_metrics,
            digested_on=dict(self.digested_on),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "ranks": sorted(self.ranks),
            "num_steps": self.num_steps,
            "num_sites": self.num_sites,
            "num_differing": self.num_differing,
            "span": None if self.span is None else list(self.span),
            "ops_seen": self.ops_seen,
            "ops_digested": self.ops_digested,
            "ops_skipped": dict(self.ops_skipped),
            "opaque_regions": sorted(self.opaque_regions),
            "replayed": self.replayed,
            "num_metrics": self.num_metrics,
            "digested_on": dict(self.digested_on),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Return what ``to_dict`` gave; TypeError or KeyError where an entry is missing or is not ours."""
        span = content["span"]
        return cls(
            **{
                **content,
                "ranks": set(content["ranks"]),
                "span": None if span is None else (span[0], span[1]),
                "ops_skipped": Counter(content["ops_skipped"]),
                "opaque_regions": set(content["opaque_regions"]),
            }
        )
