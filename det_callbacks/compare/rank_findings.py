"""What one rank found in its own steps, as it tells the other ranks.

Each rank compares its own steps while it trains. What it found goes to all of them, and each of them judges it as
``compare_runs`` judges the ranks of two folders: by one and the same ``VerdictBuilder``.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from det_callbacks.compare.first_difference import FirstDifference
from det_callbacks.compare.metrics import MetricDifference
from det_callbacks.compare.tally import Tally
from det_callbacks.compare.whole_steps import WholeSteps
from det_callbacks.verdict import EnvironmentDifference


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFindings:
    """What one rank found.

    Attributes:
        rank: of the process.
        tally: of what was compared.
        first: where it first differs; None where no site does.
        whole: steps that only one run has.
        metric: the first metric that differs; None where none does.
        environment: how that of this rank differs from the reference's.
        notes: what was left out.
        refusals: why nothing can be compared.
    """

    rank: int
    tally: Tally
    first: FirstDifference | None = None
    whole: tuple[WholeSteps, ...] = ()
    metric: MetricDifference | None = None
    environment: tuple[EnvironmentDifference, ...] = ()
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: 1 to 50 KB where the rank differs, some 500 bytes where it does not."""
        return {
            "rank": self.rank,
            "tally": self.tally.to_dict(),
            "first": None if self.first is None else self.first.to_dict(),
            "whole": [asdict(steps) for steps in self.whole],
            "metric": None if self.metric is None else self.metric.to_dict(),
            "environment": [asdict(difference) for difference in self.environment],
            "notes": list(self.notes),
            "refusals": list(self.refusals),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Return what ``to_dict`` gave, also after it went through JSON; KeyError or TypeError where it is not that."""
        return cls(
            rank=content["rank"],
            tally=Tally.from_dict(content["tally"]),
            first=None if content["first"] is None else FirstDifference.from_dict(content["first"]),
            whole=tuple(WholeSteps(**row) for row in content["whole"]),
            metric=None if content["metric"] is None else MetricDifference.from_dict(content["metric"]),
            environment=tuple(EnvironmentDifference(**row) for row in content["environment"]),
            notes=tuple(content["notes"]),
            refusals=tuple(content["refusals"]),
        )
