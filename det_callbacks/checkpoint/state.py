"""What one process needs to go on as if it had never been interrupted, beside what Lightning's checkpoint holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from det_callbacks.rng import GeneratorStates

_SHARED = ("step", "epoch", "is_epoch_over", "accumulates")
"""Names of what all ranks have alike when they saved at the same moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How DDP was going to add up the gradients of the ranks.

    It puts gradients in buckets, after its first backward pass in the order in which they came, and adds a bucket up
    in pieces: with three ranks and more, another bucket means another order of additions and so other bits.

    Attributes:
        buckets: names of the parameters of each; empty where a new DDP module begins with the right ones.
        syncs_buffers: whether the next forward pass sends rank 0's buffers to the others.
    """

    buckets: tuple[tuple[str, ...], ...] = ()
    syncs_buffers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """How the batches of an epoch were drawn so far.

    Attributes:
        before_iteration: generators when the loader began to be iterated over.
        before_first: generators before the first batch was drawn; None where none was.
        num_drawn: batches drawn from the loader.
        first_digest: of the first batch, in hexadecimal; empty before it.
    """

    before_iteration: GeneratorStates
    before_first: GeneratorStates | None = None
    num_drawn: int = 0
    first_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """The state that Lightning's checkpoint leaves out, of one process.

    Attributes:
        step: training batches that were done: the number of the next one.
        epoch: of the next batch, as far as it is known.
        is_epoch_over: the data of the epoch was used up when the checkpoint was saved.
        generators: just before the next batch is drawn; where ``position`` is None, before the hooks of the next epoch.
        position: in the data from which the next batch is drawn; None where the next epoch had not begun.
        accumulates: batches whose gradients are added up; a callback may change it at an epoch's start.
        values: name -> digest of a parameter or buffer, or text of an optimizer's option, when the checkpoint was
            saved: what loading it has to bring back.
        reduction: of several ranks, under DDP.
        problems: why a resumed run cannot be the same run, as sentences; empty when it can.
    """

    step: int
    epoch: int
    is_epoch_over: bool
    generators: GeneratorStates
    position: DataPosition | None = None
    accumulates: int = 1
    values: Mapping[str, Any] = field(default_factory=dict)
    reduction: Reduction | None = None
    problems: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        """Return what a rank reports to the others of what it read, as JSON holds it."""
        return {"problems": list(self.problems), **{name: getattr(self, name) for name in _SHARED}}


def problems_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why the run would not be the same run, as sentences, with the ranks where not all have the reason.

    Args:
        rows: what each rank reported, by rank.
    """
    apart = [
        f"{name} is {', '.join(str(row[name]) for row in rows)}"
        for name in _SHARED
        if any(row[name] != rows[0][name] for row in rows)
    ]
    if apart:
        return [f"the ranks did not save it at the same moment, by rank: {'; '.join(apart)}"]
    found: dict[str, list[str]] = {}
    for rank, row in enumerate(rows):
        for problem in row["problems"]:
            found.setdefault(problem, []).append(str(rank))
    return [text if len(ranks) == len(rows) else f"rank {', '.join(ranks)}: {text}" for text, ranks in found.items()]
