"""What aligned rows are called with, and the order in which named rows are aligned.

Parameters may be registered, an optimizer given them, and a batch's entries listed in a different
order. Matches of an alignment never cross, so the units of the current step are put into the
reference's order before.
"""

import json
import struct
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from det_callbacks.runs.program import Program, Site, StepView, plain_value

Subject = Hashable
"""What a row is: its name, or the parameter that an op updates."""

Owners = frozenset[str]
NO_OWNERS: Owners = frozenset()

_GROUPS = ("state", "data", "gradient", "forward")
"""Phases whose named rows list tensors in an order that means nothing."""

_UPDATES = ("gradient", "optimizer")
"""Phases in which ops take one parameter after the other."""

_UNKNOWN = "a value of which only a digest was kept"
_ABSENT = "a tensor or nothing"
_NAN = 0x7FF8_0000_0000_0000


ArgumentDifference: TypeAlias = Mapping[str, tuple[str, str]]
"""How the arguments of two aligned calls differ: by name, the text of the reference's
value and the current one.

It is empty if they cannot be compared, because each side kept a digest of different arguments.
"""


class Unit(Protocol):
    """An op call, or a named row."""

    @property
    def sites(self) -> Sequence[Site]:
        """Its rows."""

    @property
    def owners(self) -> Sequence[Owners]:
        """The parameters that each row is for, see ``owners_of_updates``."""


class Chunk(NamedTuple):
    """Neighbouring units of one subject, by index."""

    subject: Subject
    units: range


class BlockKind(NamedTuple):
    """What neighbouring units of one block have in common."""

    phase: str
    module: str = ""
    has_ops: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Neighbouring units whose order says nothing: a group of named rows,
    or the updates of parameters.
    """

    kind: BlockKind
    chunks: tuple[Chunk, ...]


def in_reference_order(
    reference: Sequence[Unit], current: Sequence[Unit]
) -> tuple[list[int], tuple[str, ...]]:
    """Return the current step's units in the reference's order, by index,
    and the phases in which that changed it.

    Only blocks that both steps have are brought into order; a subject that one step has alone stays
    behind the one that it follows.
    """
    reference_blocks, current_blocks = _blocks(reference), _blocks(current)
    order, moved = list(range(len(current))), []
    for reference_block, current_block in _pairs(reference_blocks, current_blocks):
        chunks = _sorted_like(reference_block.chunks, current_block.chunks)
        if chunks != current_block.chunks:
            moved.append(current_block.kind.phase)
            start = current_block.chunks[0].units.start
            indices = [index for chunk in chunks for index in chunk.units]
            order[start : start + len(indices)] = indices
    return order, tuple(dict.fromkeys(moved))


def owners_of_updates(program: Program) -> list[Owners]:
    """Return, by position, the parameters that an op between backward pass and step's end is for;
    empty for other rows.

    They are those whose tensors the op reads or, if it reads none,
    whose updates and state read the op.
    """
    sites = program.sites
    updated = {site.of for site in sites if site.role == "named" and site.phase == "gradient"}
    owners = [frozenset([site.of]) if site.of in updated else NO_OWNERS for site in sites]
    # a tensor's writer, and the gradient that an update reads
    for position in range(len(sites) - 1, -1, -1):
        site = sites[position]
        if owners[position] and (not site.op or site.phase in _UPDATES):
            for read in site.inputs:
                if not site.op or sites[read].phase == "backward":
                    owners[read] = owners[read] or owners[position]
    of_updates = [at for at, site in enumerate(sites) if site.op and site.phase in _UPDATES]
    for position in of_updates:
        owners[position] = owners[position] or NO_OWNERS.union(
            *(owners[read] for read in sites[position].inputs)
        )
    needed_by: defaultdict[int, Owners] = defaultdict(frozenset)
    for position in range(len(sites) - 1, min(of_updates, default=len(sites)) - 1, -1):
        if sites[position].op:
            owners[position] = owners[position] or needed_by[position]
        for read in sites[position].inputs:
            needed_by[read] |= owners[position]
    updates = frozenset(of_updates)
    return [of_row if position in updates else NO_OWNERS for position, of_row in enumerate(owners)]


def _pairs(reference: Sequence[Block], current: Sequence[Block]) -> list[tuple[Block, Block]]:
    """Return the blocks of both steps of one kind, in order, if both have as many of that kind."""
    pairs: list[tuple[Block, Block]] = []
    for kind in dict.fromkeys(block.kind for block in reference):
        sides = [
            [block for block in blocks if block.kind == kind] for blocks in (reference, current)
        ]
        if len(sides[0]) == len(sides[1]):
            pairs += zip(*sides, strict=True)
    return pairs


def _sorted_like(reference: Sequence[Chunk], current: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Return the current chunks, those that the reference also has in its order."""
    place = {chunk: number for number, chunk in enumerate(_numbered(reference))}
    keyed, last = [], -1
    for chunk, (subject, number) in zip(current, _numbered(current), strict=True):
        last = place.get((subject, number), last)
        keyed.append((last, chunk))
    if [key for key, _ in keyed] == sorted(key for key, _ in keyed):
        return tuple(current)
    return tuple(chunk for _, chunk in sorted(keyed, key=lambda item: item[0]))


def _numbered(chunks: Iterable[Chunk]) -> list[tuple[Subject, int]]:
    """Return each chunk's subject, and how many chunks of that subject precede it."""
    seen: Counter[Subject] = Counter()
    numbered = []
    for chunk in chunks:
        numbered.append((chunk.subject, seen[chunk.subject]))
        seen[chunk.subject] += 1
    return numbered


def _blocks(units: Sequence[Unit]) -> list[Block]:
    blocks: list[Block] = []
    kinds = [*map(_kind_of, units), None]
    start = 0
    for index in range(1, len(kinds)):
        if kinds[index] != kinds[start]:
            if (kind := kinds[start]) is not None:
                blocks.append(Block(kind=kind, chunks=_chunks(units[start:index], start)))
            start = index
    return blocks


def _kind_of(unit: Unit) -> BlockKind | None:
    """Return the kind of a unit whose place among its neighbours says nothing; else None."""
    head = unit.sites[0]
    if head.op:
        is_for_one = all(len(owners) < 2 for owners in unit.owners)
        return (
            BlockKind(head.phase, has_ops=True) if head.phase in _UPDATES and is_for_one else None
        )
    module = head.module if head.phase == "forward" else ""  # outputs of a module are a group
    return (
        BlockKind(head.phase, module)
        if head.phase in _GROUPS and head.role in ("named", "samples")
        else None
    )


def _chunks(units: Sequence[Unit], first: int) -> tuple[Chunk, ...]:
    chunks: list[Chunk] = []
    subjects: list[Subject] = []
    for unit in units:
        owners = tuple(sorted(NO_OWNERS.union(*unit.owners)))
        # an op of no known parameter belongs to the one before it
        subjects.append(
            (owners or (subjects[-1] if subjects else ()))
            if unit.sites[0].op
            else unit.sites[0].name
        )
    start = 0
    for index in range(1, len(subjects) + 1):
        if index == len(subjects) or subjects[index] != subjects[start]:
            chunks.append(Chunk(subjects[start], range(first + start, first + index)))
            start = index
    return tuple(chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of one call, as JSON text by name."""

    values: Mapping[str, str]
    digested: tuple[str, ...] = ()  # names of the arguments that share one digest
    bits: int = 0  # that digest

    @property
    def canonical(self) -> Hashable:
        """Equal for equal arguments, with or without defaults."""
        return tuple(sorted(self.values.items())), self.digested, self.bits


@lru_cache(maxsize=10_000)
def _parsed(arguments: str) -> Mapping[str, str]:
    return {name: json.dumps(value) for name, value in json.loads(arguments).items()}


def read_arguments(view: StepView, output: int) -> Arguments:
    """Return the arguments of the call that an output row, or a lone argument row, belongs to."""
    site = view.program.sites[output]
    constants = _parsed(site.arguments)
    if not site.varying:
        return Arguments(values=constants)
    row = output if site.role == "argument" else output - site.output - 1
    assert view.program.sites[row].role == "argument", "the row of numbers comes before the outputs"
    bits, entry = int(view.record.digests[row]), view.layout.entries[row]
    value = None if entry is None else _decode(bits, entry.dtype)
    if value is not None:
        # two NaNs with different bits have the same text
        text = (
            f'"nan {bits:#x}"'
            if value != value and bits != _NAN
            else json.dumps(plain_value(value))
        )
        return Arguments(values={**constants, site.varying[0]: text})
    json_text = view.read_values().get(bits)
    if json_text is None:
        return Arguments(values=constants, digested=site.varying, bits=bits)
    texts = map(json.dumps, json.loads(json_text))
    return Arguments(values={**constants, **dict(zip(site.varying, texts, strict=True))})


def _differing(reference: Arguments, current: Arguments) -> ArgumentDifference | None:
    """Return how the arguments of two calls differ, or None if they are equal."""
    is_known = reference.digested == current.digested
    digested = {*reference.digested, *current.digested}
    names = [name for name in {**reference.values, **current.values} if name not in digested]
    pairs = {
        name: (reference.values.get(name, _ABSENT), current.values.get(name, _ABSENT))
        for name in names
    }
    values = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if is_known and reference.bits != current.bits:
        values |= dict.fromkeys(reference.digested, (_UNKNOWN, _UNKNOWN))
    return values if values or not is_known else None


def _decode(bits: int, tag: str) -> Any:
    """Return the number with these 64 bits, or None if they are a digest."""
    if tag == "float":
        return struct.unpack("<d", struct.pack("<Q", bits))[0]
    if tag == "int":
        return bits - 2**64 if bits >= 2**63 else bits
    return bool(bits) if tag == "bool" else None


def other_arguments(
    reference: StepView, current: StepView, pairs: Iterable[tuple[int, int]], differs: np.ndarray
) -> dict[int, ArgumentDifference]:
    """Return the rows with different arguments: the first of each call,
    and others that also differ.
    """
    reference_sites, current_sites = reference.program.sites, current.program.sites
    by_call: dict[int, ArgumentDifference | None] = {}
    by_row: dict[int, ArgumentDifference] = {}
    for row, (reference_place, current_place) in enumerate(pairs):
        if reference_place < 0 or current_place < 0 or not current_sites[current_place].op:
            continue
        reference_site = reference_sites[reference_place]
        current_site = current_sites[current_place]
        has_numbers = bool(reference_site.varying or current_site.varying)
        is_same = not has_numbers and reference_site.arguments == current_site.arguments
        if is_same or (
            reference_site.role == "argument" and _has_outputs(current_sites, current_place)
        ):
            continue
        call = current_place - current_site.output
        if is_first := call not in by_call:
            reference_arguments = read_arguments(reference, reference_place)
            by_call[call] = _differing(reference_arguments, read_arguments(current, current_place))
        difference = by_call[call]
        if difference is not None and (is_first or differs[row]):
            by_row[row] = difference
    return by_row


def _has_outputs(sites: tuple[Site, ...], argument: int) -> bool:
    """Return whether outputs of its call follow a row of arguments."""
    if argument + 1 == len(sites):
        return False
    following = sites[argument + 1]
    return (
        following.role in ("output", "value")
        and not following.output
        and following.op == sites[argument].op
    )
