"""The programs of all steps so far, as a trie: what earlier steps did at a position is not built twice.

At each call the child taken most recently is tried first, then its siblings (accumulation steps, several optimizers and
data-dependent branches alternate), and only when none fits a new node is built, with its sites and source lines.

What a step's program is follows from the step alone. So each number among the arguments of a call (a learning rate, a
size) is left out of the program, and the step has one digest of all those of a call.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from det_callbacks.runs.program import ArgumentTag, Program, Site, argument_bits
from det_callbacks.trace.attribution.source import read_text

MAX_NODES = 200_000
_MAX_SIBLINGS = 64
MAX_TEXT = 4_000_000  # characters of arguments; of those that come later, a step has the digest only


@dataclass(frozen=True, slots=True, kw_only=True)
class OpScope:
    """Where an op belongs; in a backward pass that is where the forward op is whose gradient it computes."""

    module: str  # "" outside any module, "?" when it cannot be told
    source: tuple[str, ...] | None = None  # the lines of that forward op; None when the op's own stack tells them
    name: str | None = None  # the parameter whose gradient is accumulated
    recomputed: bool = False  # it repeats a forward op under activation checkpointing


@dataclass(slots=True, eq=False)
class CallNode:
    """One call of an op, or one group of named tensors, at one place of the trie."""

    parent: "CallNode | None"
    func: object  # the op's overload, or what stands for another kind of call
    phase: str
    scope: OpScope
    consts: list[Any]  # the arguments that are no tensors, in order, as they were in the last such call
    reads: list[Any]  # positions of sites
    names: list[Any]  # of the input sites made for it
    num_outputs: int
    keywords: tuple[str, ...] = ()
    exact: str | None = None  # text form of ``consts`` where equality would be too weak (1 == 1.0 == True, 0.0 == -0.0)
    numbers: tuple[int, ...] = ()  # indices of the arguments that belong to the step, and not to the program
    any_number: frozenset[int] = frozenset()  # of those that take any kind of number: 1, 1.0 and True are not the same
    bits: int = 0  # the digest of the ``numbers``
    tag: ArgumentTag = "digest"
    rows: tuple[Site, ...] = ()
    source: tuple[str, ...] = ()
    # from here on: what tells whether an autograd node is of this call (backward.py)
    op_base: str = ""
    is_in_place: bool = False
    codes: tuple[CodeType, ...] = ()  # what ran, innermost first, and the modules that did
    running_modules: tuple[str, ...] = ()
    scopes: dict[object, OpScope] = field(default_factory=dict)
    # the next calls, and the one of them that was taken last
    children: "list[CallNode]" = field(default_factory=list)
    likely: "CallNode | None" = None
    program: Program | None = None

    @property
    def module(self) -> str:
        """Qualified name of the module it belongs to."""
        return self.scope.module

    def is_call(self, call: tuple[Any, ...]) -> bool:
        """Return whether a call is this one again, but for its arguments that are no tensors."""
        func, phase, scope, _, *rest = call
        known = [self.reads, self.names, self.num_outputs, self.keywords]
        return self.func is func and self.phase == phase and self.scope == scope and known[: len(rest)] == rest


NOWHERE = OpScope(module="")


@dataclass(slots=True)
class StepCounts:
    """What became of the ops of one step, for the coverage; ``opaque`` ran others where no mode sees all of them."""

    num_digested: int = 0
    num_views: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    opaque: set[str] = field(default_factory=set)


class ProgramTrie:
    """The calls of all steps seen so far, bounded in number; ``at`` is the last one of the step under way."""

    def __init__(self) -> None:
        self.values: dict[int, str] = {}  # digest of the numbers of a call -> their JSON text
        self._num_characters = 0
        self.num_nodes = 0
        self._root = self.at = CallNode(None, None, "", NOWHERE, [], [], [], 0)

    def begin(self) -> None:
        """Start a step; forget everything once it is too much."""
        if self.num_nodes > MAX_NODES:
            self._root = CallNode(None, None, "", NOWHERE, [], [], [], 0)
            self.num_nodes = 0
        self.at = self._root

    def step_to(self, call: tuple[Any, ...], build: Callable[[CallNode], None]) -> CallNode:
        """Go to a call: the likely one, a sibling, or a new one, which ``build`` fills in, and for which it may raise.

        ``call`` are the arguments of ``CallNode`` after the first.
        """
        parent = self.at
        node = parent.likely
        consts = call[3]
        if node is None or not (node.is_call(call) and self.takes(node, consts)):
            siblings = parent.children[: -_MAX_SIBLINGS - 1 : -1]
            alike = (child for child in siblings if child.is_call(call))
            node = next((child for child in alike if self.takes(child, consts)), None)
            if node is None:
                node = CallNode(parent, *call)
                build(node)
                parent.children.append(node)
                self.num_nodes += 1
            parent.likely = node
        self.at = node
        return node

    def takes(self, node: CallNode, consts: list[Any]) -> bool:
        """Return whether a call with these arguments is of a node; the node then has their numbers."""
        if node.consts == consts and (node.exact is None or node.exact == repr(consts)):
            return True
        if not node.numbers or len(node.consts) != len(consts):
            return False
        for index, (known, value) in enumerate(zip(node.consts, consts, strict=True)):
            is_same = known.__class__ is value.__class__ and known == value
            if not (is_number(value) if index in node.numbers else is_same):
                return False
        self.set_numbers(node, consts)
        return True

    def set_numbers(self, node: CallNode, consts: list[Any]) -> None:
        """Take the numbers of a call for those of its node."""
        node.consts = consts
        is_weak = any(is_ambiguous(value, is_number=index in node.any_number) for index, value in enumerate(consts))
        node.exact = repr(consts) if is_weak else None
        if node.numbers:
            node.bits, node.tag, text = argument_bits([consts[index] for index in node.numbers])
            if text is not None and node.bits not in self.values and self._num_characters + len(text) <= MAX_TEXT:
                self.values[node.bits] = text
                self._num_characters += len(text)

    def calls(self) -> list[CallNode]:
        """Return the calls of the step up to here."""
        path: list[CallNode] = []
        node: CallNode | None = self.at
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def program(self, counts: StepCounts) -> Program:
        """Return the program of the step that ends here, built at most once."""
        if self.at.program is None:
            sites = with_occurrences([row for call in self.calls() for row in call.rows])
            skipped = {"view": counts.num_views, **counts.skipped}
            self.at.program = Program(
                sites=sites,
                ops_seen=counts.num_digested + sum(skipped.values()),
                ops_digested=counts.num_digested,
                ops_skipped={reason: count for reason, count in sorted(skipped.items()) if count},
                opaque_regions=tuple(sorted(counts.opaque)),
                text=read_text(site.source for site in sites),
            )
        return self.at.program


def with_occurrences(rows: Sequence[Site]) -> tuple[Site, ...]:
    """Return the sites of a step, those numbered that are like earlier ones."""
    counts: Counter[tuple[str, str, str, int, str, str | None]] = Counter()
    sites = []
    for row in rows:
        key = (row.phase, row.module, row.op, row.output, row.role, row.name if row.op == "" else None)
        sites.append(replace(row, occurrence=counts[key]) if counts[key] else row)
        counts[key] += 1
    return tuple(sites)


def is_number(value: Any) -> bool:
    """Return whether an argument is a value of the step: a number, or a list of numbers."""
    if isinstance(value, list | tuple):
        return all(map(is_number, value))
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def is_ambiguous(value: Any, *, is_number: bool) -> bool:
    """Return whether an argument may equal another that is not the same: 0.0 == -0.0, 1 == 1.0 == True."""
    if isinstance(value, list | tuple):
        return any(is_ambiguous(item, is_number=is_number) for item in value)
    if isinstance(value, float):
        return value == 0.0 or (is_number and value.is_integer())
    return is_number and isinstance(value, int | complex)
