"""What one process needs to go on as if it had never been interrupted, as a JSON file beside a checkpoint.

X.ckpt.resume/rank-00000.json...            generators, position in the data
X.ckpt.resume/rank-00000.safetensors...     gradients accumulated so far, only inside an accumulation window
X.ckpt.resume/rank-00001/rank-00001...      the same of other ranks
    .../rank-00001.buffers.safetensors...   their buffers: Lightning's checkpoint has those of rank 0
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from det_callbacks.errors import CheckpointFormatError
from det_callbacks.resume.generators import GeneratorStates

RESUME_VERSION = 1

Moment = Literal["save", "draw"]


def state_file(rank: int) -> str:
    """Return the name of the file, beside a checkpoint, of a rank's generators and position."""
    return f"rank-{rank:05d}.json"


def gradients_file(rank: int) -> str:
    """Return the name of the file, beside a checkpoint, of a rank's accumulated gradients."""
    return f"rank-{rank:05d}.safetensors"


def buffers_file(rank: int) -> str:
    """Return the name of the file, beside a checkpoint, of the buffers of a rank other than 0."""
    return f"rank-{rank:05d}.buffers.safetensors"


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
        num_iterations: times that this process had begun to iterate over the loader, this one included.
        before_iteration: generators when it began to iterate; None when nothing followed it.
        before_first: generators before the first batch was drawn.
        restarts: (batches drawn, generators) where a shorter loader of several was started again.
        before_last: generators before the last batch was drawn, where that was kept.
        num_drawn: batches drawn from the loader; one more than consumed where Lightning looks ahead.
        num_consumed: batches that training had.
        first_digest: of the first batch; 0 before it.
        chain: digest of (previous chain, batch) over the drawn batches.
    """

    num_iterations: int = 0
    before_iteration: GeneratorStates | None = None
    before_first: GeneratorStates | None = None
    restarts: tuple[tuple[int, GeneratorStates], ...] = ()
    before_last: GeneratorStates | None = None
    num_drawn: int = 0
    num_consumed: int = 0
    first_digest: int = 0
    chain: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """The state that Lightning's checkpoint leaves out, of one process.

    Attributes:
        rank, world_size: of the process.
        step: training batches that were done: the number of the next one.
        epoch: of the next batch, as far as it is known.
        moment: "save": generators as they were when the checkpoint was saved; "draw": as they were just before the next
            batch was drawn, which also covers a validation in between.
        is_epoch_over: the data of the epoch was used up; then the next batch is the first of a new one.
        is_mid_batch: a batch was under way that had changed nothing yet, and is to be done again.
        generators: at ``moment``.
        position: in the data of the epoch.
        num_gradients: parameters whose gradients were saved.
        accumulates: batches whose gradients are added up; a callback may change it at an epoch's start.
        reload_epoch: at whose start Lightning made the loaders; None before.
        values: name -> digest of a parameter or buffer, or text of an optimizer's option, at ``moment``.
        sampler_seeds: of several ranks: by which their samplers shuffle alike, for each loader; None where none does.
        common: of several ranks: name -> digest of what is to be equal on all of them, and is saved by rank 0 alone.
        reduction: of several ranks, under DDP.
        problems: why a resumed run cannot be the same run, as sentences; empty when it can.
    """

    rank: int
    world_size: int
    step: int
    epoch: int
    moment: Moment
    is_epoch_over: bool
    is_mid_batch: bool = False
    generators: GeneratorStates
    position: DataPosition = field(default_factory=DataPosition)
    num_gradients: int = 0
    accumulates: int = 1
    reload_epoch: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    sampler_seeds: tuple[int | None, ...] = ()
    common: Mapping[str, str] = field(default_factory=dict)
    reduction: Reduction | None = None
    problems: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the content of the file: JSON."""
        position = self.position
        content = {
            "schema": RESUME_VERSION,
            **{name: getattr(self, name) for name in _PLAIN},
            "problems": list(self.problems),
            "generators": self.generators.states,
            "position": {
                **{name: getattr(position, name) for name in _PLAIN_POSITION},
                **{name: _states(getattr(position, name)) for name in _MOMENTS},
                "restarts": [[drawn, states.states] for drawn, states in position.restarts],
            },
        }
        if self.world_size > 1:
            content["sampler_seeds"] = list(self.sampler_seeds)
            content["common"] = dict(self.common)
            content["reduction"] = None if self.reduction is None else asdict(self.reduction)
        return json.dumps(content, indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes, path: str) -> "ResumeState":
        """Return what a file holds.

        Args:
            content: of the file.
            path: its name, for messages.

        Raises:
            CheckpointFormatError: it is not such a file, or of another version.
        """
        try:
            values = json.loads(content)
            if values["schema"] != RESUME_VERSION:
                raise CheckpointFormatError(
                    f"{path} has version {values['schema']!r} of the resume state, and this det_callbacks reads "
                    f"{RESUME_VERSION}. Resume with the det_callbacks that wrote it.",
                    path,
                )
            position = values["position"]
            return cls(
                **{name: values[name] for name in _PLAIN},
                problems=tuple(values["problems"]),
                generators=GeneratorStates(values["generators"]),
                sampler_seeds=tuple(values.get("sampler_seeds", ())),
                common=dict(values.get("common", {})),
                reduction=_read_reduction(values.get("reduction")),
                position=DataPosition(
                    **{name: position[name] for name in _PLAIN_POSITION},
                    before_iteration=_read_states(position["before_iteration"]),
                    before_first=_read_states(position["before_first"]),
                    before_last=_read_states(position["before_last"]),
                    restarts=tuple((drawn, GeneratorStates(states)) for drawn, states in position["restarts"]),
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, CheckpointFormatError):
                raise
            raise CheckpointFormatError(
                f"{path} is damaged ({type(error).__name__}: {error}). Resume from another checkpoint, or with "
                'resume="plain", which leaves generators and data to Lightning.',
                path,
            ) from error


_PLAIN = (
    *("rank", "world_size", "step", "epoch", "moment", "is_epoch_over", "is_mid_batch", "num_gradients"),
    *("accumulates", "reload_epoch", "values"),
)
_PLAIN_POSITION = ("num_iterations", "num_drawn", "num_consumed", "first_digest", "chain")
_MOMENTS = ("before_iteration", "before_first", "before_last")


def _states(states: GeneratorStates | None) -> Mapping[str, Any] | None:
    return None if states is None else states.states


def _read_states(states: Mapping[str, Any] | None) -> GeneratorStates | None:
    return None if states is None else GeneratorStates(states)


def _read_reduction(content: Mapping[str, Any] | None) -> Reduction | None:
    if content is None:
        return None
    buckets = tuple(tuple(bucket) for bucket in content["buckets"])
    return Reduction(stage=content["stage"], buckets=buckets, syncs_buffers=bool(content["syncs_buffers"]))
