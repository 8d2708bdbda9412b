"""What one process needs to go on as if it had never been interrupted, beside what Lightning's checkpoint holds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from det_callbacks.errors import CheckpointFormatError
from det_callbacks.rng import GeneratorStates

Moment = Literal["save", "draw"]

_SHARED = ("step", "epoch", "is_epoch_over", "accumulates")
"""Names of what all ranks have alike when they saved at the same moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How DDP was going to add up the gradients of the ranks.

    It puts gradients in buckets, after its first backward pass in the order in which they came, and adds a bucket up
    in pieces: with three ranks and more, another bucket means another order of additions and so other bits.

    Attributes:
        stage: "first": no backward pass yet; "pending": one, whose order holds from the next forward pass on;
            "settled": in that order; "fixed": the buckets are those that it begins with.
        buckets: names of the parameters of each, where it is "settled"; of one, in that order, where it is "pending".
        syncs_buffers: whether the next forward pass sends rank 0's buffers to the others.
    """

    stage: Literal["first", "pending", "settled", "fixed"]
    buckets: tuple[tuple[str, ...], ...] = ()
    syncs_buffers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """How the batches of an epoch were drawn so far.

    Attributes:
        before_iteration: generators when the loader began to be iterated over; None when nothing followed it.
        before_first: generators before the first batch was drawn.
        before_last: generators before the last batch was drawn, where Lightning looks a batch ahead.
        num_drawn: batches drawn from the loader; one more than consumed where Lightning looks ahead.
        num_consumed: batches that training had.
        first_digest: of the first batch; 0 before it.
        chain: digest of (previous chain, batch) over the drawn batches.
    """

    before_iteration: GeneratorStates | None = None
    before_first: GeneratorStates | None = None
    before_last: GeneratorStates | None = None
    num_drawn: int = 0
    num_consumed: int = 0
    first_digest: int = 0
    chain: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """The state that Lightning's checkpoint leaves out, of one process.

    Attributes:
        step: training batches that were done: the number of the next one.
        epoch: of the next batch, as far as it is known.
        moment: "save": generators as they were when the checkpoint was saved; "draw": as they were just before the next
            batch was drawn, which also covers a validation in between.
        is_epoch_over: the data of the epoch was used up; then the next batch is the first of a new one.
        generators: at ``moment``.
        position: in the data of the epoch.
        accumulates: batches whose gradients are added up; a callback may change it at an epoch's start.
        values: name -> digest of a parameter or buffer, or text of an optimizer's option, when the checkpoint was
            saved: what loading it has to bring back.
        sampler_seeds: of several ranks: by which their samplers shuffle alike, for each loader; None where none does.
        common: of several ranks: name -> digest of what is to be equal on all of them, and is saved by rank 0 alone.
        reduction: of several ranks, under DDP.
        problems: why a resumed run cannot be the same run, as sentences; empty when it can.
    """

    step: int
    epoch: int
    moment: Moment
    is_epoch_over: bool
    generators: GeneratorStates
    position: DataPosition = field(default_factory=DataPosition)
    accumulates: int = 1
    values: Mapping[str, Any] = field(default_factory=dict)
    sampler_seeds: tuple[int | None, ...] = ()
    common: Mapping[str, str] = field(default_factory=dict)
    reduction: Reduction | None = None
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], path: str) -> "ResumeState":
        """Read the JSON form; ``path`` is of the file, for messages.

        Raises:
            CheckpointFormatError: it is none.
        """
        try:
            position, reduction = content["position"], content["reduction"]
            moments = {name: value for name, value in position.items() if name.startswith("before_")}
            told = {one.name: content[one.name] for one in fields(cls)}
            return cls(
                **{
                    **told,
                    "generators": GeneratorStates(content["generators"]["states"]),
                    "position": DataPosition(
                        **{
                            **position,
                            **{
                                name: None if one is None else GeneratorStates(one["states"])
                                for name, one in moments.items()
                            },
                        }
                    ),
                    "sampler_seeds": tuple(content["sampler_seeds"]),
                    "reduction": None
                    if reduction is None
                    else Reduction(**{**reduction, "buckets": tuple(map(tuple, reduction["buckets"]))}),
                    "problems": tuple(content["problems"]),
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointFormatError(
                f"{path} is damaged ({type(error).__name__}: {error}). Resume from another checkpoint, or with "
                'resume="plain", which leaves generators and data to Lightning.',
                path,
            ) from error

    def row(self) -> dict[str, Any]:
        """Return what a rank tells the others of what it read, as JSON holds it."""
        buckets = None if self.reduction is None else self.reduction.stage
        shared = {name: getattr(self, name) for name in _SHARED}
        return {"problems": list(self.problems), "common": dict(self.common), "buckets": buckets, **shared}


def problems_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why the run would not be the same run, as sentences, with the ranks where not all have the reason.

    Args:
        rows: what each rank told, by rank.
    """
    first = rows[0]
    apart = [
        f"{name} is {', '.join(str(row[name]) for row in rows)}"
        for name in ("buckets", *_SHARED)
        if any(row[name] != first[name] for row in rows)
    ]
    if apart:
        return [f"the ranks did not save it at the same moment, by rank: {'; '.join(apart)}"]
    found: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        for problem in row["problems"]:
            found.setdefault(problem, []).append(rank)
    texts = [text if len(ranks) == len(rows) else f"rank {_shown(ranks)}: {text}" for text, ranks in found.items()]
    for name in dict.fromkeys(name for row in rows for name in row["common"]):
        others = [rank for rank, row in enumerate(rows) if row["common"].get(name) != first["common"].get(name)]
        if others:
            texts.append(
                f"{name} was not the same on rank {_shown(others)} as on rank 0, and Lightning saves that of rank 0"
            )
    return texts


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
