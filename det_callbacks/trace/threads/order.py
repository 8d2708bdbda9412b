"""The canonical order of a step's sites if modules ran in several threads, independent of timing.

* Sites of the step's thread, and of each strand, keep their order. A strand precedes the first site that
  reads it; a strand that nothing reads precedes the next module in the model's order.
* In a backward pass, sites of the module that the forward pass called last come first. Sites of one
  module that are ready at the same time are sorted by content.
* An input that no site of the step wrote precedes its first reader.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from msgspec.structs import replace

from det_callbacks.digest.host import digest_bytes
from det_callbacks.runs.program import Site, to_json
from det_callbacks.trace.op.call_graph import CallNode
from det_callbacks.trace.threads.strands import Strand

_READ_FIRST = frozenset({"input", "delivered", "graph_output"})  # roles of sites made at a first read

_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)

_Key = tuple[int, int, int]
"""Digest of a site, digest that includes all bits it depends on, and its time."""


@dataclass(slots=True, eq=False)
class Group:
    """Sites that stay together: one made at a first read, or all other sites of a call."""

    call: CallNode
    num_given: int  # tensors that the call reads
    positions: list[int]
    strand: Strand | None
    reads: list[int]  # positions of sites, in the order of the arguments
    key: _Key
    is_read_first: bool = False
    is_placed: bool = False

    @property
    def is_of_backward(self) -> bool:
        return self.strand is None and not self.is_read_first and self.call.phase == "backward"

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum of gradients, which the engine adds in order of arrival.

        Its module and lines are those of an arbitrary thread.
        """
        call = self.call
        is_anywhere = call.scope.name is None and not call.scope.recomputed
        return self.is_of_backward and call.func in _SUMS and is_anywhere and self.num_given == 2 and not call.consts


@dataclass(slots=True, eq=False)
class _Line:
    strand: Strand
    groups: list[Group] = field(default_factory=list)
    num_placed: int = 0


def canonical_order(
    calls: Sequence[CallNode],
    reads: Sequence[Sequence[int]],
    sites: Sequence[Site],
    strands: Sequence[Strand],
    modules: Sequence[str],
    digests: Sequence[int],
) -> tuple[list[int], list[Site]]:
    """Return the positions of a step's sites in canonical order, and the sites in that order.

    ``reads`` has the reads of each call, ``modules`` the names in the model's order, and ``digests`` the
    digests of the sites.
    """
    ordering = _Ordering(sites, strands, modules)
    ordering.split(calls, reads, digests)
    ordering.place_all()
    return ordering.order, ordering.sites()


class _Ordering:
    def __init__(self, sites: Sequence[Site], strands: Sequence[Strand], modules: Sequence[str]) -> None:
        self._rows = sites
        self._strand_of: list[Strand | None] = [None] * len(sites)
        for strand in strands:
            for first, end in strand.spans:
                self._strand_of[first:end] = [strand] * (end - first)
        self._listed = {name: index for index, name in enumerate(modules)}
        self._lines = {id(strand): _Line(strand) for strand in strands}
        self._sorted_lines: list[_Line] = []  # those with groups
        self._own: list[Group] = []
        self._group_of: list[Group] = []
        self._readers: dict[int, CallNode] = {}  # position of a site added at a first read -> first reader
        self._last_of_module: dict[str, int] = {}  # last position of the forward pass in each module
        self.order: list[int] = []
        self._position_of: dict[int, int] = {}

    def _keys(self, digests: Sequence[int]) -> list[_Key]:
        keys: list[_Key] = []
        for position, (row, bits) in enumerate(zip(self._rows, digests, strict=True)):
            is_anonymous = row.role in _READ_FIRST and row.name is None
            is_placed_late = is_anonymous or (row.phase == "backward" and row.op.startswith("aten.add"))
            place = [] if is_placed_late else [row.phase, row.module]
            what = [*place, row.op, row.output, row.role, row.name, row.arguments, list(row.varying), row.recomputed]
            kind = digest_bytes(to_json([what, sorted(keys[at][0] for at in row.inputs)]))
            content = digest_bytes(to_json([kind, bits, sorted(keys[at][1] for at in row.inputs)]))
            keys.append((kind, content, position))
        return keys

    def split(self, calls: Sequence[CallNode], reads_of_calls: Sequence[Sequence[int]], digests: Sequence[int]) -> None:
        keys = self._keys(digests)
        position = 0
        for call, given in zip(calls, reads_of_calls, strict=True):
            positions = [*range(position, position + len(call.shared.rows))]
            position += len(call.shared.rows)
            rest = [at for at in positions if self._rows[at].role not in _READ_FIRST or not call.read_labels]
            for at in positions:
                if at not in rest:
                    inputs = [*self._rows[at].inputs]
                    self._add(Group(call, len(given), [at], None, inputs, keys[at], is_read_first=True))
            if not rest:
                continue
            every = [*given, *(read for at in rest for read in self._rows[at].inputs)]
            reads = [at for at in every if at not in rest]
            group = Group(call, len(given), rest, self._strand_of[rest[-1]], reads, keys[rest[-1]])
            if group.is_sum:
                group.reads.sort(key=lambda at: keys[at])
            self._add(group)
            if group.strand is None:
                self._own.append(group)
                continue
            self._lines[id(group.strand)].groups.append(group)
        self._group_of.sort(key=lambda group: group.positions[0])
        self._sorted_lines = sorted((line for line in self._lines.values() if line.groups), key=self._key_of_line)

    def _add(self, group: Group) -> None:
        self._group_of.extend([group] * len(group.positions))

    def place_all(self) -> None:
        unread = self._unread()
        at = 0
        while at < len(self._own):
            for line in unread.get(id(self._own[at]), ()):
                self._place(line.groups[-1])
            if not self._own[at].is_of_backward:
                self._place(self._own[at])
                self._place_ready_groups()
                at += 1
                continue
            end = next((end for end in range(at, len(self._own)) if not self._own[end].is_of_backward), len(self._own))
            self._place_backward(self._own[at:end])
            at = end
        for group in (*(line.groups[-1] for line in self._sorted_lines), *self._group_of):
            self._place(group)

    def _unread(self) -> Mapping[int, list[_Line]]:
        """Return the strands that no other thread reads, by the group that they precede."""
        read_strands: set[int] = set()
        for group in self._group_of:
            if not group.is_of_backward:
                strands = (self._group_of[at].strand for at in group.reads)
                read_strands.update(id(strand) for strand in strands if strand is not group.strand)
        found: dict[int, list[_Line]] = {}
        for line in self._sorted_lines:
            if id(line.strand) not in read_strands and (successor := self._successor_of(line)) is not None:
                found.setdefault(id(successor), []).append(line)
        return found

    def _successor_of(self, line: _Line) -> Group | None:
        """Return the group right after a strand that no other thread reads.

        If the call of an enclosing module begins before the strand and returns after it, the group is inside that
        call; which one is decided by the order of modules in the model.
        """
        begin, end = line.groups[0].positions[0], line.groups[-1].positions[-1]
        later = [group for group in self._own if group.positions[0] > end]
        around = next((group for group in later if _is_output_around(group, line.strand.module)), None)
        end_of_pass = around or next((one for one in later if one.call.phase not in ("forward", "input")), None)
        first = 0 if around is None else self._begin_of(around.call.module, begin)
        place = self._listed.get(line.strand.module, len(self._listed))
        for group in self._own[first:]:
            if group is end_of_pass:
                break
            if group.call.phase == "forward" and self._listed.get(group.call.module, -1) > place:
                return group
        return end_of_pass

    def _begin_of(self, module: str, position: int) -> int:
        first = 0
        for index, group in enumerate(self._own):
            if group.positions[0] > position:
                break
            if group.call.module == module and _is_output(group):
                first = index + 1
        return first

    def _key_of_line(self, line: _Line) -> tuple[int, list[tuple[int, int]], int]:
        what = [group.key[:2] for group in line.groups]
        return self._listed.get(line.strand.module, len(self._listed)), what, line.groups[0].positions[0]

    def _place(self, group: Group) -> None:
        """Place a group after its predecessors in its strand."""
        if group.is_placed:
            return
        if group.strand is None:
            self._append(group)
            return
        line = self._lines[id(group.strand)]
        while not group.is_placed:
            self._append(line.groups[line.num_placed])
        self._place_ready_groups()

    def _append(self, group: Group) -> None:
        for read in (self._group_of[at] for at in group.reads):
            if read.is_read_first and not read.is_placed:
                self._readers[read.positions[0]] = self._readers.get(group.positions[0], group.call)
            self._place(read)
        if group.is_placed:  # by ``_place_ready_groups``, after the last read
            return
        group.is_placed = True
        for position in group.positions:
            self._position_of[position] = len(self.order)
            self.order.append(position)
        if group.call.phase == "forward" and not group.is_read_first:
            self._last_of_module[group.call.module] = len(self.order)
        if group.strand is not None:
            self._lines[id(group.strand)].num_placed += 1

    def _place_ready_groups(self) -> None:
        """Place the next groups of started strands, until each waits for another group."""
        before = -1
        while before != len(self.order):
            before = len(self.order)
            for line in self._sorted_lines:
                while 0 < line.num_placed < len(line.groups) and self._is_ready(line.groups[line.num_placed]):
                    self._append(line.groups[line.num_placed])

    def _is_ready(self, group: Group) -> bool:
        return all(read.is_placed for read in self._awaited(group))

    def _place_backward(self, groups: Sequence[Group]) -> None:
        """Place the groups of a backward pass; of those ready, the module that forward called last comes first."""
        block = {id(group) for group in groups}
        num_missing: dict[int, int] = {}
        readers: dict[int, list[Group]] = {}
        for group in groups:
            awaited = {id(one): one for one in self._awaited(group) if id(one) in block}
            num_missing[id(group)] = len(awaited)
            for one in awaited:
                readers.setdefault(one, []).append(group)
        tie = count()
        ready = [(*self._rank(group), next(tie), group) for group in groups if not num_missing[id(group)]]
        heapq.heapify(ready)
        while ready:
            group = heapq.heappop(ready)[-1]
            self._place(group)
            for reader in readers.get(id(group), ()):
                num_missing[id(reader)] -= 1
                if not num_missing[id(reader)]:
                    heapq.heappush(ready, (*self._rank(reader), next(tie), reader))

    def _awaited(self, group: Group) -> Iterator[Group]:
        """Yield the groups that a group reads, including reads through sites made at a first read."""
        for at in group.reads:
            read = self._group_of[at]
            yield from self._awaited(read) if read.is_read_first else (read,)

    def _rank(self, group: Group) -> tuple[int, bool, _Key]:
        is_of_op = group.call.func != "output"  # else a module's output
        return -self._last_of_module.get(self._call_at(group).module, -1), is_of_op, group.key

    def _call_at(self, group: Group) -> CallNode:
        while group.is_sum:
            group = self._group_of[max(group.reads, key=self._position_of.__getitem__)]
        return group.call

    def sites(self) -> list[Site]:
        found = []
        for position in self.order:
            row = self._rows[position]
            reader = self._readers.get(position)
            if reader is not None and row.name is None and row.role != "delivered":
                row = replace(row, module=reader.module, source=reader.source)
            elif (group := self._group_of[position]).is_sum:
                call = self._call_at(group)
                row = replace(row, module=call.module, source=call.source)
            found.append(replace(row, inputs=tuple(sorted(self._position_of[at] for at in row.inputs))))
        return found


def _is_output(group: Group) -> bool:
    return group.call.func == "output" and group.call.phase != "backward"


def _is_output_around(group: Group, module: str) -> bool:
    around = group.call.module
    return _is_output(group) and around != module and (around == "" or module.startswith(f"{around}."))
