"""Prediction: what earlier steps did at this position, so that nothing is built twice.

The steps seen so far form a tree of events (op calls and groups of named tensors). A step walks down from the root;
at each event the child taken most recently is tried first, then its siblings (accumulation steps, several optimizers
and data-dependent branches alternate), and only when none fits a new event is built. Sites, source lines and programs
hang on the events, so a step like an earlier one costs comparisons only.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from det_callbacks.runs.program import Program, Site
from det_callbacks.runs.values import plain_value

MAX_EVENTS = 200_000


class _Varying:
    """Stands for an argument that changes from step to step: equal to everything."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # equal to everything, so no hash can be right

    def __eq__(self, other: object) -> bool:
        return True


VARYING = _Varying()


class _NotANumber:
    """Stands for NaN among the arguments of an event: equal to every NaN."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # NaNs of one process have different hashes

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, float | complex) and other != other)


NAN = _NotANumber()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Where an op inside a backward pass belongs.

    Attributes:
        module: of the forward op whose gradient it computes; "?" when that cannot be told.
        source: of that forward op; None when the op's own stack tells it (recomputation).
        name: the parameter whose gradient is accumulated, else None.
        recomputed: it repeats a forward op under activation checkpointing.
    """

    module: str
    source: tuple[str, ...] | None
    name: str | None = None
    recomputed: bool = False


Context = str | Attribution
"""The running module's name in the forward pass, an attribution in the backward pass."""


def module_of(context: Context) -> str:
    """Return the qualified name of the module that an op belongs to."""
    return context if isinstance(context, str) else context.module


class Event:
    """One op call, or one group of named tensors, at one place of the tree.

    ``depth`` is the number of events before it in its step. ``consts`` are the arguments that are no tensors, in order;
    ``keywords`` the names of the arguments passed by name; ``reads`` the positions read; ``names`` the names of the
    input sites made for it; ``exact`` is the text form of ``consts`` where equality would be too weak
    (1 == 1.0 == True, 0.0 == -0.0).
    """

    __slots__ = (
        "attributions",
        "children",
        "consts",
        "context",
        "depth",
        "exact",
        "func",
        "functions",
        "is_in_place",
        "keywords",
        "likely",
        "names",
        "num_outputs",
        "op_base",
        "parent",
        "phase",
        "program",
        "reads",
        "rows",
        "source",
        "varying",
    )

    def __init__(
        self,
        parent: "Event | None",
        func: object,
        phase: str,
        context: Context,
        consts: list[Any],
        reads: list[Any],
        names: list[str | None],
        num_outputs: int,
        keywords: tuple[str, ...] = (),
    ) -> None:
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.func = func
        self.phase = phase
        self.context = context
        self.consts = consts
        self.reads = reads
        self.names = names
        self.num_outputs = num_outputs
        self.keywords = keywords
        self.exact: str | None = None
        self.varying: tuple[int, ...] = ()
        self.rows: tuple[Site, ...] = ()
        self.source: tuple[str, ...] = ()
        self.op_base = ""
        self.is_in_place = False
        self.functions: tuple[tuple[object, str], ...] = ()
        self.attributions: dict[object, Attribution] = {}
        self.children: list[Event] = []
        self.likely: Event | None = None
        self.program: Program | None = None

    @property
    def module(self) -> str:
        """Qualified name of the module it belongs to."""
        return module_of(self.context)

    def fits(
        self,
        func: object,
        phase: str,
        context: Context,
        consts: list[Any],
        reads: list[Any],
        names: list[str | None],
        num_outputs: int,
        keywords: tuple[str, ...] = (),
    ) -> bool:
        """Return whether a call is this event again."""
        return (
            self.func is func
            and (self.context is context or self.context == context)
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


def exact_form(consts: Sequence[Any], varying: Sequence[int]) -> str:
    """Return the text form of the constant arguments but those that vary."""
    return repr([const for index, const in enumerate(consts) if index not in varying])


def needs_exact(value: Any, *, is_number: bool) -> bool:
    """Return whether an argument may equal another that is not the same.

    Args:
        value: the argument.
        is_number: whether any kind of number is taken, so that 1, 1.0 and True are not the same.
    """
    if isinstance(value, list | tuple):
        return any(needs_exact(item, is_number=is_number) for item in value)
    if isinstance(value, float) and value == 0.0:
        return True
    if not is_number or not isinstance(value, int | float | complex):
        return False
    return isinstance(value, complex) or (value == value and abs(value) < 2**63 and value == int(value))


def comparable(value: Any) -> Any:
    """Return an argument in a form that equals itself: NaN does not."""
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value] if any(item != item for item in value) else value
    return NAN if isinstance(value, float | complex) and value != value else value


class ProgramTree:
    """The events of all steps seen so far, bounded in number.

    Attributes:
        expected: the program that the step under way has in the reference, if there is one.
        earlier: programs of the run that a resumed fit goes on with.
    """

    def __init__(self) -> None:
        self.expected: tuple[Program, ...] = ()
        self.earlier: tuple[Program, ...] = ()
        self.root = Event(None, None, "", "", [], [], [], 0)
        self.num_events = 0
        self._arguments: dict[tuple[object, ...], tuple[list[Any], tuple[int, ...]]] = {}

    def trim(self) -> None:
        """Forget everything once it is too large; call between steps."""
        if self.num_events > MAX_EVENTS:
            self.root = Event(None, None, "", "", [], [], [], 0)
            self.num_events = 0
            self._arguments.clear()

    def varying(self, event: Event, op: str, names: Sequence[str], position: int) -> tuple[int, ...]:
        """Return which arguments of a new event were others when the same call was made in an earlier step.

        Calls are the same when op, keywords, phase, module and depth agree: the argument sites that this very result
        adds to a program shift positions, but not depths. The first steps after a resume have no steps before them, so
        that what a program says of the same position counts too: they get the program of an uninterrupted run.

        Args:
            event: the new one.
            op: ``namespace.op.overload``.
            names: of ``event.consts``.
            position: site that would tell its varying arguments.
        """
        recorded = self._recorded_varying(event, op, position)
        key = (event.func, event.keywords, event.phase, event.context, event.depth)
        known = self._arguments.get(key)
        varying: tuple[int, ...] = ()
        if known is not None and len(known[0]) == len(event.consts):
            pairs = zip(known[0], event.consts, strict=True)
            varying = tuple(
                index for index, (old, new) in enumerate(pairs) if index in known[1] or repr(old) != repr(new)
            )
        if recorded:
            varying = tuple(index for index, name in enumerate(names) if index in varying or name in recorded)
        self._arguments[key] = (event.consts, varying)
        return varying

    def _recorded_varying(self, event: Event, op: str, position: int) -> set[str]:
        recorded: set[str] = set()
        for program in (*self.expected, *self.earlier):
            site = program.sites[position] if position < len(program) else None
            if site is None or site.role != "argument":
                continue
            if (site.op, site.phase, site.module) == (op, event.phase, event.module):
                recorded.update(site.varying)
        return recorded

    def add(self, event: Event) -> None:
        """Hang a new event below its parent."""
        assert event.parent is not None
        event.parent.children.append(event)
        self.num_events += 1

    def program_at(
        self,
        event: Event,
        *,
        ops_seen: int,
        ops_digested: int,
        skipped: Mapping[str, int],
        opaque_regions: tuple[str, ...],
    ) -> Program:
        """Return the program of the step that ended with this event, built at most once."""
        if event.program is None:
            path: list[Event] = []
            walker: Event | None = event
            while walker is not None:
                path.append(walker)
                walker = walker.parent
            rows = [row for step in reversed(path) for row in step.rows]
            event.program = Program(
                sites=_with_occurrences(rows),
                ops_seen=ops_seen,
                ops_digested=ops_digested,
                ops_skipped={reason: count for reason, count in sorted(skipped.items()) if count},
                opaque_regions=opaque_regions,
            )
        return event.program


def _with_occurrences(rows: Sequence[Site]) -> tuple[Site, ...]:
    counts: Counter[tuple[str, str, str, int, str, str | None]] = Counter()
    sites = []
    for row in rows:
        key = (row.phase, row.module, row.op, row.output, row.role, row.name if row.op == "" else None)
        sites.append(replace(row, occurrence=counts[key]) if counts[key] else row)
        counts[key] += 1
    return tuple(sites)


def arguments_json(names: Sequence[str], consts: Sequence[Any]) -> str:
    """Return the JSON object of constant arguments; varying ones are left out."""
    pairs = zip(names, consts, strict=True)
    return json.dumps(
        {name: plain_value(const) for name, const in pairs if const is not VARYING}, separators=(",", ":")
    )
