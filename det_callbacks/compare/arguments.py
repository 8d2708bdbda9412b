"""The arguments of aligned calls: numbers have rows, everything else is in the program."""

import json
import struct
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from det_callbacks.runs.program import Site, StepView, plain_value

_UNKNOWN = "a value of which only a digest was kept"
_ABSENT = "a tensor or nothing"
_NAN = 0x7FF8_0000_0000_0000


ArgumentDifference: TypeAlias = Mapping[str, tuple[str, str]]
"""How the arguments of two aligned calls differ: by name, the text of the reference's value and the current one.

It is empty if they cannot be compared, because each side kept a digest of different arguments.
"""


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
        text = f'"nan {bits:#x}"' if value != value and bits != _NAN else json.dumps(plain_value(value))
        return Arguments(values={**constants, site.varying[0]: text})
    known = view.read_values().get(bits)
    if known is None:
        return Arguments(values=constants, digested=site.varying, bits=bits)
    texts = map(json.dumps, json.loads(known))
    return Arguments(values={**constants, **dict(zip(site.varying, texts, strict=True))})


def _differing(reference: Arguments, current: Arguments) -> ArgumentDifference | None:
    """Return how the arguments of two calls differ, or None if they are equal."""
    is_known, digested = reference.digested == current.digested, {*reference.digested, *current.digested}
    names = [name for name in {**reference.values, **current.values} if name not in digested]
    pairs = {name: (reference.values.get(name, _ABSENT), current.values.get(name, _ABSENT)) for name in names}
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
    """Return the rows with different arguments: the first of each call, and others that also differ."""
    reference_sites, current_sites = reference.program.sites, current.program.sites
    by_call: dict[int, ArgumentDifference | None] = {}
    found: dict[int, ArgumentDifference] = {}
    for row, (reference_place, current_place) in enumerate(pairs):
        if reference_place < 0 or current_place < 0 or not current_sites[current_place].op:
            continue
        reference_site, current_site = reference_sites[reference_place], current_sites[current_place]
        has_numbers = bool(reference_site.varying or current_site.varying)
        is_same = not has_numbers and reference_site.arguments == current_site.arguments
        if is_same or (reference_site.role == "argument" and _has_outputs(current_sites, current_place)):
            continue
        call = current_place - current_site.output
        if is_first := call not in by_call:
            reference_arguments = read_arguments(reference, reference_place)
            by_call[call] = _differing(reference_arguments, read_arguments(current, current_place))
        difference = by_call[call]
        if difference is not None and (is_first or differs[row]):
            found[row] = difference
    return found


def _has_outputs(sites: tuple[Site, ...], argument: int) -> bool:
    """Return whether outputs of its call follow a row of arguments."""
    if argument + 1 == len(sites):
        return False
    following = sites[argument + 1]
    return following.role in ("output", "value") and not following.output and following.op == sites[argument].op
