"""Whether ranks that are to hold the same bits do: one digest of everything, and only if that differs one a tensor."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from det_callbacks.digest import digest_bytes, digest_tensors, format_digest
from det_callbacks.errors import DetCallbacksError, NothingComparedError, RankError
from det_callbacks.ranks.group import RankGroup
from det_callbacks.ranks.replicated import ReplicatedState, ReplicaTensor
from det_callbacks.trace.tree import scalar_bits

TIMEOUT_SECONDS = 300.0
"""Of the exchanges: a rank may do something alone between two steps, such as writing a checkpoint."""

_WORD = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaValue:
    """What some of the ranks that should agree hold.

    Attributes:
        digest: 16 hexadecimal digits; None where these ranks have no tensor of that name.
        layout: dtype and shape; None likewise.
        ranks: ascending.
    """

    digest: str | None
    layout: str | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDifference:
    """A tensor that is not the same on all ranks that should hold the same.

    Attributes:
        name: "net.head.weight", "exp_avg of net.head.weight".
        step: after which it was found to differ; -1 before the first.
        last_agreement: the last step after which it was compared and equal; None where there is none.
        values: what there is instead of one value: the one that most ranks hold first, then by lowest rank.
    """

    name: str
    step: int
    last_agreement: int | None
    values: tuple[ReplicaValue, ...]

    @property
    def is_tie(self) -> bool:
        """Whether no value is held by more ranks than any other, so that nobody can tell which is right."""
        return len(self.values[0].ranks) == len(self.values[1].ranks)

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks that do not hold what most hold; none where there is a tie."""
        return () if self.is_tie else tuple(sorted(rank for value in self.values[1:] for rank in value.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """The outcome of comparing replicas once; the same on all ranks, but for the counts.

    Attributes:
        step: after which they were compared; -1 before the first.
        last_agreement: the last step after which everything compared was equal; None where there is none.
        world_size: number of ranks.
        num_compared: tensors and numbers of this rank that another rank has to hold too.
        left_out: reason -> number of tensors of this rank that were not compared.
        differences: parameters first, then buffers, then optimizer state; of sharded tensors one for each shard.
        num_bytes: that this rank sent for it.
    """

    step: int
    last_agreement: int | None
    world_size: int
    num_compared: int
    left_out: Mapping[str, int]
    differences: tuple[ReplicaDifference, ...]
    num_bytes: int

    @property
    def equal(self) -> bool:
        """Whether everything compared was equal."""
        return not self.differences


class ReplicaAudit:
    """Compares what is to be equal across ranks, as often as asked.

    All ranks make one at the same place, and call its methods at the same steps. It needs a group of its own, since
    its first message is shorter than any other: 16 bytes a rank, of which 8 say where the rank is and 8 are a digest of
    everything. Ranks that have to agree multiply theirs with weights that add up to zero, so that the sum over all
    ranks is zero when, in each of any number of overlapping groups, all agree; no process group is made for them. A
    difference goes unseen with a probability of some 2^-60.

    Where they differ, 8 bytes a tensor are gathered, the names too where the ranks have not the same, and who differs.

    Args:
        group: of all ranks, used by nothing else.

    Cost: one pass over the compared state at the speed of digests, and a collective of 16 bytes.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._agreed: int | None = None
        self._agreements: dict[str, int] = {}

    def compare(self, state: ReplicatedState, *, step: int) -> ReplicaReport:
        """Compare a state with the other ranks'.

        Args:
            state: what this rank has now.
            step: the last one that is done; -1 before the first.

        Raises:
            NothingComparedError: no rank has anything that another one has to hold too.
            RankError: a rank does not come, is at another step, or failed.
            DetCallbacksError, TypeError: a tensor of this rank cannot be digested.
        """
        group, tensors = self._group, state.tensors
        num_bytes = group.num_bytes
        digests: list[int] = []
        problem: Exception | None = None
        try:
            digests = _digests(tensors)
        except (DetCallbacksError, TypeError) as error:  # told to the others below, and raised
            problem = error
        meeting = digest_bytes(json.dumps(["replicas", step]).encode()) if tensors and problem is None else 0
        rows = group.gather_words([meeting, self._word(tensors, digests)], task="the audit of the replicas")
        differences: tuple[ReplicaDifference, ...] = ()
        if not meeting or any(row[0] != meeting for row in rows):
            self._part(step, len(tensors), problem)
        if sum(row[1] for row in rows) % _WORD:
            differences = self._find(tensors, digests, step)
        else:
            self._agreed = step
        differing = {found.name for found in differences}
        self._agreements.update({one.name: step for one in tensors if one.name not in differing})
        return ReplicaReport(
            step=step,
            last_agreement=self._agreed,
            world_size=group.world_size,
            num_compared=len(tensors),
            left_out=dict(state.left_out),
            differences=differences,
            num_bytes=group.num_bytes - num_bytes,
        )

    def _word(self, tensors: Sequence[ReplicaTensor], digests: Sequence[int]) -> int:
        """Return the weighted sum of one digest for each group of ranks that this one has to agree with."""
        lines: dict[tuple[int, ...], list[tuple[str, str, int]]] = {}
        for tensor, digest in zip(tensors, digests, strict=False):  # no digests where one could not be taken
            lines.setdefault(tensor.holders, []).append((tensor.name, tensor.layout, digest))
        return (
            sum(
                _weight(holders, self._group.rank) * digest_bytes(json.dumps(sorted(held)).encode())
                for holders, held in lines.items()
            )
            % _WORD
        )

    def _part(self, step: int, num_tensors: int, problem: Exception | None) -> None:
        """Raise on every rank what keeps them from comparing; return when only some ranks have nothing to compare."""

        def tell() -> list[int]:
            if problem is not None:
                raise problem
            return [step, num_tensors]

        told = self._group.agree(tell, task="the audit of the replicas")
        if len({at for at, _ in told}) > 1:
            steps = ", ".join(str(at) for at, _ in told)
            raise RankError(
                f"The replicas cannot be compared: the ranks are no longer at the same step ({steps}, by rank). Give "
                "all ranks equally many steps."
            )
        if not any(number for _, number in told):
            raise NothingComparedError(
                f"Nothing could be compared: none of the {self._group.world_size} ranks holds a tensor that another "
                "one has to hold too. Sharded tensors have no replicas; compare runs with DeterminismCallback instead."
            )

    def _find(
        self, tensors: Sequence[ReplicaTensor], digests: Sequence[int], step: int
    ) -> tuple[ReplicaDifference, ...]:
        task = "gathering the digests of the replicas"
        listing = json.dumps([(one.name, one.layout) for one in tensors]).encode()
        content = struct.pack(f"<{len(digests) + 1}Q", digest_bytes(listing), *digests)
        rows = [struct.unpack(f"<{len(row) // 8}Q", row) for row in self._group.gather(content, task=task)]
        if len({row[0] for row in rows}) > 1:
            listings = [json.loads(row) for row in self._group.gather(listing, task=task)]
        else:
            listings = [json.loads(listing)] * len(rows)
        held: list[dict[str, tuple[int, str]]] = [
            {name: (digest, layout) for (name, layout), digest in zip(names, row[1:], strict=True)}
            for names, row in zip(listings, rows, strict=True)
        ]
        own = [found for one in tensors if (found := self._difference(one, held, step)) is not None]
        told = self._group.gather(json.dumps([asdict(found) for found in own]).encode(), task=task)
        differences = tuple(_from_dict(found) for row in told for found in json.loads(row))
        if not differences:
            raise RankError(
                f"After step {step} the digests of all tensors together differ between ranks, and those of single "
                "tensors do not: the ranks see them on other meshes, or what was sent is not what arrived. Nothing is "
                "known about the replicas. Let all ranks place their tensors alike; else suspect memory or network."
            )
        return differences

    def _difference(
        self, tensor: ReplicaTensor, held: Sequence[Mapping[str, tuple[int, str]]], step: int
    ) -> ReplicaDifference | None:
        """Return how the holders of a tensor differ, on the first of them that has it."""
        if self._group.rank != next(rank for rank in tensor.holders if tensor.name in held[rank]):
            return None
        ranks: dict[tuple[int, str] | None, list[int]] = {}
        for rank in tensor.holders:
            ranks.setdefault(held[rank].get(tensor.name), []).append(rank)
        if len(ranks) == 1:
            return None
        values = [
            ReplicaValue(
                digest=None if value is None else format_digest(value[0]),
                layout=None if value is None else value[1],
                ranks=tuple(holders),
            )
            for value, holders in ranks.items()
        ]
        return ReplicaDifference(
            name=tensor.name,
            step=step,
            last_agreement=self._agreements.get(tensor.name),
            values=tuple(sorted(values, key=lambda value: (-len(value.ranks), value.ranks))),
        )


def _digests(tensors: Sequence[ReplicaTensor]) -> list[int]:
    known = iter(digest_tensors([one.value for one in tensors if isinstance(one.value, Tensor)]))
    return [next(known) if isinstance(one.value, Tensor) else scalar_bits(one.value)[0] for one in tensors]


def _weight(holders: Sequence[int], rank: int) -> int:
    """Return the factor of one of the ranks that have to agree; those of all of them add up to zero modulo 2^64.

    They are odd numbers without a pattern, the same on every rank, and the last makes up for the others.
    """
    key = digest_bytes(struct.pack(f"<{len(holders)}Q", *holders))
    if rank != holders[-1]:
        return digest_bytes(struct.pack("<2Q", key, rank)) | 1
    return -sum(_weight(holders, other) for other in holders[:-1]) % _WORD


def _from_dict(found: Mapping[str, Any]) -> ReplicaDifference:
    values = [ReplicaValue(**{**value, "ranks": tuple(value["ranks"])}) for value in found["values"]]
    return ReplicaDifference(**{**found, "values": tuple(values)})
