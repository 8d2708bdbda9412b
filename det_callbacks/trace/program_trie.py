"""The programs of all steps so far, as a trie: what earlier steps did at a position is not built twice.

A step walks down from the root. At each call the child taken most recently is tried first, then its siblings
(accumulation steps, several optimizers and data-dependent branches alternate), and only when none fits a new node is
built. Sites, source lines and programs hang on the nodes, so that a step like an earlier one costs comparisons only.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from det_callbacks.runs.program import Program, Site
from det_callbacks.trace.arguments import exact_form
from det_callbacks.trace.source import read_text

MAX_NODES = 200_000
_MAX_SIBLINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OpScope:
    """Where an op belongs.

    Attributes:
        module: qualified name of the running module; in a backward pass that of the forward op whose gradient the op
            computes; "" outside any module, "?" when it cannot be told.
        source: the lines of that forward op; None when the op's own stack tells them.
        name: the parameter whose gradient is accumulated, else None.
        recomputed: the op repeats a forward op under activation checkpointing.
    """

    module: str
    source: tuple[str, ...] | None = None
    name: str | None = None
    recomputed: bool = False


@dataclass(slots=True, eq=False)
class CallNode:
    """One call of an op, or one group of named tensors, at one place of the trie.

    Attributes:
        func: the op's overload, or what stands for another kind of call.
        consts: the arguments that are no tensors, in order; ``keywords`` are the names of those passed by name.
        reads: positions that the call reads; ``names`` are those of the input sites made for it.
        exact: text form of ``consts`` where equality would be too weak (1 == 1.0 == True, 0.0 == -0.0).
        varying: indices of the arguments that change from step to step.
        rows: the sites of the call.
        depth: number of calls before it in its step.
        op_base, is_in_place, functions, scopes: what tells whether an autograd node is of this call (backward.py).
    """

    parent: "CallNode | None"
    func: object
    phase: str
    scope: OpScope
    consts: list[Any]
    reads: list[Any]
    names: list[Any]
    num_outputs: int
    keywords: tuple[str, ...] = ()
    exact: str | None = None
    varying: tuple[int, ...] = ()
    rows: tuple[Site, ...] = ()
    source: tuple[str, ...] = ()
    op_base: str = ""
    is_in_place: bool = False
    functions: tuple[tuple[object, str], ...] = ()
    scopes: dict[object, OpScope] = field(default_factory=dict)
    children: "list[CallNode]" = field(default_factory=list)
    likely: "CallNode | None" = None
    program: Program | None = None
    depth: int = 0

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.depth = self.parent.depth + 1

    @property
    def module(self) -> str:
        """Qualified name of the module it belongs to."""
        return self.scope.module

    def fits(
        self,
        func: object,
        phase: str,
        scope: OpScope,
        consts: list[Any],
        reads: list[Any],
        names: list[Any],
        num_outputs: int,
        keywords: tuple[str, ...] = (),
    ) -> bool:
        """Return whether a call is this one again."""
        return (
            self.func is func
            and (self.scope is scope or self.scope == scope)
            and self.phase == phase
            and self.reads == reads
            and self.num_outputs == num_outputs
            and self.names == names
            and self.consts == consts
            and self.keywords == keywords
            and (self.exact is None or self.is_exactly(consts))
        )

    def is_exactly(self, consts: list[Any]) -> bool:
        """Return whether constant arguments that are equal are also the same."""
        return self.exact == exact_form(consts, self.varying)


NOWHERE = OpScope(module="")


class ProgramTrie:
    """The calls of all steps seen so far, bounded in number, and where the step under way is.

    Attributes:
        at: the last call of the step under way.
        expected: the program that the step has in the reference, if there is one.
        earlier: programs of the run that a resumed fit goes on with.
    """

    def __init__(self) -> None:
        self.expected: tuple[Program, ...] = ()
        self.earlier: tuple[Program, ...] = ()
        self.num_nodes = 0
        self._root = self.at = CallNode(None, None, "", NOWHERE, [], [], [], 0)
        self._arguments: dict[tuple[object, ...], tuple[list[Any], tuple[int, ...]]] = {}

    def begin(self, expected: tuple[Program, ...]) -> None:
        """Start a step; forget everything once it is too much."""
        if self.num_nodes > MAX_NODES:
            self._root = CallNode(None, None, "", NOWHERE, [], [], [], 0)
            self.num_nodes = 0
            self._arguments.clear()
        self.at = self._root
        self.expected = expected

    def step_to(self, call: tuple[Any, ...], build: Callable[[CallNode], None]) -> CallNode:
        """Go to a call: the likely one, a sibling, or a new one.

        Args:
            call: the arguments of ``CallNode`` after the first.
            build: fills in a new node; one that it raises for is not kept.
        """
        parent = self.at
        node = parent.likely
        if node is None or not node.fits(*call):
            siblings = parent.children[: -_MAX_SIBLINGS - 1 : -1]
            node = next((child for child in siblings if child.fits(*call)), None)
            if node is None:
                node = CallNode(parent, *call)
                build(node)
                parent.children.append(node)
                self.num_nodes += 1
            parent.likely = node
        self.at = node
        return node

    def varying(self, node: CallNode, op: str, names: Sequence[str], position: int) -> tuple[int, ...]:
        """Return which arguments of a new node were others when the same call was made in an earlier step.

        Calls are the same when op, keywords, phase, module and depth agree: the argument sites that this very result
        adds to a program shift positions, but not depths. The first steps after a resume have no steps before them, so
        that what a program says of the same position counts too: they get the program of an uninterrupted run.

        Args:
            node: the new one.
            op: ``namespace.op.overload``.
            names: of ``node.consts``.
            position: of the site that would tell its varying arguments.
        """
        recorded: set[str] = set()
        for program in (*self.expected, *self.earlier):
            site = program.sites[position] if position < len(program) else None
            is_told = site is not None and site.role == "argument"
            if site is not None and is_told and (site.op, site.phase, site.module) == (op, node.phase, node.module):
                recorded.update(site.varying)
        key = (node.func, node.keywords, node.phase, node.scope, node.depth)
        known = self._arguments.get(key)
        varying: tuple[int, ...] = ()
        if known is not None and len(known[0]) == len(node.consts):
            pairs = zip(known[0], node.consts, strict=True)
            varying = tuple(
                index for index, (old, new) in enumerate(pairs) if index in known[1] or repr(old) != repr(new)
            )
        if recorded:
            varying = tuple(index for index, name in enumerate(names) if index in varying or name in recorded)
        self._arguments[key] = (node.consts, varying)
        return varying

    def rows(self) -> list[Site]:
        """Return the sites of the step up to here."""
        path: list[CallNode] = []
        node: CallNode | None = self.at
        while node is not None:
            path.append(node)
            node = node.parent
        return [row for node in reversed(path) for row in node.rows]

    def program(
        self, *, ops_seen: int, ops_digested: int, skipped: Mapping[str, int], opaque_regions: tuple[str, ...]
    ) -> Program:
        """Return the program of the step that ends here, built at most once."""
        if self.at.program is None:
            sites = with_occurrences(self.rows())
            self.at.program = Program(
                sites=sites,
                ops_seen=ops_seen,
                ops_digested=ops_digested,
                ops_skipped={reason: count for reason, count in sorted(skipped.items()) if count},
                opaque_regions=opaque_regions,
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
