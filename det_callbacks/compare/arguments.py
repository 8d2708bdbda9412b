"""The arguments of aligned calls: numbers stand in a row of their own, all else in the program."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from det_callbacks.runs.program import StepView, plain_value

_UNKNOWN = "a value that was kept as a digest only"
_ABSENT = "a tensor or nothing"
_NAN = 0x7FF8_0000_0000_0000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentDifference:
    """How the arguments of two aligned calls differ.

    Attributes:
        values: argument name -> (text of the reference's value, text of the current one).
        is_known: False where the values cannot be compared: each side kept a digest of other arguments.
    """

    values: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of one call.

    Attributes:
        values: name -> JSON text of its value.
        digested: names of those of which the run keeps a common digest only, and no text.
        bits: that digest.
    """

    values: Mapping[str, str]
    digested: tuple[str, ...] = ()
    bits: int = 0


class ArgumentReader:
    """Reads the arguments of the ops of one step.

    Args:
        view: the step.
    """

    def __init__(self, view: StepView) -> None:
        self._view = view
        self._parsed: dict[str, dict[str, str]] = {}

    def read(self, output: int) -> Arguments:
        """Return the arguments of the call that an output row belongs to.

        Args:
            output: position of the row; that of the argument row itself for a call without outputs.
        """
        site = self._view.program.sites[output]
        constants = self._parsed.get(site.arguments)
        if constants is None:
            constants = {name: json.dumps(value) for name, value in json.loads(site.arguments).items()}
            self._parsed[site.arguments] = constants
        if not site.varying:
            return Arguments(values=constants)
        row = output if site.role == "argument" else output - site.output - 1
        assert self._view.program.sites[row].role == "argument", "the row of numbers comes before the outputs"
        bits, entry = int(self._view.record.digests[row]), self._view.layout.entries[row]
        value = None if entry is None else _decode(bits, entry.dtype)
        if value is not None:
            # two NaNs of other bits would have the same text
            text = f'"nan {bits:#x}"' if value != value and bits != _NAN else json.dumps(plain_value(value))
            return Arguments(values={**constants, site.varying[0]: text})
        known = self._view.read_values().get(bits)
        if known is None:
            return Arguments(values=constants, digested=site.varying, bits=bits)
        numbers = zip(site.varying, map(json.dumps, json.loads(known)), strict=True)
        return Arguments(values={**constants, **dict(numbers)})

    def canonical(self, output: int) -> str:
        """Return a text that is equal for equal arguments, whichever were left to their defaults."""
        site = self._view.program.sites[output]
        if site.arguments == "{}" and not site.varying:
            return "{}"
        known = self.read(output)
        return json.dumps([sorted(known.values.items()), known.digested, known.bits])


def differing_arguments(reference: Arguments, current: Arguments) -> ArgumentDifference | None:
    """Return how two calls differ in their arguments, None where they agree."""
    is_known = reference.digested == current.digested
    names = dict.fromkeys((*reference.values, *current.values))
    compared = [name for name in names if name not in {*reference.digested, *current.digested}]
    pairs = {name: (reference.values.get(name, _ABSENT), current.values.get(name, _ABSENT)) for name in compared}
    values = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if is_known and reference.bits != current.bits:
        values |= dict.fromkeys(reference.digested, (_UNKNOWN, _UNKNOWN))
    return None if is_known and not values else ArgumentDifference(values=values, is_known=is_known or bool(values))


def _decode(bits: int, tag: str) -> Any:
    """Return the number that the 64 bits of an argument row are, None where they are a digest."""
    if tag == "float":
        return struct.unpack("<d", struct.pack("<Q", bits))[0]
    if tag == "int":
        return bits - 2**64 if bits >= 2**63 else bits
    return bool(bits) if tag == "bool" else None
