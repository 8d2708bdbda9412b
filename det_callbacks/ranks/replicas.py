"""Whether ranks that are to hold the same bits do: the digests of their tensors are gathered and compared."""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from det_callbacks.digest import digest_bytes, digest_tensors, format_digest
from det_callbacks.errors import NothingComparedError, RankError
from det_callbacks.ranks.group import RankGroup
from det_callbacks.ranks.replicated import ReplicatedState, ReplicaTensor
from det_callbacks.runs.program import scalar_bits

TASK = "the audit of the replicas"

_Key = tuple[str, tuple[int, ...]]
"""Name of a tensor and the ranks that have to hold the same of it."""


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

    All ranks make one at the same place, and call its methods at the same steps. Each tells the digests of all its
    tensors, 8 bytes a tensor, and only where that changed also their names, layouts and holders.

    Args:
        group: of all ranks.

    Cost: one pass over the compared state at the speed of digests, and an exchange of 8 bytes a tensor.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._agreed: int | None = None
        self._agreements: dict[_Key, int] = {}
        self._keys: tuple[_Key, ...] = ()
        self._listed: list[int] = []
        self._listings: list[list[tuple[str, str, tuple[int, ...]]]] = []

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
        listing = json.dumps([(one.name, one.layout, one.holders) for one in tensors]).encode()

        def digests() -> bytes:
            return struct.pack(f"<{len(tensors) + 2}Q", step + 1, digest_bytes(listing), *_digests(tensors))

        rows = [struct.unpack(f"<{len(row) // 8}Q", row) for row in group.gather(digests, task=TASK)]
        if len({row[0] for row in rows}) > 1:
            steps = ", ".join(str(row[0] - 1) for row in rows)
            raise RankError(
                f"The replicas cannot be compared: the ranks are no longer at the same step ({steps}, by rank). Give "
                "all ranks equally many steps."
            )
        if all(len(row) == 2 for row in rows):
            raise NothingComparedError(
                f"Nothing could be compared: none of the {group.world_size} ranks holds a tensor that another "
                "one has to hold too. Sharded tensors have no replicas; compare runs with DeterminismCallback instead."
            )
        self._learn(listing, [row[1] for row in rows])
        differences = dict(self._differences([row[2:] for row in rows], step))
        if not differences:
            self._agreed = step
        self._agreements.update({key: step for key in self._keys if key not in differences})
        return ReplicaReport(
            step=step,
            last_agreement=self._agreed,
            world_size=group.world_size,
            num_compared=len(tensors),
            left_out=dict(state.left_out),
            differences=tuple(differences.values()),
            num_bytes=group.num_bytes - num_bytes,
        )

    def _learn(self, listing: bytes, listed: list[int]) -> None:
        """Know the names, layouts and holders of every rank's tensors; all ranks see alike whether they changed."""
        if listed == self._listed:
            return
        told = self._group.gather(lambda: listing, task=TASK)
        self._listings = [[(name, layout, tuple(holders)) for name, layout, holders in json.loads(row)] for row in told]
        self._listed = listed
        self._keys = tuple(dict.fromkeys((name, holders) for one in self._listings for name, _, holders in one))

    def _differences(self, rows: Sequence[Sequence[int]], step: int) -> Iterator[tuple[_Key, ReplicaDifference]]:
        """Yield how the holders of each tensor differ, the same on every rank."""
        if len(set(map(tuple, self._listings))) == len(set(rows)) == 1:
            return  # as most often, and without sharding
        held: list[dict[str, tuple[int, str]]] = [
            {name: (digest, layout) for (name, layout, _), digest in zip(listing, row, strict=True)}
            for listing, row in zip(self._listings, rows, strict=True)
        ]
        for key in self._keys:
            name, holders = key
            ranks: dict[tuple[int, str] | None, list[int]] = {}
            for rank in holders:
                ranks.setdefault(held[rank].get(name), []).append(rank)
            if len(ranks) > 1:
                yield key, self._difference(key, ranks, step)

    def _difference(
        self, key: _Key, ranks: Mapping[tuple[int, str] | None, Sequence[int]], step: int
    ) -> ReplicaDifference:
        values = [
            ReplicaValue(
                digest=None if value is None else format_digest(value[0]),
                layout=None if value is None else value[1],
                ranks=tuple(holders),
            )
            for value, holders in ranks.items()
        ]
        return ReplicaDifference(
            name=key[0],
            step=step,
            last_agreement=self._agreements.get(key),
            values=tuple(sorted(values, key=lambda value: (-len(value.ranks), value.ranks))),
        )


def _digests(tensors: Sequence[ReplicaTensor]) -> list[int]:
    known = iter(digest_tensors([one.value for one in tensors if isinstance(one.value, Tensor)]))
    return [next(known) if isinstance(one.value, Tensor) else scalar_bits(one.value)[0] for one in tensors]
