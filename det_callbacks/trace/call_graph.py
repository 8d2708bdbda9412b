"""The calls of all steps so far, as a graph: a step reuses the calls that earlier steps built.

A call is identified by its op, its place, its arguments and names, and the rows it reads. Each row
of a call has a *label*: a number that is unique within a step, and the same in every step, even
where the row's position differs. So a call after a skipped block, or in the second of two branches,
is the same call as before unless it reads other rows.

The recorder first tries the call that followed last time. If a different call came, the graph looks
that call up, and the recorder tries its successor next. The graph builds only a call that no step
had, with its sites and source lines.

A program must not depend on earlier steps. So it leaves out the numbers among a call's arguments (a
learning rate, a size); the step keeps one digest of them per call.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import CodeType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from det_callbacks.runs.program import ArgumentTag, Program, Site, SiteRow, argument_bits
from det_callbacks.trace.source import read_text

MAX_BYTES = 48 << 20  # estimated size of the calls; a step that begins with more forgets them all
MAX_PROGRAM_ROWS = 200_000  # in all kept programs, about 30 bytes each
MAX_TEXT = 4_000_000  # characters of arguments; later ones have a digest only

# measured with tracemalloc, rounded up
_BYTES_OF_CALL, _BYTES_OF_ROW, _BYTES_OF_ITEM = 800, 1000, 40


_Member = TypeVar("_Member", "SharedRows", "CallNode")

_NONE: list[Any] = []  # constants or names of a call; shared by most


@dataclass(frozen=True, slots=True, kw_only=True)
class OpScope:
    """The place of an op; a backward op has the place of the forward op
    whose gradient it computes.
    """

    module: str  # "" outside any module, "?" if unknown
    # source lines of the forward op; None: those of the op itself
    source: tuple[str, ...] | None = None
    name: str | None = None  # the parameter whose gradient is accumulated
    recomputed: bool = False  # whether the op repeats a forward op under activation checkpointing


@dataclass(slots=True, eq=False)
class SharedRows:
    """The rows of a call, at most once in a step; calls that differ only in
    what they read share them.
    """

    rows: tuple[SiteRow, ...] = ()
    labels: range = range(0)  # labels of the rows
    last_step: int = 0  # the last step that contained the rows


@dataclass(slots=True, eq=False)
class _OncePerStep(Generic[_Member]):
    """Interchangeable rows or calls, each at most once in a step."""

    members: list[_Member] = field(default_factory=list)
    last_step: int = 0
    num_used: int = 0  # leading members used in that step; so a step passes each member once

    def unused(self, step: int) -> _Member | None:
        """Return the first member that this step has not used yet, or None."""
        if self.last_step != step:
            self.last_step, self.num_used = step, 0
        while self.num_used < len(self.members) and self.members[self.num_used].last_step == step:
            self.num_used += 1
        return self.members[self.num_used] if self.num_used < len(self.members) else None


@dataclass(slots=True, eq=False)
class _RowGroup:
    """The rows of calls that have the same op, place and sites, but read different sites."""

    is_named: bool  # whether their rows have names, which distinguish the calls
    every: _OncePerStep[SharedRows] = field(default_factory=_OncePerStep)
    readers: dict[int, _OncePerStep[SharedRows]] = field(default_factory=dict)  # by label read

    def unused(self, step: int, phase: str, reads: Sequence[int]) -> SharedRows | None:
        """Return rows for a new call that this step has not used yet,
        or None if the caller has to make them.

        Rows that read one of the same labels come first. If there are none, an optimizer's call
        concerns another parameter and needs new rows; any other call takes the first unused rows.
        """
        for label in reads:
            if label in self.readers and (rows := self.readers[label].unused(step)) is not None:
                return rows
        return None if phase == "optimizer" and not self.is_named else self.every.unused(step)


class Call(NamedTuple):
    """What identifies a call: the first fields of ``CallNode`` after ``previous``."""

    func: object
    phase: str
    scope: OpScope
    consts: list[Any]
    read_labels: list[int | None]
    names: list[Any]
    num_outputs: int
    keywords: tuple[str, ...] = ()


@dataclass(slots=True, eq=False, repr=False)  # calls link to each other in a circle
class CallNode:
    """One call of an op, or one group of named tensors."""

    previous: "CallNode | None"  # the preceding call in the last step that had this one
    func: object  # the op's overload, or a label for another kind of call
    phase: str
    scope: OpScope
    consts: list[Any]  # the last call's arguments that are not tensors, in order
    read_labels: list[int | None]  # see ``CallGraph.labels_of``
    # of the input sites made for this call, of tensors that it overwrites, or of its rows
    names: list[Any]
    num_outputs: int
    keywords: tuple[str, ...] = ()
    # repr of ``consts`` where equality is too weak (1 == 1.0 == True, 0.0 == -0.0)
    exact_repr: str | None = None
    number_indices: tuple[int, ...] = ()  # indices of the arguments that the program leaves out
    # indices of those that take any kind of number: 1, 1.0 and True differ
    any_number_indices: tuple[int, ...] = ()
    numbers_bits: int = 0  # digest of the arguments at ``number_indices``
    numbers_tag: ArgumentTag = "digest"
    # only while the node is built: the positions that the call reads, its sites without ``inputs``,
    # and the positions that each of them reads
    read_positions: Sequence[int | None] = ()
    sites: tuple[Site, ...] = ()
    edges: Sequence[Sequence[int]] = ()
    # from then on
    shared: SharedRows = field(default_factory=SharedRows)
    num_read: tuple[int, ...] = ()  # number of rows that each row reads
    edge_labels: tuple[int, ...] = ()  # the labels of these, row by row
    source: tuple[str, ...] = ()
    # backward.py uses the following to decide whether an autograd node belongs to this call
    op_base: str = ""
    is_in_place: bool = False
    codes: tuple[CodeType, ...] = ()  # the running code, innermost first
    running_modules: tuple[str, ...] = ()
    scopes: dict[object, OpScope] | None = None
    # the call that came next the last time; no earlier one is remembered
    likely: "CallNode | None" = None
    native: int = 0  # address of its copy in the native recorder, which compares calls with it

    @property
    def last_step(self) -> int:
        """The last step that contained the call, or an equal one."""
        return self.shared.last_step

    @property
    def group_key(self) -> Hashable:
        """Op, place and rows: equal for calls that differ only in what they read."""
        return self.func, self.phase, self.scope, self.shared.rows

    @property
    def module(self) -> str:
        return self.scope.module

    @property
    def num_bytes(self) -> int:
        """Estimated size, without the rows, which calls share."""
        return _BYTES_OF_CALL + _BYTES_OF_ITEM * (
            len(self.shared.rows) + len(self.edge_labels) + len(self.read_labels)
        )

    def equals_except_consts(
        self,
        func: object,
        phase: str,
        scope: OpScope,
        read_labels: list[int | None],
        names: Sequence[Any],
        num_outputs: int,
        keywords: tuple[str, ...] = (),
    ) -> bool:
        """Return whether a call equals this one, apart from ``consts``."""
        return (
            self.func is func
            and self.phase == phase
            and (self.scope is scope or self.scope == scope)
            and self.read_labels == read_labels
            and self.names == names
            and self.num_outputs == num_outputs
            and self.keywords == keywords
        )

    def equals_except_numbers(self, consts: list[Any]) -> bool:
        """Return whether these arguments equal the node's, apart from numbers."""
        if len(self.consts) != len(consts):
            return False
        for index, (own, value) in enumerate(zip(self.consts, consts, strict=True)):
            is_same = own.__class__ is value.__class__ and own == value
            if is_same and self.exact_repr is not None:
                is_same = repr(own) == repr(value)
            if not (is_number(value) if index in self.number_indices else is_same):
                return False
        return True


NOWHERE = OpScope(module="")


@dataclass(slots=True)
class StepCounts:
    """How many ops of a step were digested or skipped, for the coverage; ``opaque`` names what the
    recorder could not look into: regions, ops, classes of tensors and objects in a batch.
    """

    num_digested: int = 0
    num_views: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    opaque: set[str] = field(default_factory=set)


class CallGraph:
    """The calls of all steps so far, bounded in size; ``at`` is the current step's last call.

    ``labels`` holds the labels of the step's rows by position; ``label_at`` returns one, faster
    than a comprehension.
    """

    def __init__(self) -> None:
        self.values: dict[int, str] = {}  # digest of the numbers of a call -> their JSON text
        self._num_characters = 0
        # see ``Program.text``; bounded by the code that calls ops
        self.text: dict[str, tuple[str, ...]] = {}
        # shared by calls; bounded like ``text``
        self._sources: dict[tuple[str, ...], tuple[str, ...]] = {}
        # steps begun, and how often all calls were forgotten
        self.step_number = self.num_forgets = 0
        self._limit = MAX_BYTES
        self._forget()
        self._start()

    def _start(self) -> None:
        self.at = self._root
        self.labels: list[int] = []
        self.label_at = self.labels.__getitem__

    def begin(self) -> None:
        """Start a step; forget the calls of all earlier steps if together they exceed the limit."""
        self.step_number += 1
        if self.num_bytes > self._limit:
            # the last step alone may exceed MAX_BYTES; then the limit rises, and the calls may stay
            self._limit = max(MAX_BYTES, self._bytes_of_step() * 4 // 3)
            if self.num_bytes > self._limit:
                self._forget()
        self._start()

    def _bytes_of_step(self) -> int:
        calls = self.calls()
        rows = {row for call in calls for row in call.shared.rows}
        return sum(call.num_bytes for call in calls) + _BYTES_OF_ROW * len(rows)

    def _forget(self) -> None:
        self.num_forgets += 1
        self.num_nodes = self.num_bytes = self._num_labels = 0
        # hash of op, place, reads and names -> calls, those that differ only in numbers together
        self._calls: dict[int, list[_OncePerStep[CallNode]]] = {}
        self._site_rows: dict[Site, SiteRow] = {}
        self._row_groups: dict[Hashable, _RowGroup] = {}  # by op, place and rows
        self._programs: OrderedDict[tuple[CallNode, ...], Program] = OrderedDict()
        # whether a call since the last program was not the likely one
        self._left_the_likely_path = True
        self._last: tuple[CallNode, Program] | None = None  # the last program and its last call
        self._root = CallNode(None, None, "", NOWHERE, [], [], [], 0)

    def labels_of(
        self, positions: Sequence[int | None], first_site: int, edges: Sequence[Sequence[int]] = ()
    ) -> list[int | None]:
        """Return the labels of the positions that a call reads,
        then of those that its input sites read.

        The call's own rows have no labels yet: the n-th is -1 - n.
        A None in ``positions`` divides rows, and stays.

        Args:
            positions: the positions that the call reads.
            first_site: the position of the call's first row.
            edges: the positions that each of its input sites reads; in the result,
                None ends each input site.
        """
        labels = self.labels
        if any(edges):
            positions = [*positions, *rowwise(edges)]
        return [
            None
            if position is None
            else labels[position]
            if position < first_site
            else first_site - 1 - position
            for position in positions
        ]

    def advance_if_likely(
        self,
        func: object,
        phase: str,
        scope: OpScope,
        consts: list[Any],
        read_labels: list[int | None],
        names: Sequence[Any],
        num_outputs: int,
        keywords: Collection[str] = (),
    ) -> CallNode | None:
        """Go to the likely call and return it if it is this one, with these numbers; else stay and
        return None.

        The arguments are those of ``Call``. Phase and scope are compared by identity, which is
        enough: ``go_to`` finds an equal call.
        """
        node = self.at.likely
        if (
            node is not None
            and node.func is func
            and node.read_labels == read_labels
            and node.scope is scope
            and node.phase is phase
            and node.names == names
            and node.num_outputs == num_outputs
            and node.shared.last_step != self.step_number  # not yet in this step
            and (not keywords or node.keywords == tuple(keywords))
            and (
                (
                    node.consts == consts
                    and (node.exact_repr is None or node.exact_repr == repr(consts))
                )
                or self.match_and_store_numbers(node, consts)
            )
        ):
            node.previous = self.at
            node.shared.last_step = self.step_number
            self.at = node
            self.labels += node.shared.labels
            return node
        return None

    def step_to(
        self,
        func: object,
        phase: str,
        scope: OpScope,
        positions: Sequence[int | None],
        names: Sequence[Any],
        num_outputs: int,
        build: Callable[[CallNode], None],
        *,
        consts: list[Any] = _NONE,
        edges: Sequence[Sequence[int]] = (),
    ) -> CallNode:
        """Go to the likely call, or to another one; its rows follow those that have labels.

        The arguments are those of ``Call`` with the positions that it reads; ``build`` is as in
        ``go_to``, and ``edges`` as in ``labels_of``.
        """
        labels = self.labels_of(positions, len(self.labels), edges)
        node = self.advance_if_likely(func, phase, scope, consts, labels, names, num_outputs)
        if node is not None:
            return node
        return self.go_to(
            Call(func, phase, scope, consts, labels, [*names], num_outputs), positions, build
        )

    def go_to(
        self,
        call: Call,
        positions: Sequence[int | None],
        build: Callable[[CallNode], None],
        source: Callable[[], tuple[str, ...]] | None = None,
    ) -> CallNode:
        """Go to a call other than the likely one: a known one, or a new one.

        Args:
            call: the call.
            positions: the positions that the call reads.
            build: fills in a new node, and may raise.
            source: returns the call's source lines. Here they also identify a call that reads
                nothing, unless a checkpoint recomputes it: the lines may then be those of its first
                run. (The likely call is taken whatever its lines: looking at the stack in each step
                would take too long.)
        """
        func, phase, scope, consts, read_labels, names, num_outputs, keywords = call
        hash_key = hash((func, phase, scope, tuple(read_labels), tuple(names)))
        candidates = self._calls.setdefault(hash_key, [])
        lines = None
        if source is not None and candidates and not read_labels and not scope.recomputed:
            lines = source()
        for equal in candidates:
            first = equal.members[0]
            if (
                first.equals_except_consts(
                    func, phase, scope, read_labels, names, num_outputs, keywords
                )
                and (lines is None or first.source == lines)
                and first.equals_except_numbers(consts)
            ):
                break
        else:
            equal = _OncePerStep()
        node = equal.unused(self.step_number)
        if node is None:
            node = CallNode(self.at, *call)
            node.names, node.read_positions = names or _NONE, positions
            build(node)
            node.read_positions = ()
            self._give_rows(node)
            if not equal.members:
                candidates.append(equal)
            equal.members.append(node)
        else:
            self.match_and_store_numbers(node, consts)
        self.at.likely = node
        self._left_the_likely_path = True
        return self._advance(node)

    def _advance(self, node: CallNode) -> CallNode:
        """Set the current call to a node; ``advance_if_likely``, ``UndigestedOps._touch`` and
        ``native/attempt.h`` do the same without this call.
        """
        node.previous = self.at
        node.shared.last_step = self.step_number
        self.at = node
        self.labels += node.shared.labels
        return node

    def _give_rows(self, node: CallNode) -> None:
        """Give a new node its rows, with labels, and the labels of what each row reads."""
        sites, node.sites = node.sites, ()
        edges, node.edges = node.edges, ()
        if sites:  # a group of named tensors comes with its rows
            node.shared = SharedRows(rows=tuple(map(self._row_of, sites)))
        node.shared = shared = self._shared_rows(node)
        node.num_read = tuple(map(len, edges))
        first, own = len(self.labels), shared.labels
        node.edge_labels = tuple(
            [
                self.labels[position] if position < first else own[position - first]
                for positions in edges
                for position in positions
            ]
        )
        if shared.rows and node.source not in self._sources:
            self._sources[node.source] = node.source
            self.text.update(read_text([node.source]))
        node.source = self._sources.get(node.source, node.source)
        self.num_nodes += 1
        self.num_bytes += node.num_bytes

    def _shared_rows(self, node: CallNode) -> SharedRows:
        """Return the rows of a new node with labels: those of an equal call that the step
        has not used, or new ones.
        """
        rows, key = node.shared.rows, node.group_key
        if not rows:
            return node.shared
        group = self._row_groups.get(key)
        if group is None:
            group = self._row_groups[key] = _RowGroup(is_named=any(row.site.name for row in rows))
        read_labels = [label for label in node.read_labels if label is not None and label >= 0]
        likely = self.at.likely
        if (
            likely is not None
            and likely.shared.last_step != self.step_number
            and likely.group_key == key
        ):
            shared: SharedRows | None = likely.shared
        else:
            shared = group.unused(self.step_number, node.phase, read_labels)
        if shared is None:
            shared = SharedRows(
                rows=rows, labels=range(self._num_labels, self._num_labels + len(rows))
            )
            self._num_labels += len(rows)
            group.every.members.append(shared)
        for label in read_labels if not group.is_named else ():
            group.readers.setdefault(label, _OncePerStep()).members.append(shared)
        return shared

    def _row_of(self, site: Site) -> SiteRow:
        row = self._site_rows.get(site)
        if row is None:
            row = self._site_rows[site] = SiteRow.of(site)
            self.num_bytes += _BYTES_OF_ROW
        return row

    def match_and_store_numbers(self, node: CallNode, consts: list[Any]) -> bool:
        """Return whether these arguments equal a node's apart from numbers; if so,
        store them in the node.

        Call it after all other comparisons, since it changes the node.
        """
        if node.consts == consts and (node.exact_repr is None or node.exact_repr == repr(consts)):
            return True
        if not node.number_indices or not node.equals_except_numbers(consts):
            return False
        self.set_numbers(node, consts)
        return True

    def set_numbers(self, node: CallNode, consts: list[Any]) -> None:
        """Store the arguments of a call, and the digest of their numbers, in its node."""
        node.consts = consts
        takes_any = node.any_number_indices
        ambiguous = [
            is_ambiguous(value, takes_any_number=index in takes_any)
            for index, value in enumerate(consts)
        ]
        node.exact_repr = repr(consts) if any(ambiguous) else None
        if node.number_indices:
            node.numbers_bits, node.numbers_tag, text = argument_bits(
                [consts[index] for index in node.number_indices]
            )
            if (
                text is not None
                and node.numbers_bits not in self.values
                and self._num_characters + len(text) <= MAX_TEXT
            ):
                self.values[node.numbers_bits] = text
                self._num_characters += len(text)

    def calls(self) -> list[CallNode]:
        """Return the calls of the current step so far."""
        path: list[CallNode] = []
        node = self.at
        while node is not self._root:
            path.append(node)
            assert node.previous is not None, "only the root has none"
            node = node.previous
        return path[::-1]

    def program(self, counts: StepCounts) -> Program:
        """Return the program of the step that ends here.

        If a recent step had the same calls, this is its program, with its counts of ops.
        """
        if not self._left_the_likely_path and self._last is not None and self._last[0] is self.at:
            return self._last[1]
        path = tuple(self.calls())
        program = self._programs.pop(path, None) or self._make_program(path, counts)
        self._programs[path] = program
        self._left_the_likely_path, self._last = False, (self.at, program)
        num_rows = sum(map(len, self._programs.values()))
        while num_rows > MAX_PROGRAM_ROWS and len(self._programs) > 1:
            _, earlier = self._programs.popitem(last=False)
            num_rows -= len(earlier)
        return program

    def _make_program(self, path: tuple[CallNode, ...], counts: StepCounts) -> Program:
        skipped = {"view": counts.num_views, **counts.skipped}
        num_read, read = self._edges(path)
        return Program(
            rows=tuple(chain.from_iterable([call.shared.rows for call in path])),
            num_read=num_read,
            read=read,
            ops_seen=counts.num_digested + sum(skipped.values()),
            ops_digested=counts.num_digested,
            ops_skipped={reason: count for reason, count in sorted(skipped.items()) if count},
            opaque_regions=tuple(sorted(counts.opaque)),
            text=self.text,
        )

    def _edges(self, calls: Sequence[CallNode]) -> tuple[np.ndarray, np.ndarray]:
        """Return how many sites each site reads, and the positions of those; see ``Program``."""
        num_read = np.fromiter(
            chain.from_iterable([call.num_read for call in calls]), dtype=np.int32
        )
        positions = {label: position for position, label in enumerate(self.labels)}
        read = np.array(
            [positions[label] for call in calls for label in call.edge_labels], dtype=np.int32
        )
        # ascending within each row
        return num_read, read[np.lexsort((read, np.repeat(np.arange(len(num_read)), num_read)))]


def rowwise(edges: Iterable[Sequence[int]]) -> list[int | None]:
    """Return what several rows read as one list, with None after each row."""
    return [position for positions in edges for position in (*positions, None)]


def is_number(value: Any) -> bool:
    """Return whether an argument is a number, or a list of numbers,
    which may differ from step to step.
    """
    if isinstance(value, list | tuple):
        return all(map(is_number, value))
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def is_ambiguous(value: Any, *, takes_any_number: bool) -> bool:
    """Return whether an argument may equal a different one: 0.0 == -0.0, 1 == 1.0 == True."""
    if isinstance(value, list | tuple):
        return any(is_ambiguous(item, takes_any_number=takes_any_number) for item in value)
    if isinstance(value, float):
        return value == 0.0 or (takes_any_number and value.is_integer())
    return takes_any_number and isinstance(value, int | complex)
